"""Tables of runs: a row, which is a dict, for a run, or for all seeds and folds of a configuration; and their text.
Which of two configurations is better, how sure that is, and in what two runs differ."""

import difflib
import logging
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.errors import ConfigError, aligned, differing
from lockstep.errors import show as as_word
from lockstep.runs.record import FINISHED, Run, best_of, changes_no_number, find_runs, read_run, state_of
from lockstep.runs.stats import (
    MOST,
    SAMPLED,
    SAMPLES,
    Estimate,
    estimate,
    is_share,
    over_samples,
    paired_by_sample,
    pairs_for,
    welch,
    wilson,
)

log = logging.getLogger(__name__)

COLUMNS = ("date", "run", "state", "metric", "objective", "test", "best_step", "steps", "speed", "tags", "changed")
NUMBERS = ("objective", "test", "test_low", "test_high", "best_step", "speed")  # which a run may lack
OF_SAMPLES = "paired by sample of the test set: about these two nets, and no other seeds; who chooses by it uses it up"
EXAMPLE = "python src/runs.py compare outputs/multirun/a --a optimizer.lr=0.1 --b optimizer.lr=0.01"
REPEATS = ("seed", "loader.fold", "loader.split_seed")  # keys in which runs of one configuration differ

Row = dict[str, Any]
"""A run: COLUMNS, ranks, starts, seconds, notes, commit, source, command, folder, sweep, its config keys and groups.

objective, test: numbers; metric: the objective's name; test_low, test_high: over the samples of the test set. None: the
run has no such value.
"""


def is_repeat(word: str) -> bool:
    """Whether an override, such as seed=3, gives another run of the same configuration. The others say of which."""
    return word.lstrip("+").partition("=")[0] in REPEATS


def rows_of(folders: Sequence[str | Path]) -> list[Row]:
    """The runs at or below `folders`. What cannot be read is left out with a warning."""
    rows = []
    for folder in find_runs(folders):
        try:
            rows.append(row_of(read_run(folder)))
        except ConfigError as error:
            log.warning("%s", error)
    return rows


def row_of(run: Run) -> Row:
    data, test, objective, starts = run["data"], run["test"] or {}, run["objective"], run["starts"]
    speeds = [row["speed/samples_per_s"] for row in run["history"] if "speed/samples_per_s" in row]
    name, measured = objective["name"].partition("/")[2], test.get("metrics", {})
    value, held_out = measured.get(name), data.get("validation_samples")
    samples, error = test.get("samples", data.get("test_samples")), test.get("errors", {}).get(name)
    low, high = (value is not None and over_samples(name, value, error, samples)) or (None, None)
    words, code = [word for word in run["overrides"] if not changes_no_number(word)], run["code"]
    date, share = time.localtime(starts[0]["started"]), held_out / data["training_samples"] if held_out else None
    row = {**run["options"], **run["config"], **{f"test/{key}": one for key, one in measured.items()}}
    row |= {"date": time.strftime("%Y-%m-%d %H:%M:%S", date), "run": os.path.relpath(run["folder"])}
    row |= {"state": state_of(run), "metric": objective["name"], "direction": objective["mode"]}
    row |= zip(("objective", "best_step"), best_of(run), strict=True)
    row |= {"test": value, "test_low": low, "test_high": high}
    row |= {"test_samples": samples if error is None else None}  # of shares that are counted
    row |= {"steps": run["steps"], "speed": speeds[-1] if speeds else None}
    # A start that was killed lasted until its last write.
    row |= {"seconds": round(sum(max(0.0, one["ended"] - one["started"]) for one in starts), 2)}
    row |= {"ranks": starts[-1]["world_size"], "starts": len(starts), "changed": shlex.join(words)}
    row |= {key: run[key] for key in ("tags", "notes", "command", "folder", "sweep")}
    row |= {"setting": shlex.join([*run["flags"], *(word for word in words if not is_repeat(word))])}
    row |= {"commit": code.get("commit", "")[:10], "source": code["source"]}
    return row | {"validation_data": data.get("validation_data"), "validation_share": share}


