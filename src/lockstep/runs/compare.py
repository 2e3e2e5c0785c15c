"""Which of two configurations is better, and how sure that is; and in what two runs differ."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.runs.record import FINISHED, read_run
from lockstep.runs.samples import NAME, SAMPLED, paired_by_sample
from lockstep.runs.stats import MOST, Estimate, estimate, is_share, pairs_for, welch
from lockstep.runs.table import REPEATS, Row, filtered, rho_of, rows_of
from lockstep.text import aligned, differing, show

OF_SAMPLES = "paired by sample of the test set: about these two nets, and no other seeds; who chooses by it uses it up"
EXAMPLE = "python src/runs.py compare outputs/multirun/a --a optimizer.lr=0.1 --b optimizer.lr=0.01"


def compare(folders: Sequence[str], a: str | None = None, b: str | None = None, metric: str | None = None) -> list[str]:
    """The lines of `runs.py compare`. Raises ConfigError for what are no two configurations.

    folders: two folders; with a and b, overrides such as "optimizer.lr=0.1 model=mlp", folders that hold the runs of
    both. metric: such as test/accuracy; None: the objective. Two single runs are compared by the samples of their test,
    others by pairs of one seed and fold if there are two such pairs.
    """
    if (a is None) != (b is None) or (a is None and len(folders) != 2):
        raise ConfigError(f"compare needs two folders, or folders with --a and --b; type {EXAMPLE}")
    names = list(folders) if a is None or b is None else [a, b]
    if a is None:
        both = [rows_of([name]) for name in folders]
    else:
        both = [filtered(rows_of(folders), shlex.split(name)) for name in names]
    for name, side in zip(names, both, strict=True):
        if not side:
            raise ConfigError(f"no run for {name}; type python src/runs.py table {shlex.join(folders)} to see the runs")
    metric = metric or str(both[0][0]["metric"])
    notes: list[str] = []
    one, other = (_finished(*side, metric, notes) for side in zip("AB", names, both, strict=True))
    name = metric.partition("/")[2]
    is_objectives = name == one[0]["metric"].partition("/")[2]
    direction = one[0]["direction"] if is_objectives else "max" if is_share(name) else "min"
    places = [Path(side[0]["folder"]) for side in (one, other)]
    if len(one) == len(other) == 1 and name in SAMPLED and all((place / NAME).exists() for place in places):
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
        sides.append({tuple(show(run.get(key)) for key in REPEATS): run["value"] for run in side})
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

    difference: of B - A. counted: what its count counts. scale, unit: of the numbers shown.
    """
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
                rows.append([key if section in ("config", "options") else f"{section}: {key}", show(x), show(y)])
    return aligned([["", a, b], *rows]) if rows else ["the same: config, data, code and environment"]
