"""What two runs differ in: config, code, environment, data, ranks, result, and the first step at which they part.
And what to type to train a run again, so that the two can be compared.

The steps are compared by `digests.bin`: a line of JSON with the names, then rows of 64-bit numbers: the step, and a
digest for each name.
"""

import filecmp
import json
import os
import shlex
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, first_of, path_value
from lockstep.runs.record import DIFF, FINISHED, Run, best_of, configs_of, run_exit_code, state_of, versions
from lockstep.source_code import hash_of_source
from lockstep.text import MISSING, aligned, differing, plain

LONGEST_CELL = 60
Row = tuple[str, str, str, str]
"""(section, key, value in A, value in B)"""
DIGESTS = "digests.bin"
NUMBERS = "validation_numbers"  # a long text, which `validation_data` has a hash of
LOSS, GRADIENT = "loss", "gradient of "
NAMED = 5  # tensors in a sentence


def why(a: Run, b: Run) -> list[str]:
    """The lines of `runs.py why`. Raises ConfigError for digests that cannot be read."""
    header: Row = ("", "", f"A {a['folder']}", f"B {b['folder']}")
    rows = [tuple(map(_short, row)) for row in (*differences(a, b), *_result(a, b))]
    lines = aligned([header, *rows])
    same = [name for name in ("config", "code", "environment", "data", "ranks") if name not in {row[0] for row in rows}]
    if same:
        lines.append(f"the same: {', '.join(same)}")
    return [*lines, *_advice(a, b), _weights(a, b), _first_step(a, b)]


def _short(cell: str) -> str:
    return cell if len(cell) <= LONGEST_CELL else f"{cell[: LONGEST_CELL - 1]}…"


def differences(a: Run, b: Run) -> list[Row]:
    """What can have made the difference between two runs, a row each."""
    rows = _rows("config", _over_lives(a), _over_lives(b))
    rows += _code(a["code"], b["code"])
    rows += _rows("environment", a["environment"], b["environment"])
    of_data = ({key: value for key, value in run["data"].items() if key != NUMBERS} for run in (a, b))
    rows += _rows("data", *of_data)
    rows += _rows("ranks", _ranks(a), _ranks(b))
    return rows