def rho_of(runs: Sequence[Row]) -> float:
    """For `Estimate.rho`, of repeated runs: samples held out for each that is trained on; 0 if the runs have not held
    out several parts of the training data. Any two folds, or values of loader.split_seed, train on mostly the same
    samples, so their numbers are less independent than they look."""
    is_split = len({(str(run.get("loader.fold")), str(run.get("loader.split_seed"))) for run in runs}) > 1
    if not is_split or len({run["validation_data"] for run in runs} - {None}) < 2:  # or validation data of its own
        return 0.0
    return float(max(run["validation_share"] or 0.0 for run in runs))


def settings(runs: Sequence[Row]) -> list[Row]:
    """A row for each configuration: runs of one folder and one code that differ only in seed or fold are one.
    runs, count: how many there are, and how many have finished with a number. objective, test: means of these, with
    intervals, as objective_low. Other values in which they differ are one text. A second run of a seed is a row of its
    own. Where all have one metric, the best is the first, before those of which runs are missing."""
    groups, seen = dict[tuple[Any, ...], list[Row]](), Counter[tuple[str, ...]]()
    for run in runs:
        key = (os.path.dirname(run["folder"]), *(str(run[name]) for name in ("source", "setting", "metric")))
        repeat = (*key, *(str(run.get(name)) for name in REPEATS))
        seen[repeat] += 1
        groups.setdefault((key, seen[repeat]), []).append(run)
    rows = [_together(group) for group in groups.values()]
    if len({row["metric"] for row in rows}) == 1:
        sign = -1 if rows[0]["direction"] == "max" else 1
        rows.sort(key=lambda row: (not row["count"], row["count"] < row["runs"], sign * (row["objective"] or 0)))
    return rows


def _together(group: Sequence[Row]) -> Row:
    """A row of `settings`."""
    finished = [run for run in group if run["state"] == FINISHED and is_there(run["objective"])]
    row = group[0] | {"runs": len(group), "count": len(finished)}
    if len(group) == 1:
        return row
    for name in {name for run in group for name in run}:
        words = dict.fromkeys(as_word(run.get(name)) for run in group)
        row[name] = group[0].get(name) if len(words) == 1 else ",".join([*words][:9]) + ",..." * (len(words) > 9)
    states, parent = Counter(run["state"] for run in group), os.path.dirname(group[0]["folder"])
    row |= {"run": f"{os.path.relpath(parent)} ({len(group)} runs)", "changed": row["setting"]}
    row |= {"date": min(run["date"] for run in group), "seconds": round(sum(run["seconds"] for run in group), 2)}
    row["state"] = ", ".join(name if len(states) == 1 else f"{count} {name}" for name, count in states.items())
    for name in ("speed", "best_step", "steps", "objective", "test"):
        values = [run[name] for run in finished if is_there(run[name])]
        row[name] = fmean(values) if values else None
    for name in ("objective", "test"):
        row[f"{name}_low"] = row[f"{name}_high"] = None
        if finished and all(is_there(run[name]) for run in finished):
            found = estimate([run[name] for run in finished], rho_of(finished))
            row[f"{name}_low"], row[f"{name}_high"] = found.interval or (None, None)
    return row


def is_there(value: Any) -> bool:
    """Whether a cell has a value: neither None, NaN nor an empty list."""
    return bool(value) if isinstance(value, list) else value is not None and bool(value == value)


def check_names(table: Sequence[Row], names: Iterable[str], option: str) -> None:
    """Raise ConfigError for a name that is no column, no config key of any run, and no config group."""
    known = dict.fromkeys(key for row in table for key in row)
    for name in names:
        if name not in known:
            longer = [key for key in known if key == f"{name}._target_" or key.endswith(f".{name}")]
            close = [*longer, *difflib.get_close_matches(name, known, 1, 0.8), "state"][0]
            raise ConfigError(f"no run has {name}; type {option} {close}{'=<value>' * (option == '--filter')}")


