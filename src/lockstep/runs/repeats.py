"""What the numbers of repeated runs say: of one setting, whose runs differ in seed or fold, and of two settings.

Intervals are those of 95 %, by Student's t; a difference is seen by a t-test at 5 % with a probability of 0.8. scipy is
imported where it computes: a table without repeated runs does not need it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

REPEATS = ("seed", "loader.fold", "loader.split_seed")  # keys in which runs of one setting differ
# Parts of the config that change no number of a run.
NO_NUMBER: tuple[str, ...] = ("launch.", "backend.", "sweep.", "logger", "logging.", "snapshot.")
NO_NUMBER += ("data_dir", "run_dir", "resume", "mode.", "trainer.pause_after", *REPEATS)
CONFIDENCE, POWER = 0.95, 0.8
MOST = 10_000  # pairs that `pairs_for` counts up to


def is_repeat(word: str) -> bool:
    """Whether an override, such as seed=3, gives another run of the same setting."""
    return word.lstrip("+").partition("=")[0] in REPEATS


def setting_of(words: Sequence[str]) -> tuple[str, ...]:
    """The overrides of a run without those that only repeat it: runs for which they are equal are of one setting."""
    return tuple(word for word in words if not is_repeat(word))


@dataclass(frozen=True)
class Estimate:
    """A mean, and how well it is known.

    std: sample standard deviation of one number, 0 if nothing tells the spread.
    count: of the numbers; of unpaired differences the number a side with which both sides would be known as well.
    freedom: degrees of freedom of `std`, 0 if nothing tells the spread.
    overlap: variance that more numbers do not remove, in units of std^2; see `split_overlap`.
    """

    mean: float
    std: float
    count: float
    freedom: float
    overlap: float = 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.std * math.sqrt(1 / self.count + self.overlap)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the true mean is, with 95 %. None if the spread is not known: for one number, and for equal ones,
        which a metric of few samples gives by chance.
        """
        if not self.freedom or not self.std:
            return None
        half = _critical(self.freedom) * self.error
        return self.mean - half, self.mean + half

    @property
    def visible(self) -> float | None:
        """The smallest difference from 0 that so many numbers show in 80 % of all cases. None without an interval."""
        if not self.freedom or not self.std:
            return None
        return _noncentrality(self.freedom) * self.error


def estimate(values: Sequence[float], overlap: float = 0.0) -> Estimate:
    """The mean of independent numbers, at least one. The spread of numbers that are not all finite is not known."""
    count = len(values)
    if count == 1 or not all(map(math.isfinite, values)):
        return Estimate(fmean(values), 0.0, count, 0)
    return Estimate(fmean(values), stdev(values), count, count - 1, overlap)


def paired(a: Sequence[float], b: Sequence[float], overlap: float = 0.0) -> Estimate:
    """Of b - a, where the numbers at one place belong together, as those of one seed do."""
    return estimate([other - one for one, other in zip(a, b, strict=True)], overlap)


def unpaired(a: Sequence[float], b: Sequence[float], overlap: float = 0.0) -> Estimate:
    """Of b - a, by Welch's t-test: the two sides may have other spreads, and other counts."""
    one, other = estimate(a), estimate(b)
    std = math.hypot(one.std, other.std)
    squares = one.std**2 / one.count, other.std**2 / other.count
    if not one.freedom or not other.freedom or not std:
        return Estimate(other.mean - one.mean, 0.0, min(one.count, other.count), 0.0)
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / one.freedom + squares[1] ** 2 / other.freedom)
    return Estimate(other.mean - one.mean, std, std**2 / sum(squares), freedom, overlap)


def split_overlap(runs: Sequence[Mapping[str, Any]]) -> float:
    """For `overlap`, of runs with these run.json; 0 if they have not held out several parts of the training data.

    Any two folds train on mostly the same samples, so their numbers are less independent than they look (Nadeau and
    Bengio 2003; for repeated folds Bouckaert and Frank 2004). So do any two values of loader.split_seed.
    """
    configs = [run["config"] for run in runs]
    if len({(config.get("loader.fold"), config.get("loader.split_seed")) for config in configs}) < 2:
        return 0.0
    folds, share = configs[0].get("loader.folds"), configs[0].get("loader.validation")
    if isinstance(folds, int) and folds >= 2:
        return 1 / (folds - 1)
    known = [data for run in runs if "validation_data" in (data := run.get("data", {}))]
    parts = {data["validation_data"]: data["validation_samples"] / data["training_samples"] for data in known}
    if len(parts) < 2:  # validation data of its own
        return 0.0
    return share / (1 - share) if isinstance(share, float) and share < 1 else max(parts.values())


def pairs_for(difference: float, std: float, overlap: float = 0.0) -> int | None:
    """How many pairs show a difference in 80 % of all cases. None if more than `MOST`.

    std: of the difference of one pair; above 0.
    """

    def suffice(count: int) -> bool:
        return (Estimate(0.0, std, count, count - 1, overlap).visible or 0.0) <= abs(difference)

    high = 2
    while not suffice(high):
        high *= 2
        if high > MOST:
            return None
    low = high // 2  # too few, or 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffice(middle) else (middle, high)
    return high


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Of pairs. None for fewer than three, or if one side does not vary."""
    if len(a) < 3 or not (spreads := stdev(a) * stdev(b)):
        return None
    means = fmean(a), fmean(b)
    covariance = sum((x - means[0]) * (y - means[1]) for x, y in zip(a, b, strict=True)) / (len(a) - 1)
    return covariance / spreads


def is_share(metric: str) -> bool:
    """Whether a metric is a mean, over samples, of numbers from 0 to 1: then its interval follows from their number."""
    return metric == "accuracy" or metric.removeprefix("top").isdecimal()


def decimals_for(estimates: Sequence[Estimate]) -> int:
    """With which the smallest spread is seen: two digits of it. 4 where none is known."""
    spreads = [estimate.std for estimate in estimates if estimate.std > 0]
    return min(max(1 - math.floor(math.log10(min(spreads))), 0), 8) if spreads else 4


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of 95 % of a share, such as an accuracy, that was counted over `count` samples (Wilson 1927)."""
    from scipy.special import ndtri

    z = float(ndtri((1 + CONFIDENCE) / 2))
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return centre - half, centre + half


def _critical(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _noncentrality(freedom: float) -> float:
    """The true difference, in standard errors, that a two-sided t-test sees with `POWER`. The other tail is 0."""
    from scipy.special import nctdtrinc

    return float(nctdtrinc(freedom, 1 - POWER, _critical(freedom)))
