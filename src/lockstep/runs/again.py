"""Repeats a run from its folder, and says whether the bits are the same."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError, path_value
from lockstep.runs.code import DIFF, versions
from lockstep.runs.compare import differing, explain
from lockstep.runs.digests import read_digests
from lockstep.runs.record import FINISHED, PAUSED, REPEATED, Run, read_run, state_of
from lockstep.runs.table import plain
from lockstep.source_code import ROOT, hash_of_source

ONE_MACHINE = {"python", "torchrun", "environment", "spawn", "fork"}
ELSEWHERE = ("launch.", "run_dir", "resume")  # config keys that say where a run computes, and from where it goes on

FILE_TIMES = "training_file_times"  # of a copy they are others


def repeat(folder: Path, into: Path | None) -> int:
    """Train again as `folder` says, and print what comes of it. Returns the exit code: 0 for the same bits, else 1.

    Raises ConfigError if the run cannot be repeated with this code, these packages or these numbers of ranks.
    """
    run = read_run(folder)
    require_repeatable(run)
    target = Path(os.path.abspath(into or _free_name(folder)))
    command = command_of(run, target)
    _create(target)
    print(f"again: {shlex.join(command)}", flush=True)
    code = _wait_for(command, run["cwd"], {REPEATED: str(folder.absolute())})
    if code != EXIT_FINISHED:
        print(f"again: the repetition ended with exit code {code}; {folder} is as it was", file=sys.stderr)
        return code
    return _report(run, read_run(target))


def _create(target: Path) -> None:
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{target} exists already; type --into <a new folder>") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be created ({error.strerror}); type --into <a new folder>") from None


def require_repeatable(run: Run) -> None:
    """Raise ConfigError for what can be known before anything starts."""
    folder, lives = run["folder"], run["lives"]
    state, sizes = state_of(run), [life["world_size"] for life in lives]
    if state not in (FINISHED, PAUSED):
        raise ConfigError(
            f"{folder} is {state}, and only a run that has finished has bits to compare; "
            f"type its command to finish it: {run['command']}"
        )
    if not Path(folder, "model.pt").exists():
        raise ConfigError(f"{folder} has no model.pt to compare with; type its command: {run['command']}")
    sources = {life["source"] for life in lives if life.get("source")}  # a life that was killed at once has none
    if len(sources) > 1 or len({life.get("config_hash") for life in lives}) > 1:
        raise ConfigError(
            f"{folder} was resumed with another config or other code, and that is not repeated; "
            f"type {run['command']} hydra.run.dir=<a new folder> for a run with one config"
        )
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"{folder} ran on {', then '.join(map(str, sizes))} ranks, and where it stopped is not repeated; "
            f"type {run['command']} hydra.run.dir=<a new folder> for a run on one number of ranks"
        )
    hosts = {host for life in lives for host in life["hosts"]}
    starters = {life["launcher"] for life in lives}
    if len(hosts) > 1 or not starters <= ONE_MACHINE:
        raise ConfigError(
            f"{folder} was started by {' and '.join(sorted(starters))} on {', '.join(sorted(hosts))}, which this "
            f"command cannot do; type its command with hydra.run.dir=<a new folder>, then python src/runs.py why"
        )
    if not os.path.isdir(run["cwd"]):
        raise ConfigError(f"{run['cwd']}, where {folder} was started, is no folder any more; type mkdir {run['cwd']}")
    _require_same_packages(run)
    _require_same_code(run)


def _require_same_packages(run: Run) -> None:
    now, then = versions(), run["environment"]
    other = [name for name in now if name in then and then[name] != now[name]]
    if other:
        what = "; ".join(f"{name} was {then[name]} and is {now[name]}" for name in other)
        name = other[0]
        install = f"the command with Python {then[name]}" if name == "python" else f"pip install {name}=={then[name]}"
        raise ConfigError(f"{run['folder']} cannot be repeated here: {what}; type {install}")


def _require_same_code(run: Run) -> None:
    code, folder = run["code"], run["folder"]
    if code.get("source") == hash_of_source():
        return
    if "commit" not in code:
        advice = "copy the src/ and conf/ of that run here, and type the command again"
    elif code.get("diff_bytes"):
        patch = Path(folder, DIFF).absolute()
        advice = f"type git checkout {code['commit'][:10]} && git apply {patch}"
    else:
        advice = f"type git checkout {code['commit'][:10]}"
    raise ConfigError(f"{folder} cannot be repeated here: src/ or conf/ have changed since; {advice}")


def command_of(run: Run, target: Path) -> list[str]:
    """What trains as `run` did, into `target`. Raises ConfigError if the snapshot that it started from is gone."""
    first = run["lives"][0]
    words = [*run["overrides"], *run["flags"]]
    if first["from_step"] > 0:
        words = [word for word in words if not word.startswith("resume=")]
        words.append(f"resume={path_value(_snapshot(run, first['from_step']))}")
    if first["launcher"] in ("torchrun", "environment") and first["world_size"] > 1:
        words = [word for word in words if not word.startswith("launch")]
        words += ["launch=torchrun", f"launch.nproc_per_node={first['world_size']}"]
    return [sys.executable, str(ROOT / "src" / "train.py"), *words, f"hydra.run.dir={path_value(target)}"]


def _snapshot(run: Run, step: int) -> Path:
    """The snapshot from which a run started that was given resume=."""
    where = Path(run["cwd"], str(run["config"]["resume"]))
    for path in (where, where / f"step_{step:08d}.pt", where / "snapshots" / f"step_{step:08d}.pt"):
        if path.is_file():
            return path
    raise ConfigError(
        f"{run['folder']} started from step {step} of {where}, and that snapshot is gone; "
        f"type python src/runs.py again {where} to get it back"
    )


def _free_name(folder: Path) -> Path:
    """outputs/a -> outputs/a-again, a-again-2, ..."""
    folder = Path(os.path.abspath(folder))  # . and .. have names there
    path, number = folder.with_name(f"{folder.name}-again"), 1
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-again-{number}")
    return path


def _wait_for(command: Sequence[str], cwd: str, variables: Mapping[str, str]) -> int:
    """Run a command. A signal that asks it to stop lets it save: Ctrl-C reaches it itself, others are passed on."""
    process = subprocess.Popen(command, cwd=cwd, env=os.environ | variables)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None)}
    before |= {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(run: Run, repeated: Run) -> int:
    same = ["model.pt"]
    weights = [Path(each["folder"], "model.pt").read_bytes() for each in (run, repeated)]
    digests = [read_digests(Path(each["folder"])) for each in (run, repeated)]
    is_same = weights[0] == weights[1] and run["improvements"] == repeated["improvements"]
    same.append(f"best evaluations so far: {len(run['improvements'])}")
    if digests[0] is not None and digests[1] is not None:
        is_same = is_same and digests[0] == digests[1]
        same.append(f"steps with digests: {len(digests[0].rows)}")
    if is_same:
        print(f"again: the same bits: {'; '.join(same)}")
        return EXIT_FINISHED
    print("again: other bits")
    for line in explain(run, repeated):
        print(line)
    return EXIT_FAILED


def what_differs(run: Run, facts: Mapping[str, Any]) -> str | None:
    """The sentence for a run that is no repetition of `run`: other config, data, ranks or modules. None if it is one.

    facts: what run.json will say of it, with the user's "modules" under "code".
    """
    rows = [row for row in differing("config", run["config"], facts["config"]) if not row[1].startswith(ELSEWHERE)]
    rows += [row for row in differing("data", run["data"], facts["data"]) if row[1] != FILE_TIMES]
    ranks = "number of ranks"
    size = {ranks: facts["life"]["world_size"]}
    rows += differing("ranks", {ranks: run["lives"][-1]["world_size"]}, size)
    mine, other = run["code"].get("modules", {}), facts["code"]["modules"]
    common = mine.keys() & other.keys()
    rows += differing("code", {name: mine[name] for name in common}, {name: other[name] for name in common})
    if not rows:
        return None
    what = "; ".join(f"{key} was {plain(then)} and is {plain(now)}" for _, key, then, now in rows)
    return f"{run['folder']} cannot be repeated here: {what}; type {run['command']} to train with what is here now"