def filtered(runs: Sequence[Row], filters: Sequence[str]) -> list[Row]:
    """The runs for which all of `filters` hold, such as "optimizer.lr=0.1" or "tags=baseline", an item of a list."""
    for text in filters:
        key, equals, typed = (part.strip() for part in text.partition("="))
        check_names(runs, [key], "--filter")
        if not equals:
            raise ConfigError(f"--filter {key} has no value; type --filter {key}=<value>")
        runs = [run for run in runs if _is_value(run.get(key), typed)]
    return list(runs)


def _is_value(value: Any, typed: str) -> bool:
    with suppress(TypeError, ValueError):
        return float(typed) == float(value if not isinstance(value, bool) else "")
    return typed in (as_word(value), str(value)) or (isinstance(value, list) and typed in value)


def ordered(table: Sequence[Row], name: str) -> list[Row]:
    """By a column or a key; rows without a value come last. The best objective comes first, those of one metric
    together; other values go up."""
    check_names(table, [name], "--sort")
    rows = [row for row in table if is_there(row.get(name))]
    are_numbers = all(isinstance(row[name], int | float) for row in rows)
    if name == "objective":
        rows.sort(key=lambda row: (row["metric"], -row[name] if row["direction"] == "max" else row[name]))
    else:
        rows.sort(key=lambda row: row[name] if are_numbers else as_word(row[name]))
    return [*rows, *(row for row in table if not is_there(row.get(name)))]


def telling(table: Sequence[Row], columns: Sequence[str] = COLUMNS) -> list[str]:
    """The columns, but for those without a value, and those that say of each row the same."""
    optional = {name: any(is_there(row[name]) for row in table) for name in ("test", "tags")}
    optional |= {name: len({row[name] for row in table}) > 1 for name in ("metric", "source")}
    return [name for name in columns if optional.get(name, True)]


