"""A race between settings: each is trained with more and more seeds, until one is shown to be the best.

All settings have the same seeds, so two of them are compared by the differences of their objectives, seed by seed. The
test is a mixture of t likelihood ratios (Robbins 1970; Lai 1976; for unknown variance Pérez-Ortiz, Lardy, de Heide and
Grünwald, "E-statistics, group invariance and anytime-valid testing", Annals of Statistics 2024; Wang and Ramdas,
"Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", Sequential Analysis 2025).
Its error probability holds however often one looks, so a race may be stopped, looked at and made longer at any time.
"""

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.runs.repeats import REPEATS, setting_of
from lockstep.sweeps.search import Job, Name, Plan, Search, SweepSettings, add_jobs, changed_words
from lockstep.sweeps.table import FAILED, FINISHED, WAITING, Row, SweepTable

if TYPE_CHECKING:
    import numpy

SEED = "seed"
NAMED = 10  # settings that are left, in the verdict
Results = Mapping[int, Mapping[int, float]]
"""{setting: {round: objective}}. Round n trains with the n-th seed."""


def log_evidence(count: Any, total: Any, squares: Any) -> "numpy.ndarray[Any, Any]":
    """How much more likely differences are if their mean is above 0 than if it is 0: the logarithm of the ratio.

    With normal differences of any variance and a mean of 0 or less, exp of it exceeds 1 / p at some count with a
    probability of at most p. The mean over the standard deviation has the positive half of a standard normal
    distribution as its weight, the standard deviation the weight 1 / sd. The result depends on the scale in no way.

    count, total, squares: number, sum and sum of squares of the differences, arrays of one shape or numbers.
    Differences that are all 0 give 0.
    """
    import numpy as np
    from scipy.special import stdtr

    count, total, squares = np.asarray(count, float), np.asarray(total, float), np.asarray(squares, float)
    rest = squares - total**2 / (1 + count)  # around the mean that the weight shrinks to 0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = -np.log1p(count) / 2 + count / 2 * (np.log(squares) - np.log(rest))
        above = stdtr(count, total * np.sqrt(count / (rest * (1 + count))))  # the probability that the mean is above 0
        return np.where(squares > 0, np.log(2) + ratio + np.log(above), 0.0)


def threshold(settings: int, confidence: float) -> float:
    """The evidence at which a setting is dropped, for any of the `settings` - 1 others that is better.

    One that is the best is dropped with a probability of at most (1 - confidence) / 2 (Ville's inequality, and the sum
    over the others). Among settings of which two are equally good, a winner needs that one of these two is dropped.
    """
    return math.log(2 * (settings - 1) / (1 - confidence))


@dataclass
class Standing:
    """A race so far.

    rounds: the settings in each round that has ended for all of them.
    left: the settings that may still win.
    dropped: {setting: the number of seeds after which another was shown to be better}.
    failed: those of which a job failed, or returned no finite number.
    """

    left: list[int]
    rounds: list[list[int]] = field(default_factory=list)
    dropped: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)


def standing(settings: int, results: Results, confidence: float, mode: str) -> Standing:
    """The race as far as whole rounds tell, so that it does not depend on which job ends first.

    settings: how many there are.
    results: NaN for a job that failed.
    mode: "min" or "max".
    """
    import numpy as np

    now = Standing(list(range(settings)))
    while len(now.left) > 1 and all(len(now.rounds) in results[setting] for setting in now.left):
        now.rounds.append(now.left)
        count = len(now.rounds)
        values = np.array([[results[setting][number] for number in range(count)] for setting in now.left])
        is_finite = np.isfinite(values[:, -1])
        now.failed += [setting for setting, finite in zip(now.left, is_finite, strict=True) if not finite]
        now.left = [setting for setting in now.left if setting not in now.failed]
        values = values[is_finite] if mode == "max" else -values[is_finite]
        difference = values[:, None] - values[None]  # of each setting, minus each setting, in each round
        evidence = log_evidence(count, difference.sum(-1), (difference**2).sum(-1))
        is_beaten = np.any(evidence >= threshold(settings, confidence), axis=0).tolist()
        beaten = [setting for setting, beaten in zip(now.left, is_beaten, strict=True) if beaten]
        now.dropped |= dict.fromkeys(beaten, count)
        now.left = [setting for setting in now.left if setting not in beaten]
    return now


def fewest_rounds(settings: int, confidence: float) -> int:
    """After how many seeds a setting can be dropped at the earliest: if all differences are the same."""
    return next(n for n in itertools.count(1) if log_evidence(n, n, n) >= threshold(settings, confidence))


