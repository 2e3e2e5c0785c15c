"""What two runs differ in: config, code, environment, data, ranks, result, and the first step at which they part."""

import filecmp
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.runs.code import DIFF
from lockstep.runs.digests import first_difference, read_digests
from lockstep.runs.record import Run, exit_code_of, state_of
from lockstep.runs.table import plain

MISSING = "-"
LONGEST_CELL = 60
Row = tuple[str, str, str, str]
"""(section, key, value in A, value in B)"""


def explain(a: Run, b: Run) -> list[str]:
    """The lines of `runs.py why`. Raises ConfigError for digests that cannot be read."""
    header: Row = ("", "", f"A {a['folder']}", f"B {b['folder']}")
    rows = [tuple(map(_short, row)) for row in (*differences(a, b), *_result(a, b))]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(size) for cell, size in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in (header, *rows)
    ]
    same = [name for name in ("config", "code", "environment", "data", "ranks") if name not in {row[0] for row in rows}]
    if same:
        lines.append(f"the same: {', '.join(same)}")
    return [*lines, *_advice(a, b), _weights(a, b), _first_step(a, b)]


def _short(cell: str) -> str:
    return cell if len(cell) <= LONGEST_CELL else f"{cell[: LONGEST_CELL - 1]}…"


def differences(a: Run, b: Run) -> list[Row]:
    """What can have made the difference between two runs, a row each."""
    rows = differing("config", a["config"], b["config"])
    rows += [("code", *row) for row in _code(a["code"], b["code"])]
    rows += differing("environment", a["environment"], b["environment"])
    rows += differing("data", a["data"], b["data"])
    rows += differing("ranks", _ranks(a), _ranks(b))
    return rows


def differing(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """A row for each key that only one of two dicts has, or that has another value."""
    return [
        (section, key, plain(a[key]) if key in a else MISSING, plain(b[key]) if key in b else MISSING)
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key) or (key in a) != (key in b)
    ]


def _code(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Nothing if the files of src/ and conf/ are the same, whatever the commits; else what git says of them, too.

    Of the user's modules those count that both runs have loaded: some are loaded only when they are needed.
    """
    rows = []
    if a.get("source") != b.get("source"):
        names = {"source": "src/ and conf/", "commit": "commit", "diff_sha256": "uncommitted diff"}
        names["untracked"] = "untracked"
        for key, name in names.items():
            if a.get(key) != b.get(key):
                rows.append((name, *(plain(code[key]) if code.get(key) else MISSING for code in (a, b))))
    mine, other = a.get("modules", {}), b.get("modules", {})
    rows += [(name, mine[name], other[name]) for name in sorted(mine) if name in other and mine[name] != other[name]]
    return [(row[0], row[1], row[2]) for row in rows]


def _ranks(run: Run) -> dict[str, Any]:
    return {
        "number in each life": [life["world_size"] for life in run["lives"]],
        "hosts": sorted({host for life in run["lives"] for host in life["hosts"]}),
    }


def _result(a: Run, b: Run) -> list[Row]:
    def shown(run: Run) -> list[str]:
        objective, code = run["objective"], exit_code_of(run)
        state = state_of(run) if code is None else f"{state_of(run)}, exit code {code}"
        best = MISSING if objective["best"] is None else f"{objective['best']!r} at step {objective['step']}"
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
        found = [str(path) for path in files if path.exists()]
        if found:
            lines.append(f"the uncommitted changes: {'diff' if len(found) == 2 else 'cat'} {' '.join(found)}")
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
    return f"steps:   {first_difference(tables[0], tables[1], with_loss=len(sizes) == 1)}"