def show(table: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """The lines of a table of runs or of `settings`. An interval is shown as its half: of several runs over the runs,
    of one over the samples of the test set."""
    metrics = [*dict.fromkeys(row["metric"] for row in table)]
    check_names(table, columns, "--columns")
    titles = {"objective": f"best {metrics[0]}", "test": f"test/{metrics[0].partition('/')[2]}"}
    titles = titles if len(metrics) == 1 else {}
    rows = [[_text(row, name) for name in columns] for row in table]
    is_number = [all(isinstance(row.get(name), int | float | None) for row in table) for name in columns]
    right = [place for place, found in enumerate(is_number) if found]
    return aligned([[titles.get(name, name) for name in columns], *rows], right)


def _text(row: Row, name: str) -> str:
    """A cell, with what stands in other columns."""
    value: Any = row.get(name)
    if not is_there(value):
        return "-"
    if name not in ("objective", "test"):
        if isinstance(value, float):
            return f"{value:.0f}" if name == "speed" or value.is_integer() else f"{value:.6g}"
        return as_word(value)
    text = f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    if row.get(f"{name}_low") is not None:
        text += f" ± {(row[f'{name}_high'] - row[f'{name}_low']) / 2:.2g}"
    if name == "objective" and row.get("count", 0) < row.get("runs", 0):
        text += f" of {row['count']}"
    return text


def of_sweep(runs: Sequence[Row], lists: Collection[str] = ()) -> list[str]:
    """The lines of the jobs of a sweep: a row for each configuration, the best one, and what choosing it has cost.
    lists: the keys whose best value may lie at the edge of those that were tried."""
    if not runs:
        return []
    table, times = settings(runs), Counter(word for run in runs for word in {*shlex.split(run["changed"])})
    varied = {word.lstrip("+").partition("=")[0] for word, count in times.items() if count < len(runs)}
    keys = sorted(varied & table[0].keys())
    columns = ["state", "objective", "test", "best_step", "seconds", *keys, "source", "run"]
    lines, own = show(table, telling(table, columns)), [key for key in keys if not is_repeat(key)]
    if table[0]["count"] and own and len({row["metric"] for row in table}) == 1:
        edges = [key for key in own if key in lists and is_at_edge([row.get(key) for row in table])]
        told = "".join(f"; {key} is at the edge of its list" for key in edges)
        lines.append(f"best:       {', '.join(f'{key}={table[0][key]}' for key in own)}{told}")
    return lines + [f"choosing:   {text}" for text in [choosing(table)] if text]


def is_at_edge(values: Sequence[Any]) -> bool:
    """Whether the best of these values, the first, is the least or greatest: a better one may lie beyond it."""
    numbers = {one for one in values if isinstance(one, int | float) and not isinstance(one, bool)}
    return len(numbers) > 2 and values[0] in (min(numbers), max(numbers))


def choosing(table: Sequence[Row]) -> str:
    """What the number of the best row of `settings` is worth, in one sentence; empty if there was nothing to choose."""
    candidates = [row for row in table if row["count"]]
    if len(candidates) < 2 or len({row["metric"] for row in candidates}) > 1:
        return ""
    best = candidates[0]
    metric, test, low, high = best["metric"].partition("/")[2], best["test"], best["test_low"], best["test_high"]
    chosen = f"{best['metric']} {best['objective']:.6g} is the best of {len(candidates)}, and so it is optimistic"
    if best["metric"].startswith("test/"):
        return f"on the test set: {chosen}"
    if not is_there(test):
        return f"{chosen}; the test set has not been read"
    samples, source = best["test_samples"], f"{best['count']} runs"
    if is_share(metric) and isinstance(samples, int):
        (low, high), source = wilson(test, samples), f"{samples} test samples"
    known = "" if low is None else f" (95 %: {low:.4g} to {high:.4g}, from {source})"
    return f"{chosen}; test/{metric} {test:.6g} had no part in it{known}"


# Which of two configurations is better.


def compare(folders: Sequence[str], a: str | None = None, b: str | None = None, metric: str | None = None) -> list[str]:
    """The lines of `runs.py compare`. Raises ConfigError for what are no two configurations.
    folders: two folders; with a and b, overrides such as "optimizer.lr=0.1 model=mlp", folders that hold the runs of
    both. metric: such as test/accuracy; None: the objective. Two single runs are compared by the samples of their test,
    others by pairs of one seed and fold if there are two such pairs."""
    if (a is None) != (b is None) or (a is None and len(folders) != 2):
        raise ConfigError(f"compare needs two folders, or folders with --a and --b; type {EXAMPLE}")
    names = [*folders] if a is None else [a, str(b)]
    both = [rows_of([name]) if a is None else filtered(rows_of(folders), shlex.split(name)) for name in names]
    for name, side in zip(names, both, strict=True):
        if not side:
            raise ConfigError(f"no run for {name}; type python src/runs.py table {shlex.join(folders)} to see the runs")
    metric, notes = metric or str(both[0][0]["metric"]), list[str]()
    one, other = (_finished(*side, metric, notes) for side in zip("AB", names, both, strict=True))
    name = metric.partition("/")[2]
    is_objectives = name == one[0]["metric"].partition("/")[2]
    direction = one[0]["direction"] if is_objectives else "max" if is_share(name) else "min"
    places = [Path(side[0]["folder"]) for side in (one, other)]
    if len(one) == len(other) == 1 and name in SAMPLED and all((place / SAMPLES).exists() for place in places):
        *sides, difference = paired_by_sample(places[0], places[1], name)
        metric, counted, how = f"test/{name}", "samples", OF_SAMPLES
    else:
        sides = [estimate([run["value"] for run in side], rho_of(side)) for side in (one, other)]
        difference, counted, how = _difference(one, other, names)
    rows = [["", "runs", metric, "95 %", "deviation", ""]]
    for letter, side, found, typed in zip("AB", (one, other), sides, names, strict=True):
        interval = "-" if found.interval is None else "{:.4g} to {:.4g}".format(*found.interval)
        deviation = f"{found.std:.2g}" if found.df else "-"
        rows.append([letter, str(len(side)), f"{found.mean:.4g}", interval, deviation, typed])
    scale, unit = (100, " points") if is_share(name) else (1, "")
    return [*aligned(rows), *notes, how, verdict(difference, counted, direction, scale, unit)]


def _finished(letter: str, name: str, runs: Sequence[Row], metric: str, notes: list[str]) -> list[Row]:
    """The runs that have finished with a number, as their "value". Of others, `notes` gets a line."""
    if not any(metric == run["metric"] or metric in run for run in runs):
        raise ConfigError(f"no run of {name} has {metric}; type --metric {runs[0]['metric']}")
    valued = [run | {"value": run["objective"] if run["metric"] == metric else run.get(metric)} for run in runs]
    kept = [run for run in valued if run["state"] == FINISHED and run["value"] is not None]
    kept = [run for run in kept if math.isfinite(run["value"])]
    if not kept:
        raise ConfigError(f"no run of {name} has finished with a number; type python src/runs.py table to see why")
    if len(kept) < len(runs):
        left_out = len(runs) - len(kept)
        notes.append(f"{letter}: {left_out} of {len(runs)} runs have not finished with a number, and are left out")
    one, *others = (set(shlex.split(words)) for words in dict.fromkeys(run["setting"] for run in kept))
    if others:
        what = f"{name} is more than one configuration: {shlex.join(sorted(one ^ others[0]))}"
        raise ConfigError(f"{what}; type python src/runs.py compare <folder> --a <overrides> --b <overrides>")
    if len({run["source"] for run in kept}) > 1:
        notes.append(f"{letter}: its runs are of several versions of the code")
    return kept


def _difference(one: Sequence[Row], other: Sequence[Row], names: Sequence[str]) -> tuple[Estimate, str, str]:
    """(B - A, "pairs" or "runs a side", a line that says how they were compared)."""
    rho, sides = max(rho_of(one), rho_of(other)), list[dict[tuple[str, ...], float]]()
    for side, name in zip((one, other), names, strict=True):
        sides.append({tuple(as_word(run.get(key)) for key in REPEATS): run["value"] for run in side})
        if len(sides[-1]) < len(side):
            what = f"{name} has two runs of one seed and fold, and one counts once"
            raise ConfigError(f"{what}; type folders with one of them")
    a, b = sides
    common = [key for key in a if key in b]
    if len(common) < 2:
        return welch([*a.values()], [*b.values()], rho), "runs a side", "not paired"
    alone = len(a) + len(b) - 2 * len(common)
    left_out = f"; {alone} runs without a partner are left out" if alone else ""
    keys = [key for key, *different in zip(REPEATS, *common, strict=True) if len({*different}) > 1]
    found = estimate([b[key] - a[key] for key in common], rho)
    return found, "pairs", f"paired by {' and '.join(keys)}{left_out}"


def verdict(difference: Estimate, counted: str, direction: str, scale: float, unit: str) -> str:
    """One sentence: which side is better and by how much, or what it would take to tell them apart.
    difference: of B - A. counted: what its count counts. scale, unit: of the numbers shown."""
    better = "B" if (difference.mean > 0) == (direction == "max") else "A"
    count, size, interval = f"{difference.count:.0f} {counted}", abs(difference.mean) * scale, difference.interval
    if interval is None:  # a metric of few samples can give equal numbers by chance
        return f"cannot be told apart: {size:.2g}{unit} in {count} tells no spread; train both with seed=1,2,3,4,5"
    sign = 1 if difference.mean >= 0 else -1
    low, high = sorted(sign * end * scale for end in interval)
    digits = max(1 - math.floor(math.log10((high - low) / 2)), 0)
    shown = f"{size:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"
    if low > 0:
        return f"{better} is better by {shown}"
    needed = pairs_for(difference.mean, difference.std, difference.rho) if size else None
    if needed is None:
        return f"cannot be told apart: {better} by {shown}; more than {MOST} {counted} would be needed"
    more = max(1, math.ceil(needed - difference.count))
    return f"cannot be told apart: {better} by {shown}; about {more} more {counted} are needed"


def diff(a: str, b: str) -> list[str]:
    """The lines of `runs.py diff`: in what two runs differ, by their run.json. Raises ConfigError."""
    one, other = (read_run(Path(folder)) for folder in (a, b))
    rows = []
    for section in ("options", "config", "data", "code", "environment"):
        for key, (x, y) in differing(one[section], other[section]).items():
            if not key.endswith("run_dir"):
                rows.append([key if section in ("config", "options") else f"{section}: {key}", as_word(x), as_word(y)])
    return aligned([["", a, b], *rows]) if rows else ["the same: config, data, code and environment"]
