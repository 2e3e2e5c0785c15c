"""Which of two settings is better, and how sure that is: `runs.py compare`."""

import glob
import math
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError
from lockstep.runs.record import FINISHED, Run, best_of, metric_on_test, state_of
from lockstep.runs.repeats import (
    MOST,
    NO_NUMBER,
    REPEATS,
    Estimate,
    correlation,
    decimals_for,
    estimate,
    is_share,
    paired,
    pairs_for,
    split_overlap,
    unpaired,
)
from lockstep.runs.table import filtered, read_runs
from lockstep.text import aligned, differing, show

EXAMPLE = "python src/runs.py compare outputs/multirun/a optimizer.lr=0.1 optimizer.lr=0.01"
SIGN_TEST = 6  # pairs that all differ in one direction show a difference at 5 %, whatever their spread
NAMED = 4  # keys of a message
UNPAIRED = "none"


@dataclass(frozen=True)
class Side:
    """Runs of one setting. name: what was typed for them. values: their numbers, in the order of `runs`."""

    name: str
    runs: Sequence[Run]
    values: Sequence[float]

    @property
    def overlap(self) -> float:
        """See `split_overlap`."""
        return split_overlap(self.runs)

    def by(self, keys: Sequence[str]) -> dict[tuple[str, ...], float]:
        """{values of `keys`: number}. Raises ConfigError if two runs have the same ones."""
        found: dict[tuple[str, ...], tuple[Run, float]] = {}
        for run, value in zip(self.runs, self.values, strict=True):
            place = tuple(show(run["config"].get(key)) for key in keys)
            if place in found:
                same = " ".join(f"{key}={word}" for key, word in zip(keys, place, strict=True) if word != "null")
                raise ConfigError(
                    f"{self.name} has {found[place][0]['folder']} and {run['folder']}, both with {same}, and one run "
                    f"counts once; type folders with one of them"
                )
            found[place] = run, value
        return {place: value for place, (_, value) in found.items()}


def compare(words: Sequence[str], pair: str | None, metric: str | None, filters: Sequence[str]) -> list[str]:
    """The lines of `runs.py compare`.

    words: two folders or patterns of folders, or folders and two texts such as "optimizer.lr=0.1 model=mlp".
    pair: keys, with commas between them, by which runs of the two sides are paired; "none": they are not; None: by
    seed and fold if at least two pairs are found.
    metric: such as test/accuracy; None for the objective.
    filters: as those of a table, for both sides.
    Raises ConfigError for words that are no two settings.
    """
    (name, found), (other_name, others) = _two_sides(words, filters)
    metric = metric or found[0]["objective"]["name"]
    mode = _mode(found[0], metric)
    notes: list[str] = []
    a, b = _side("A", name, found, metric, notes), _side("B", other_name, others, metric, notes)
    difference, pairs, how = _difference(a, b, pair)
    scale, unit = (100, " points") if is_share(metric.partition("/")[2]) else (1, "")
    sides = [estimate(side.values, side.overlap) for side in (a, b)]
    decimals = decimals_for(sides)
    rows = [["", "runs", metric, "95 %", "deviation", ""]]
    for letter, side, summary in zip("AB", (a, b), sides, strict=True):
        interval = "-" if summary.interval is None else "{:.{d}f} to {:.{d}f}".format(*summary.interval, d=decimals)
        deviation = f"{summary.std:.{decimals}f}" if summary.freedom else "-"
        mean = f"{summary.mean:.{decimals}f}"
        rows.append([letter, str(len(side.runs)), mean, interval, deviation, side.name])
    lines = [*aligned(rows), *notes, how]
    return [*lines, verdict(difference, pairs, mode, scale, unit)]


def _two_sides(words: Sequence[str], filters: Sequence[str]) -> list[tuple[str, list[Run]]]:
    """[(what was typed, the runs)] of the two sides."""
    folders = {word: [word] if os.path.exists(word) else sorted(glob.glob(word)) for word in words}
    settings = [word for word in words if not folders[word] and "=" in word]
    places = [word for word in words if folders[word]]
    missing = [word for word in words if not folders[word] and "=" not in word]
    if missing:
        raise ConfigError(f"{missing[0]} is no folder; type python src/runs.py table to see the runs below outputs")
    if not (len(places) == 2 and not settings) and not (places and len(settings) == 2):
        raise ConfigError(
            f"compare needs two folders, or folders and two settings, and has {len(places)} and {len(settings)}; "
            f"type {EXAMPLE}"
        )
    sides = []
    for side in settings or places:
        names = [name for word in (places if settings else [side]) for name in folders[word] if os.path.isdir(name)]
        runs, problems = read_runs(names)
        if problems:
            raise ConfigError(problems[0])
        chosen = [word.lstrip("+") for word in shlex.split(side)] if settings else []
        runs = filtered(runs, [*filters, *chosen]) if runs else []
        if not runs:
            raise ConfigError(
                f"no run for {side}; type python src/runs.py table {shlex.join(places)} to see what is there"
            )
        sides.append((side, runs))
    return sides


def _mode(run: Run, metric: str) -> str:
    """Whether higher or lower is better: "max" or "min"."""
    if metric == run["objective"]["name"]:
        return str(run["objective"]["mode"])
    return str(run["config"].get(f"task.metrics.{metric.partition('/')[2]}", "min"))


