"""A table of runs, sorted and filtered by what their run.json says: a line each, or one for all seeds of a setting."""

import difflib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from lockstep.errors import ConfigError
from lockstep.runs.record import FINISHED, Run, best_of, find_runs, metric_on_test, read_run, state_of
from lockstep.runs.repeats import REPEATS, Estimate, estimate, setting_of, split_overlap
from lockstep.text import aligned, show

COLUMNS = ("date", "run", "state", "objective", "test", "best_step", "steps", "speed", "changed")
HEADERS = {"best_step": "at step", "speed": "samples/s"}
RESULTS = ("objective", "test", "speed")  # columns that have a mean over runs
NOT_CHANGED = ("launch", "hydra", "sweep.")  # typed words that say where a run computes, a folder, and what else runs


Group = Sequence[Run]
"""One run, or several of one setting."""


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
        "test": lambda: metric_on_test(run),
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


def default_columns(runs: Sequence[Run]) -> list[str]:
    """Without that of the test set where no run tells more of it than its objective does."""
    with_test = any(run["objective"]["name"].partition("/")[0] != "test" and metric_on_test(run) for run in runs)
    return [name for name in COLUMNS if with_test or name != "test"]


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
        return cell.startswith(typed) or show(value).startswith(typed)
    return typed in (show(value), cell)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ only in what repeats one, such as seed: those of one folder and one code. Others stand alone,
    and so does one that another one has repeated with the same seed.
    """
    groups: dict[object, list[Run]] = {}
    for number, run in enumerate(runs):
        words = [word for word in setting_of(run["overrides"]) if not word.startswith(NOT_CHANGED)]
        key = (os.path.dirname(run["folder"]), run["code"].get("source"), *run["flags"], *words)
        members = groups.setdefault(key, [])
        if any(_place(run) == _place(member) for member in members):
            groups[number] = [run]
        else:
            members.append(run)
    return list(groups.values())


def _place(run: Run) -> list[Any]:
    return [run["config"].get(key) for key in REPEATS]


def sorted_groups(groups: Sequence[Group], name: str, reverse: bool) -> list[Group]:
    """By a column or a key, of several runs by their mean or the first one's value. The best objective comes first,
    other values go up; groups without a value come last.

    Runs whose objectives are different metrics cannot be compared: those of one metric come together.
    """
    check_names([run for group in groups for run in group], [name], "--sort")

    def order(group: Group) -> tuple[str, float, str]:
        value, objective = _mean_or_first(group, name), group[0]["objective"]
        if name == "objective":
            return objective["name"], -value if objective["mode"] == "max" else value, ""
        return ("", value, "") if isinstance(value, int | float) else ("", 0.0, show(value))

    with_value = [group for group in groups if _mean_or_first(group, name) is not None]
    without = [group for group in groups if _mean_or_first(group, name) is None]
    return sorted(with_value, key=order, reverse=reverse) + without


def _mean_or_first(group: Group, name: str) -> Any:
    found = _known(group, name)
    return found.mean if isinstance(found, Estimate) else value_of(group[0], name)


def _known(group: Group, name: str) -> Estimate | None:
    """What several runs say of a result together, those that have finished. None for other columns."""
    if len(group) == 1 or name not in RESULTS:
        return None
    values = [value_of(run, name) for run in group if state_of(run) == FINISHED]
    numbers = [value for value in values if value is not None]
    return estimate(numbers, split_overlap(group)) if numbers else None


def table(groups: Sequence[Group], columns: Sequence[str], width: int | None) -> list[str]:
    """The lines of a table, one for each group of runs. width: characters of a line, None for any number."""
    runs = [run for group in groups for run in group]
    check_names(runs, columns, "--columns")
    objectives = {run["objective"]["name"] for run in runs}
    is_one = len(objectives) == 1
    header = [HEADERS.get(name, name) for name in columns]
    if is_one:
        objective = objectives.pop()
        names = {"objective": f"best {objective}", "test": f"test/{objective.partition('/')[2]}"}
        header = [names.get(name, title) for name, title in zip(columns, header, strict=True)]
    rows = [[_cell(group, name, is_one) for name in columns] for group in groups]
    numbers = [index for index, name in enumerate(columns) if _is_numeric(runs, name)]
    lines = aligned([header, *rows], right=numbers)
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _cell(group: Group, name: str, one_objective: bool) -> str:
    """A cell of the table: what all runs of the group have, or what they have together."""
    first = group[0]
    if len(group) == 1:
        return shown(first, name, one_objective)
    if name == "run":
        return f"{os.path.relpath(os.path.dirname(first['folder']))} ({len(group)} runs)"
    if name == "changed":
        return " ".join(setting_of(shown(first, name, one_objective).split()))
    if name == "date":
        return min(shown(run, name, one_objective) for run in group)
    known = _known(group, name)
    if known is not None and name == "speed":
        return f"{known.mean:.0f}"
    if known is not None:
        mean = shown_number(known.mean)
        spread = "" if known.interval is None else f" ± {known.interval[1] - known.mean:.2g}"
        missing = f" of {known.count:.0f}" if known.count < len(group) else ""
        label = "" if one_objective or name != "objective" else f"{first['objective']['name']} "
        return f"{label}{mean}{spread}{missing}"
    cells = [shown(run, name, one_objective) for run in group]
    if name == "state":
        return ", ".join(
            cells[0] if count == len(group) else f"{count} {state}" for state, count in Counter(cells).items()
        )
    return ",".join(dict.fromkeys(cells))


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
    if name == "test":
        return shown_number(value)
    if name == "objective":
        return shown_number(value) if one_objective else f"{run['objective']['name']} {shown_number(value)}"
    return show(value)


def shown_number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