def _rows(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    return [
        (section, key, plain(a[key]) if key in a else MISSING, plain(b[key]) if key in b else MISSING)
        for key in differing(a, b)
    ]


def _over_lives(run: Run) -> dict[str, Any]:
    """{key: its value, or "0.1, then 0.05" where a life was resumed with another one}."""
    configs = configs_of(run)
    values: dict[str, Any] = {}
    for key, last in configs[-1].items():
        seen = [plain(config[key]) for config in configs if key in config]
        changes = [value for index, value in enumerate(seen) if index == 0 or value != seen[index - 1]]
        values[key] = last if len(changes) == 1 else ", then ".join(changes)
    return values


def _code(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """Nothing if the files of src/ and conf/ are the same, whatever the commits; else what git says of them, too.

    Of the user's modules those count that both runs have loaded: some are loaded only when they are needed.
    """
    rows: list[Row] = []
    if a.get("source") != b.get("source"):
        names = {"source": "src/ and conf/", "commit": "commit", "diff_sha256": "uncommitted diff"}
        names["untracked"] = "untracked"
        for key, name in names.items():
            if a.get(key) != b.get(key):
                one, other = (plain(code[key]) if code.get(key) else MISSING for code in (a, b))
                rows.append(("code", name, one, other))
    mine, others = a.get("modules", {}), b.get("modules", {})
    common = mine.keys() & others.keys()
    return rows + _rows("code", {name: mine[name] for name in common}, {name: others[name] for name in common})


def _ranks(run: Run) -> dict[str, Any]:
    return {
        "number in each life": [life["world_size"] for life in run["lives"]],
        "hosts": sorted({host for life in run["lives"] for host in life["hosts"]}),
    }


def _result(a: Run, b: Run) -> list[Row]:
    def shown(run: Run) -> list[str]:
        (value, step), code = best_of(run), run_exit_code(run)
        state = state_of(run) if code is None else f"{state_of(run)}, exit code {code}"
        best = MISSING if value is None else f"{value!r} at step {step}"
        return [state, best, str(run["steps"]), plain(run["samples_per_second"])]

    names = ["state", f"best {a['objective']['name']}", "steps", "samples/s"]
    return [("result", *row) for row in zip(names, shown(a), shown(b), strict=True)]


def _advice(a: Run, b: Run) -> list[str]:
    """What to type to see the code that differs."""
    one, other = a["code"], b["code"]
    if one.get("source") == other.get("source"):
        return []
    lines = []
    commits = one.get("commit"), other.get("commit")
    if None not in commits and commits[0] != commits[1]:
        lines.append(f"the commits:             git diff {commits[0][:10]} {commits[1][:10]} -- src conf")
    files = [Path(run["folder"], DIFF) for run in (a, b)]
    if one.get("diff_sha256") != other.get("diff_sha256"):
        diffs = [str(path) for path in files if path.exists()]
        if diffs:
            lines.append(f"the uncommitted changes: {'diff' if len(diffs) == 2 else 'cat'} {' '.join(diffs)}")
    return lines


def _weights(a: Run, b: Run) -> str:
    files = [Path(run["folder"], "model.pt") for run in (a, b)]
    missing = [path for path in files if not path.exists()]
    if missing:
        return f"weights: there is no {missing[0]}"
    same = filecmp.cmp(files[0], files[1], shallow=False)
    return f"weights: the two model.pt hold {'the same bits' if same else 'other bits'}"


def _first_step(a: Run, b: Run) -> str:
    tables = [read_digests(Path(run["folder"])) for run in (a, b)]
    if tables[0] is None or tables[1] is None:
        without = a if tables[0] is None else b
        return f"steps:   {without['folder']} has no digests; type trainer.digest=on to let a run write them"
    sizes = {life["world_size"] for run in (a, b) for life in run["lives"]}
    return f"steps:   {first_differing_step(tables[0], tables[1], with_loss=len(sizes) == 1)}"


@dataclass(frozen=True)
class StepTable:
    """names: what a row has a digest of. rows: {step: digests}, in the order of steps."""

    names: list[str]
    rows: Mapping[int, Sequence[int]]


def row_bytes(names: int) -> int:
    """The length of a row."""
    return 8 * (names + 1)


def read_digests(folder: Path) -> StepTable | None:
    """What trainer.digest has left in a run folder. None without the file. Raises ConfigError for a damaged one."""
    path = folder / DIGESTS
    if not path.exists():
        return None
    with open(path, "rb") as file:
        try:
            names = list(json.loads(file.readline())["names"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is damaged: its first line has no names; type rm {path}") from None
        content = file.read()
    width = len(names) + 1
    numbers = array("q", content[: len(content) // row_bytes(len(names)) * row_bytes(len(names))])  # a kill cuts a row
    rows = {numbers[start]: numbers[start + 1 : start + width] for start in range(0, len(numbers), width)}
    return StepTable(names, rows)


def first_differing_step(one: StepTable, other: StepTable, with_loss: bool) -> str:
    """The sentence about the first step at which two runs have other digests, and the tensors that differ there.

    with_loss: False if rank 0 had other samples in the two runs, as with other numbers of ranks.
    """
    names = [name for name in one.names if name in other.names and (with_loss or name != LOSS)]
    if len(names) <= 1:
        return "the models have no weights of the same names, so their digests cannot be compared"
    pairs = [(one.names.index(name), other.names.index(name)) for name in names]
    steps = [step for step in one.rows if step in other.rows]
    if one.rows and other.rows and (max(one.rows) < min(other.rows) or max(other.rows) < min(one.rows)):
        a, b = (f"{min(table.rows)} to {max(table.rows)}" for table in (one, other))
        return f"no step is in both: A has digests of the steps {a}, and B of the steps {b}"
    if not steps:
        return "no step has digests in both; type the same trainer.digest= in both"
    before = None
    for step in steps:
        first, second = one.rows[step], other.rows[step]
        differing = [name for name, (i, j) in zip(names, pairs, strict=True) if first[i] != second[j]]
        if differing:
            return _describe(step, before, names, differing)
        before = step
    return f"all digests are the same, of {len(steps)} steps from {steps[0]} to {steps[-1]}"


def _describe(step: int, before: int | None, names: list[str], differing: list[str]) -> str:
    gradients = [name for name in differing if name.startswith(GRADIENT)]
    weights = [name for name in differing if name != LOSS and name not in gradients]
    if differing[0] == LOSS and not gradients:
        what = "the loss differs"
    elif differing[0] == LOSS:
        what = f"the loss differs, and {first_of(gradients, NAMED)}"
    elif gradients:
        what = f"the loss is the same, and {first_of(gradients, NAMED)} {_verb(gradients)}"
    else:
        what = (
            f"the loss and all gradients are the same, and after the update {first_of(weights, NAMED)} {_verb(weights)}"
        )
        all_weights = [name for name in names if name != LOSS and not name.startswith(GRADIENT)]
        what += f" ({len(weights)} of {len(all_weights)} weights and buffers)"
    sentence = f"the runs part at step {step}: {what}"
    if before is not None and step - before > 1:
        sentence += f"; the digests of step {before} are the same, and the steps between have none: "
        sentence += "type trainer.digest=1 in both runs for the exact step"
    elif before is None and step > 1:
        sentence += f"; this is the first step with digests: it may be one of 1 to {step}; "
        sentence += "type trainer.digest=1 in both runs for the exact step"
    return sentence


def _verb(names: list[str]) -> str:
    return "differs" if len(names) == 1 else "differ"


def again(run: Run) -> list[str]:
    """The lines of `runs.py again`: how to go on with a run that has not finished, how to train it once more in a new
    folder, and how to compare the two. Before them, what is no longer as it was.
    """
    folder = Path(os.path.abspath(run["folder"]))  # . and .. have names there
    target, number = folder.with_name(f"{folder.name}-again"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}-again-{number}")
    rows = [("first:", line) for line in _changed_since(run)]
    if state_of(run) != FINISHED:
        rows.append(("go on:", _command(run, folder, _words(run, without=("trainer.pause_after=",)))))
    words = _words(run)
    if run["lives"][0]["from_step"] > 0:
        words = [*_words(run, without=("resume=",)), f"resume={path_value(_first_snapshot(run))}"]
    rows.append(("train again:", _command(run, target, words)))
    rows.append(("compare:", shlex.join(["python", "src/runs.py", "why", run["folder"], os.path.relpath(target)])))
    return aligned(rows)


def _words(run: Run, without: tuple[str, ...] = ()) -> list[str]:
    """The overrides of a run, of a key typed twice the last one, then its folders of configs.

    A time that has ended it becomes the steps, and the learning rates, that it had then.

    The ranks of torchrun are started by launch=torchrun.
    """
    typed = {word.partition("=")[0]: word for word in run["overrides"]}
    if run["config"].get("trainer.max_time") is not None and state_of(run) == FINISHED:  # the steps depend on the speed
        typed["trainer.max_time"] = f"trainer.max_time={run['steps']}steps"
        if run["config"]["scheduler.over"] == "time":
            typed["scheduler.over"] = f"scheduler.over=[{','.join(map(str, run.get('time_shares', [])))}]"
    words, first = [word for word in (*typed.values(), *run["flags"]) if not word.startswith(without)], run["lives"][0]
    if first["launcher"] in ("torchrun", "environment") and first["world_size"] > 1:
        words = [word for word in words if not word.startswith("launch")]
        words += ["launch=torchrun", f"launch.nproc_per_node={first['world_size']}"]
    return words


def _command(run: Run, folder: Path, words: Sequence[str]) -> str:
    script = next((word for word in shlex.split(run["command"]) if word.endswith("train.py")), "src/train.py")
    typed = shlex.join(["python", script, *words, f"hydra.run.dir={path_value(folder)}"])
    return typed if run["cwd"] == os.getcwd() else f"cd {shlex.quote(run['cwd'])} && {typed}"


def _first_snapshot(run: Run) -> Path:
    """The snapshot that a run with resume= has started from. The folder may have newer ones by now.

    Raises ConfigError if it is gone.
    """
    step = run["lives"][0]["from_step"]
    where = Path(run["cwd"], str(run["config"]["resume"]))
    for path in (where, where / f"step_{step:08d}.pt", where / "snapshots" / f"step_{step:08d}.pt"):
        if path.is_file():
            return path
    raise ConfigError(
        f"{run['folder']} started from step {step} of {where}, and that snapshot is gone; "
        f"type python src/runs.py again {shlex.quote(str(where))} to get it back"
    )


def _changed_since(run: Run) -> list[str]:
    """Why a repetition may have other bits, each with what to type where something helps."""
    lines = []
    now, then, code, lives = versions(), run["environment"], run["code"], run["lives"]
    for name in [name for name in now if name in then and then[name] != now[name]]:
        install = f"use Python {then[name]}" if name == "python" else f"type pip install {name}=={then[name]}"
        lines.append(f"{name} was {then[name]} and is {now[name]}; {install}")
    if code.get("source") != hash_of_source():
        advice = "copy the src/ and conf/ of that run here"
        if "commit" in code:
            patch = f" && git apply {shlex.quote(os.path.abspath(Path(run['folder'], DIFF)))}"
            advice = f"type git checkout {code['commit'][:10]}{patch if code.get('diff_bytes') else ''}"
        lines.append(f"src/ or conf/ have changed since; {advice}")
    if len({life.get("config_hash") for life in lives}) > 1 or len({str(life.get("source")) for life in lives}) > 1:
        lines.append("it was resumed with another config or other code; the command below is that of its last part")
    sizes = [life["world_size"] for life in lives]
    hosts = sorted({host for life in lives for host in life["hosts"]})
    if len(set(sizes)) > 1 or len(hosts) > 1:
        lines.append(
            f"it ran on {', then '.join(map(str, sizes))} ranks of {', '.join(hosts)}; start it there likewise"
        )
    return lines
