"""A table of runs: one line each, sorted and filtered by what their run.json says."""

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from lockstep.errors import ConfigError
from lockstep.runs.record import Run, best_of, find_runs, read_run, state_of
from lockstep.text import aligned, plain

COLUMNS = ("date", "run", "state", "objective", "best_step", "steps", "speed", "changed")
HEADERS = {"best_step": "at step", "speed": "samples/s"}
NOT_CHANGED = ("launch", "hydra", "sweep.")  # typed words that say where a run computes, a folder, and what else runs


def read_runs(folders: Sequence[str]) -> tuple[list[Run], list[str]]:
    """(the runs at or below `folders`, a sentence for each that cannot be read). Raises as `find_runs` does."""
    runs, problems = [], []
    for folder in find_runs(folders):
        try:
            runs.append(read_run(folder))
        except ConfigError as error:
            problems.append(str(error))
    return runs, problems


def value_of(run: Run, name: str) -> Any:
    """What a run has in a column, for a key of its config, or for a config group. None if it has none of these."""
    life = run["lives"][0]
    known: dict[str, Callable[[], Any]] = {
        "date": lambda: life["started"],
        "run": lambda: os.path.relpath(run["folder"]),
        "state": lambda: state_of(run),
        "objective": lambda: best_of(run)[0],
        "best_step": lambda: best_of(run)[1],
        "steps": lambda: run["steps"],
        "speed": lambda: run["samples_per_second"],
        "ranks": lambda: run["lives"][-1]["world_size"],
        "lives": lambda: len(run["lives"]),
        "changed": lambda: " ".join(word for word in run["overrides"] if not word.startswith(NOT_CHANGED)),
        "commit": lambda: run["code"].get("commit"),
        "command": lambda: run["command"],
    }
    options = run.get("options", {})  # such as model
    return known[name]() if name in known else run["config"].get(name, options.get(name))


def check_names(runs: Sequence[Run], names: Iterable[str], option: str) -> None:
    """Raise ConfigError for a name that is no column, no key of any run's config, and no config group."""
    columns = {*COLUMNS, "ranks", "lives", "commit", "command"}
    keys = columns.union(*(run["config"].keys() | run.get("options", {}).keys() for run in runs))
    for name in names:
        if name not in keys:
            of_class = [key for key in keys if key == f"{name}._target_"]  # --filter model=mlp
            of_section = [key for key in keys if key.rpartition(".")[2] == name]  # --filter lr=0.1
            close = of_class or (of_section if len(of_section) == 1 else difflib.get_close_matches(name, keys, 1, 0.8))
            meant = close[0] if close else "<key>" if option == "--filter" else "objective"
            instead = f"{meant}{'=<value>' if option == '--filter' else ''}"
            raise ConfigError(
                f"{option} {name}: no run has this key, and the columns are {', '.join(sorted(columns))}; "
                f"type {option} {instead}"
            )


def filtered(runs: Sequence[Run], filters: Sequence[str]) -> list[Run]:
    """The runs for which all of `filters`, such as "optimizer.lr=0.1" or "state=finished", hold."""
    pairs = []
    for text in filters:
        key, equals, wanted = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ConfigError(f"--filter {text} has no value; type --filter {key or 'state'}=<value>")
        pairs.append((key, wanted))
    check_names(runs, [key for key, _ in pairs], "--filter")
    return [run for run in runs if all(_is_value(run, key, wanted) for key, wanted in pairs)]


def _is_value(run: Run, key: str, typed: str) -> bool:
    """Whether the run has the value, or shows it in a table. Of a date and a commit the beginning is enough."""
    value = value_of(run, key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            if float(typed) == value:
                return True
    if key == "run" and typed:
        return os.path.relpath(typed) == str(value)
    cell = shown(run, key, one_objective=True)
    if key in ("date", "commit") and typed:
        return cell.startswith(typed) or plain(value).startswith(typed)
    return typed in (plain(value), cell)


def sorted_runs(runs: Sequence[Run], name: str, reverse: bool) -> list[Run]:
    """By a column or a key. The best objective comes first, other values go up; runs without a value come last.

    Runs whose objectives are different metrics cannot be compared: those of one metric come together.
    """
    check_names(runs, [name], "--sort")

    def order(run: Run) -> tuple[str, float, str]:
        value, objective = value_of(run, name), run["objective"]
        if name == "objective":
            return objective["name"], -value if objective["mode"] == "max" else value, ""
        return ("", value, "") if isinstance(value, int | float) else ("", 0.0, plain(value))

    with_value = [run for run in runs if value_of(run, name) is not None]
    without = [run for run in runs if value_of(run, name) is None]
    return sorted(with_value, key=order, reverse=reverse) + without


def table(runs: Sequence[Run], columns: Sequence[str], width: int | None) -> list[str]:
    """The lines of a table. width: characters of a line, None for any number."""
    check_names(runs, columns, "--columns")
    objectives = {run["objective"]["name"] for run in runs}
    is_one = len(objectives) == 1
    header = [HEADERS.get(name, name) for name in columns]
    if is_one and "objective" in columns:
        header[columns.index("objective")] = f"best {objectives.pop()}"
    rows = [[shown(run, name, is_one) for name in columns] for run in runs]
    numbers = [index for index, name in enumerate(columns) if _is_numeric(runs, name)]
    lines = aligned([header, *rows], right=numbers)
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _is_numeric(runs: Sequence[Run], name: str) -> bool:
    values = [value_of(run, name) for run in runs]
    return name != "date" and all(value is None or isinstance(value, int | float) for value in values)


def shown(run: Run, name: str, one_objective: bool) -> str:
    """A cell of the table."""
    value = value_of(run, name)
    if value is None:
        return "-"
    if name == "date":
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M")
    if name == "speed":
        return f"{value:.0f}"
    if name == "commit":
        return str(value)[:10]
    if name == "objective":
        number = f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
        return number if one_objective else f"{run['objective']['name']} {number}"
    return plain(value)
