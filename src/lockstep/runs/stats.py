"""Means with their intervals of 95 %, of repeated runs and of samples. scipy is imported where it computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from lockstep.errors import ConfigError
from lockstep.runs.record import read_run

SAMPLES = "test_samples.csv"
SAMPLED = {"accuracy": "right", "loss": "loss"}  # metrics that each sample has, and their columns
CONFIDENCE, POWER = 0.95, 0.8
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
MOST = 10_000  # pairs that `pairs_for` counts up to


@dataclass(frozen=True)
class Estimate:
    """A mean, and how well it is known.

    std: sample standard deviation of one number. count: of the numbers; of an unpaired difference the number a side
    with which both sides would be known as well. df: degrees of freedom of `std`, 0 if nothing tells the spread.
    rho: variance that more numbers do not remove, in units of std^2: folds share training samples (Nadeau and Bengio
    2003; for repeated folds Bouckaert and Frank 2004).
    """

    mean: float
    std: float
    count: float
    df: float
    rho: float = 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the true mean is, by Student's t. None if the spread is not known: of one number, and of equal ones,
        which a metric of few samples gives by chance."""
        from scipy.special import stdtrit

        if not self.df or not self.std:
            return None
        half = float(stdtrit(self.df, (1 + CONFIDENCE) / 2)) * self.std * math.sqrt(1 / self.count + self.rho)
        return self.mean - half, self.mean + half


def estimate(values: Sequence[float], rho: float = 0.0) -> Estimate:
    """The mean of independent numbers, at least one. The spread of numbers that are not all finite is not known."""
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return Estimate(fmean(values), 0.0, len(values), 0)
    return Estimate(fmean(values), stdev(values), len(values), len(values) - 1, rho)


def welch(a: Sequence[float], b: Sequence[float], rho: float = 0.0) -> Estimate:
    """Of b - a, by Welch's t-test: the two sides may have other spreads, and other counts."""
    one, other = estimate(a), estimate(b)
    std = math.hypot(one.std, other.std)
    squares = one.std**2 / one.count, other.std**2 / other.count
    if not one.df or not other.df or not std:
        return Estimate(other.mean - one.mean, 0.0, min(one.count, other.count), 0.0)
    df = sum(squares) ** 2 / (squares[0] ** 2 / one.df + squares[1] ** 2 / other.df)
    return Estimate(other.mean - one.mean, std, std**2 / sum(squares), df, rho)


def pairs_for(difference: float, std: float, rho: float = 0.0) -> int | None:
    """How many pairs show a difference in about 80 % of all cases. None if more than `MOST`. std: of one pair."""
    share = (difference / std / (Z + NormalDist().inv_cdf(POWER))) ** 2 - rho
    return math.ceil(1 / share + Z * Z / 2) if share > 1 / MOST else None  # Guenther 1981: what t needs beyond normal


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of a share, such as an accuracy, that was counted over `count` samples (Wilson 1927)."""
    centre = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    return centre - half, centre + half


def over_samples(metric: str, mean: float, error: float | None, samples: int | None) -> tuple[float, float] | None:
    """The interval of one run's metric on new samples of the same kind, without scipy: each run shows it at its end.
    error: its standard error over the samples; None if it is not known, or follows from their number."""
    if error:
        return mean - Z * error, mean + Z * error
    return wilson(mean, samples) if samples and is_share(metric) else None


def is_share(metric: str) -> bool:
    """Whether a metric is a mean, over samples, of numbers from 0 to 1: then its interval follows from their number."""
    return metric == "accuracy" or metric.removeprefix("top").isdecimal()


# What a test says of each sample: test_samples.csv in a run folder, with number, file, target, loss and right. file and
# target stand there where samples have a file and a class. mode=evaluate writes such a file, too.


def read_samples(place: Path) -> Any:
    """A pandas.DataFrame of a run folder, or of a file. The index is the sample's number. Raises OSError."""
    import pandas as pd

    return pd.read_csv(place / SAMPLES if place.is_dir() else place, index_col="number", dtype={"file": str})


def paired_by_sample(a: Path, b: Path, metric: str) -> tuple[Estimate, Estimate, Estimate]:
    """(of run A, of run B, of B - A) over the samples of one test set. metric: one of SAMPLED. It is about these two
    trained nets: another seed gives others. Raises ConfigError for two sets."""
    data = [read_run(folder)["data"].get("test_data") for folder in (a, b)]
    one, other = (read_samples(folder) for folder in (a, b))
    if data[0] != data[1] or not one.index.equals(other.index):
        raise ConfigError(f"{a} and {b} were tested on other samples; type folders with several runs a side")
    values = [side[SAMPLED[metric]].tolist() for side in (one, other)]
    return estimate(values[0]), estimate(values[1]), of_differences([y - x for x, y in zip(*values, strict=True)])


def of_differences(values: Sequence[float]) -> Estimate:
    """Their mean. Of 0, 1 and -1 Student's t is too sure where few differ: one more for each side mends it (Bonett and
    Price 2012)."""
    if not set(values) <= {-1.0, 0.0, 1.0}:
        return estimate(values)
    return replace(estimate([*values, 1.0, -1.0]), count=len(values), mean=fmean(values))


def samples_table(place: Path, worst: int, by: str | None = None) -> list[str]:
    """The lines of `runs.py samples`: the samples with the highest loss, or the means of those with one value in the
    column `by`. Raises ConfigError."""
    table = read_samples(place).reset_index()
    if by is None:
        table = table.sort_values("loss", ascending=False, kind="stable").head(worst)
    elif by not in table:
        raise ConfigError(f"--by {by}: the columns are {', '.join(table)}; type --by {table.columns[-1]}")
    else:
        named = {"samples": ("loss", "size"), "mean loss": ("loss", "mean")}
        named |= {"share right": ("right", "mean")} if "right" in table else {}
        table = table.groupby(by, dropna=False).agg(**named).reset_index()
        if "share right" in table:
            both = zip(table["share right"], table["samples"], strict=True)
            table["95 %"] = ["{:.4f} to {:.4f}".format(*wilson(*one)) for one in both]
    text: str = table.to_string(index=False, na_rep="-", float_format="{:.4f}".format)
    return text.splitlines()