def _number(run: Run, metric: str) -> float | None:
    """The number of a run that a sweep would sort it by, or one on the test set. Raises ConfigError for another."""
    objective = run["objective"]["name"]
    if metric == objective:
        return best_of(run)[0]
    split, _, name = metric.partition("/")
    if split != "test":
        raise ConfigError(
            f"--metric {metric}: {run['folder']} keeps {objective} and the metrics of the test set; "
            f"type --metric {objective}, or --metric test/{metric.rpartition('/')[2]}"
        )
    value = metric_on_test(run, name)
    if value is None:
        raise ConfigError(
            f"--metric {metric}: {run['folder']} has no such number of the test set; type --metric {objective}"
        )
    return value


def _side(letter: str, name: str, runs: Sequence[Run], metric: str, notes: list[str]) -> Side:
    """The runs of one setting that have finished with a number. Of others, `notes` gets a line."""
    ended = [run for run in runs if state_of(run) == FINISHED]
    numbers = [(run, value) for run in ended if (value := _number(run, metric)) is not None and math.isfinite(value)]
    left_out = len(runs) - len(numbers)
    if not numbers:
        raise ConfigError(f"no run of {name} has finished with a number; type python src/runs.py table to see why")
    if left_out:
        notes.append(f"{letter}: {left_out} of {len(runs)} runs have not finished with a number, and are left out")
    kept = [run for run, _ in numbers]
    varied = _varied(kept)
    if varied:
        values = list(dict.fromkeys(show(run["config"].get(varied[0])) for run in kept))
        typed = " ".join(f"{varied[0]}={value}" for value in values[:2])
        raise ConfigError(
            f"{name} is more than one setting: its runs differ in {', '.join(varied[:NAMED])}; "
            f"type python src/runs.py compare {shlex.quote(os.path.dirname(kept[0]['folder']) or '.')} {typed}"
        )
    if len({run["code"].get("source") for run in kept}) > 1:
        notes.append(f"{letter}: its runs are of several versions of the code")
    return Side(name, kept, [value for _, value in numbers])


def _varied(runs: Sequence[Run]) -> list[str]:
    """The keys in which runs differ, but those that repeat a run, follow these, or change no number."""
    keys: set[str] = set()
    for run in runs[1:]:
        keys |= differing(runs[0]["config"], run["config"]).keys()

    def follows(key: str) -> bool:  # as ${seed} does
        return any(all(run["config"].get(key) == run["config"].get(repeat) for run in runs) for repeat in REPEATS)

    return sorted(key for key in keys if not key.startswith(NO_NUMBER) and not follows(key))


def _difference(a: Side, b: Side, pair: str | None) -> tuple[Estimate, str, str]:
    """(B - A, "pairs" or "runs a side", a line that says how they were compared)."""
    keys = REPEATS if pair is None else tuple(pair.split(","))
    one, other = a.by(REPEATS), b.by(REPEATS)
    overlap = max(a.overlap, b.overlap)
    if pair != UNPAIRED:
        one, other = a.by(keys), b.by(keys)
        common = [place for place in one if place in other]
        if len(common) > 1 or pair is not None:
            if not common:
                raise ConfigError(f"--pair {pair}: no run of A has a partner in B; type --pair {UNPAIRED}")
            values = [one[place] for place in common], [other[place] for place in common]
            used = [key for index, key in enumerate(keys) if len({place[index] for place in common}) > 1] or list(keys)
            alone = len(one) + len(other) - 2 * len(common)
            how = f"paired by {' and '.join(used)}" + f"; {alone} runs without a partner are left out" * bool(alone)
            found, related = paired(*values, overlap), correlation(*values)
            if related is not None:
                how += f"; correlation of the {len(common)} pairs {related:.2f}"
            return found, "pairs", how
    return unpaired(a.values, b.values, overlap), "runs a side", "not paired"


def verdict(difference: Estimate, pairs: str, mode: str, scale: float, unit: str) -> str:
    """One sentence: which side is better and by how much, or what it would take to tell them apart.

    difference: of B - A. pairs: what its count counts. mode: "min" or "max". scale, unit: of the numbers shown.
    """
    is_b = (difference.mean > 0) == (mode == "max")
    better, count = "B" if is_b else "A", f"{difference.count:.0f} {pairs}"
    size, interval = abs(difference.mean) * scale, difference.interval
    if interval is None:
        if difference.count < 2:
            return "cannot be told apart: one run tells nothing about the spread; train both with seed=1,2,3,4,5"
        if size == 0:
            return f"the same: the numbers of all {count} are equal"
        if pairs == "pairs" and difference.count >= SIGN_TEST:
            return f"{better} is better by {size:.2g}{unit} in each of {count}"
        return (
            f"cannot be told apart: {size:.2g}{unit} in all {count} is no spread, which a metric of few samples gives "
            f"by chance; train both with more seeds"
        )
    show = _shown_with((interval[1] - interval[0]) / 2 * scale)
    if interval[0] > 0 or interval[1] < 0:
        ends = sorted(abs(end) * scale for end in interval)
        return f"{better} is better by {show(size)}{unit} ({show(ends[0])} to {show(ends[1])})"
    assert difference.visible is not None
    sentence = (
        f"cannot be told apart; with {count} a difference of {difference.visible * scale:.2g}{unit} would be seen"
    )
    needed = pairs_for(difference.mean, difference.std, difference.overlap) if size else None
    if needed is None:
        return f"{sentence}; more than {MOST} {pairs} would be needed for {size:.2g}"
    more = max(1, math.ceil(needed - difference.count))
    return f"{sentence}; about {more} more {'pair' if more == 1 else pairs} are needed for {size:.2g}"


def _shown_with(half: float) -> Callable[[float], str]:
    """Shows numbers with two digits of the half of an interval."""
    decimals = max(1 - math.floor(math.log10(half)), 0)
    return lambda value: f"{value:.{decimals}f}"
