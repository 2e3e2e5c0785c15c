"""The values that a search draws from: `interval(0.001,0.1)`, or one of a list."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.errors import ConfigError

DRAWS = 200  # of the values of one job, until the constraints allow one
DIGITS = 6  # of a drawn number, so that it is read and typed easily, and does not depend on the C library


@dataclass(frozen=True)
class Numbers:
    """Numbers from low to high, both included. log: spread by their logarithm. whole: whole numbers only."""

    low: float
    high: float
    log: bool
    whole: bool

    def draw(self, chance: random.Random) -> str:
        """One of the values, as it is typed."""
        if self.log:
            return self.word(math.exp(chance.uniform(math.log(self.low), math.log(self.high))))
        return self.word(
            chance.randint(int(self.low), int(self.high)) if self.whole else chance.uniform(self.low, self.high)
        )

    def word(self, value: float) -> str:
        """The value as it is typed, with 6 digits."""
        rounded = round(value) if self.whole else float(f"{value:.{DIGITS}g}")
        return str(min(max(rounded, self.low), self.high))

    def limits(self) -> list[str]:
        return [self.word(self.low), self.word(self.high)]

    def holds(self, word: str) -> bool:
        """Whether a value as typed is one of these."""
        try:
            return self.low <= (int if self.whole else float)(word) <= self.high
        except ValueError:
            return False


@dataclass(frozen=True)
class Choices:
    """Any values, as they are typed."""

    words: tuple[str, ...]

    def draw(self, chance: random.Random) -> str:
        return chance.choice(self.words)

    def limits(self) -> list[str]:
        return list(self.words)

    def holds(self, word: str) -> bool:
        return word in self.words


Space = Mapping[str, Numbers | Choices]
"""{key: its values}"""
Allows = Callable[[Mapping[str, str]], bool]
"""Whether a job with these values, as typed, may be drawn."""


def interval(key: str, low: float, high: float, tags: set[str]) -> Numbers:
    """What `key=tag(log,interval(low,high))` means; `int(interval(low,high))` has whole limits.

    Raises ConfigError for limits in the wrong order, and for a logarithm of what is not above 0.
    """
    log, whole = "log" in tags, isinstance(low, int) or "int" in tags
    typed = f"interval({low},{high})"
    if tags - {"log", "int"}:
        unknown = ",".join(sorted(tags - {"log", "int"}))
        raise ConfigError(f"{key}=tag({unknown},{typed}) has an unknown tag; type {key}=tag(log,{typed})")
    if not low < high:
        raise ConfigError(f"{key}={typed} wants the smaller limit first; type {key}=interval({high},{low})")
    if log and low <= 0:
        raise ConfigError(f"{key}=tag(log,{typed}) wants limits above 0; type {key}={typed}")
    return Numbers(int(low), int(high), log, True) if whole else Numbers(low, high, log, False)


def allow_all(values: Mapping[str, str]) -> bool:
    """Without constraints."""
    return True


def draw(space: Space, seed: int, number: int, allows: Allows = allow_all) -> dict[str, str]:
    """The values of the job with this number. They depend on nothing else, so a resumed sweep draws them again.

    allows: values that it refuses are drawn again. Raises ConfigError if it refuses all of `DRAWS`.
    """
    chances = {key: random.Random(f"{seed} {number} {key}") for key in space}
    for _ in range(DRAWS):
        drawn = {key: values.draw(chances[key]) for key, values in space.items()}
        if allows(drawn):
            return drawn
    raise ConfigError(f"sweep.constraints refuse {DRAWS} draws in a row; type other limits, or sweep.constraints=[]")


def words(values: Mapping[str, str]) -> list[str]:
    """Values as overrides."""
    return [f"{key}={value}" for key, value in values.items()]


def limits_of(space: Space) -> list[dict[str, str]]:
    """A few jobs that have every limit of an interval and every word of a list once."""
    columns = {key: values.limits() for key, values in space.items()}
    count = max(map(len, columns.values()), default=0)
    return [{key: column[index % len(column)] for key, column in columns.items()} for index in range(count)]