class Race(Search):
    """Trains the settings that are left with the next seed, as long as `trials` allows a whole round.

    The rows of the table hold all that this needs to go on after a kill: the seed is among what a job changes. The
    first rounds, after which none can be dropped yet, run without a pause between them.
    """

    def __init__(self, table: SweepTable, plan: Plan, name: Name, settings: SweepSettings) -> None:
        assert settings.trials is not None
        self.table, self.name, self.fixed, self.mode = table, name, set(plan.fixed), settings.mode
        self.settings = [without_seed(overrides) for overrides in plan.lists]
        self.confidence, self.trials, self.first_seed = settings.confidence, settings.trials, settings.first_seed
        self.fewest = fewest_rounds(len(self.settings), self.confidence)
        self.asked: set[tuple[int, int]] = set()
        self.places = {self._words(setting): setting for setting in range(len(self.settings))}
        for row in table if settings.retries_failed else ():
            if row.state == FAILED and self._setting(row) is not None:
                table.update(row.number, state=WAITING, cause="")

    def ask(self) -> Job | None:
        for setting, number in self._to_run(self._standing()):
            if (setting, number) not in self.asked:
                self.asked.add((setting, number))
                (job,) = add_jobs(self.table, [self._overrides(setting, number)], self.fixed, self.name)
                return job
        return None

    def outlook(self) -> str:
        return (
            f"race trains the settings that are left with the next seeds, until one is shown to be the best, "
            f"in at most {self.trials} jobs"
        )

    def verdict(self) -> str:
        results, now = self._results(), self._standing()
        trainings = f"{sum(map(len, results.values()))} trainings"
        if len(now.left) == 1 and now.dropped:
            sure = f"(confidence {self.confidence:g} at every look)"
            parts = [f"{self._words(now.left[0])} is best {sure} after {trainings}"]
        elif len(now.left) < 2:
            parts = [f"no winner after {trainings}"]
        elif any(self._to_run(now)):
            parts = [f"no winner yet after {trainings}"]
        else:
            parts = [f"no winner within {trainings}, and sweep.trials={self.trials} allows no other seed"]
        rounds = range(len(now.rounds))
        means = {each: sum(results[each][n] for n in rounds) / len(rounds) for each in now.left if rounds}
        order = sorted(means, key=lambda each: -means[each] if self.mode == "max" else means[each])
        lists = {
            "left": [f"{self._words(each)} (mean {means[each]:.6g})" for each in order[:NAMED] if len(order) > 1],
            "dropped": [f"{self._words(each)} (after {seeds} seeds)" for each, seeds in now.dropped.items()],
            "failed": [self._words(each) for each in now.failed],
        }
        parts += [f"{name}: {', '.join(words)}" for name, words in lists.items() if words]
        return f"race:       {'; '.join(parts)}"

    def _to_run(self, now: Standing) -> Iterator[tuple[int, int]]:
        """(setting, round) of the jobs that are needed and have not ended, in the order in which to start them."""
        ended, results = len(now.rounds), self._results()
        used = self.fewest * len(self.settings) + sum(map(len, now.rounds[self.fewest :]))
        if len(now.left) < 2 or (ended >= self.fewest and used + len(now.left) > self.trials):
            return
        for number in range(ended, max(ended + 1, self.fewest)):
            for setting in now.left:
                is_out = any(before < number and not math.isfinite(value) for before, value in results[setting].items())
                if number not in results[setting] and not is_out:
                    yield setting, number

    def _standing(self) -> Standing:
        return standing(len(self.settings), self._results(), self.confidence, self.mode)

    def _results(self) -> dict[int, dict[int, float]]:
        """{setting: {round: objective}} of the rows that have ended; NaN for failed ones."""
        results: dict[int, dict[int, float]] = {setting: {} for setting in self.places.values()}
        for row in self.table:
            setting = self._setting(row)
            number = int(row.values.get(SEED, -1)) - self.first_seed
            if setting is not None and number >= 0 and row.state in (FINISHED, FAILED):
                value = row.objective if row.state == FINISHED else None
                results[setting][number] = math.nan if value is None else value
        return results

    def _setting(self, row: Row) -> int | None:
        """None for a row of an earlier command with other settings."""
        return self.places.get(shlex.join(without_seed(shlex.split(row.overrides))))

    def _overrides(self, setting: int, number: int) -> list[str]:
        return [*self.settings[setting], f"{SEED}={self.first_seed + number}"]

    def _words(self, setting: int) -> str:
        """What a setting changes."""
        return changed_words(self.settings[setting], self.fixed)


def without_seed(overrides: Sequence[str]) -> list[str]:
    return [word for word in overrides if not word.startswith(f"{SEED}=")]


def first_round(lists: Sequence[Sequence[str]], first_seed: int) -> list[list[str]]:
    """The overrides of the first job of each setting. Raises ConfigError for lists that repeat a setting."""
    if len({setting_of(overrides) for overrides in lists}) < len(lists):
        raise ConfigError(
            f"sweep.search=race repeats each setting itself, with the seeds from {first_seed} on; "
            f"leave lists of {', '.join(REPEATS)} out, and type each value once"
        )
    return [[*without_seed(overrides), f"{SEED}={first_seed}"] for overrides in lists]
