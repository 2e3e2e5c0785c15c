"""Which jobs a sweep runs: the contract of a search, the list of jobs that was typed, and the values that are drawn."""

import importlib.util
import math
import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.config.schema import Sweep
from lockstep.errors import ConfigError
from lockstep.sweeps.table import FAILED, FINISHED, RUNNING, WAITING, Row, SweepTable

LIST, RANDOM, TPE = "list", "random", "tpe"
LONGEST_NAME = 120  # characters of a job's folder
DIGITS = 6  # of a drawn number, so that it is read and typed easily, and does not depend on the C library

Name = Callable[[int, str, Sequence[str]], str]
"""The folder of a job, from its number, what it changes, and all its overrides."""


@dataclass(frozen=True)
class SweepSettings(Sweep):
    """The section `sweep` of the config, and what a sweep needs to know of the rest.

    objective: "test/<metric>".
    mode: "min" or "max", the better direction of the objective.
    """

    objective: str
    mode: str

    @property
    def retries_failed(self) -> bool:
        return self.retry == "failed"


@dataclass(frozen=True)
class Job:
    """One run of a sweep. overrides: all words of its command. number: its row in the table."""

    number: int
    overrides: tuple[str, ...]


class Search:
    """Chooses the jobs of a sweep while it runs. One process asks and tells: the sweep's parent, or rank 0."""

    def ask(self) -> Job | None:
        """The next job to start, which has a row in the table. None: none until the next `tell`.

        The sweep ends when this returns None and no job runs.
        """
        raise NotImplementedError


class JobList(Search):
    """The jobs that a command lists. `to_run` has left out those that an earlier command has ended in this folder."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.waiting = list(jobs)

    def ask(self) -> Job | None:
        return self.waiting.pop(0) if self.waiting else None


def changed_words(overrides: Sequence[str], fixed: set[str]) -> str:
    """What a job changes, as words of a shell: its overrides without those that all jobs have."""
    return shlex.join(word for word in overrides if word not in fixed)


def add_jobs(
    table: SweepTable,
    lists: Sequence[Sequence[str]],
    fixed: set[str],
    name: Name,
) -> list[Job]:
    """A row for each job that has none yet, with the next numbers. Returns all these jobs with their numbers.

    lists: the overrides of each; the same ones twice are two jobs.
    """
    known: dict[str, list[int]] = {}
    for row in table:
        known.setdefault(row.overrides, []).append(row.number)
    added, jobs, next_number = [], [], max(table.rows, default=-1) + 1
    for overrides in lists:
        changed = changed_words(overrides, fixed)
        if known.get(changed):
            number = known[changed].pop(0)
        else:
            number, next_number = next_number, next_number + 1
            added.append(Row(number, changed, name(number, changed, overrides)))
        jobs.append(Job(number, tuple(overrides)))
    table.add(added)
    return jobs


def over(retry_failed: bool) -> set[str]:
    """The states of jobs that do not run again."""
    return {FINISHED} if retry_failed else {FINISHED, FAILED}


def to_run(table: SweepTable, jobs: Sequence[Job], retry_failed: bool) -> list[Job]:
    """Those of `jobs` that have to run: not those that are over or run elsewhere, failed ones with `retry_failed`."""
    done = over(retry_failed) | {RUNNING}
    chosen = [job for job in jobs if table.rows[job.number].state not in done]
    for job in chosen:
        if table.rows[job.number].state == FAILED:
            table.update(job.number, state=WAITING, cause="")
    return chosen


def folder_name(number: int, changed: str) -> str:
    """A job's folder: its number, and what it changes. Safe for file systems, shells and Hydra's grammar."""
    words = "+".join(word.removeprefix("+") for word in shlex.split(changed))
    safe = re.sub(r"[^\w.=+-]", "-", words, flags=re.ASCII)
    return f"{number}_{safe}"[:LONGEST_NAME].rstrip("_")


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

    def value(self, word: str) -> float:
        """The number that is typed so. Raises ValueError for another word."""
        return int(word) if self.whole else float(word)

    def limits(self) -> list[str]:
        return [self.word(self.low), self.word(self.high)]

    def holds(self, word: str) -> bool:
        """Whether a value as typed is one of these."""
        try:
            return self.low <= self.value(word) <= self.high
        except ValueError:
            return False


@dataclass(frozen=True)
class Choices:
    """Any values, as they are typed."""

    words: tuple[str, ...]

    def draw(self, chance: random.Random) -> str:
        return chance.choice(self.words)

    def word(self, value: str) -> str:
        return value

    def value(self, word: str) -> str:
        return word

    def limits(self) -> list[str]:
        return list(self.words)

    def holds(self, word: str) -> bool:
        return word in self.words


Space = Mapping[str, Numbers | Choices]
"""{key: its values}"""


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
        raise ConfigError(f"{key}={typed} must have the smaller limit first; type {key}=interval({high},{low})")
    if log and low <= 0:
        raise ConfigError(f"{key}=tag(log,{typed}) must have limits above 0; type {key}={typed}")
    return Numbers(int(low), int(high), log, True) if whole else Numbers(low, high, log, False)


def draw(space: Space, seed: int, number: int) -> dict[str, str]:
    """The values of the job with this number. They depend on nothing else, so a resumed sweep draws them again."""
    return {key: values.draw(random.Random(f"{seed} {number} {key}")) for key, values in space.items()}


def words(values: Mapping[str, str]) -> list[str]:
    """Values as overrides."""
    return [f"{key}={value}" for key, value in values.items()]


def limits_of(space: Space) -> list[dict[str, str]]:
    """A few jobs that have every limit of an interval and every word of a list once."""
    columns = {key: values.limits() for key, values in space.items()}
    count = max(map(len, columns.values()), default=0)
    return [{key: column[index % len(column)] for key, column in columns.items()} for index in range(count)]


@dataclass(frozen=True)
class Plan:
    """What a sweep shall run.

    lists: the overrides of each job; of a space from which jobs are drawn later, those of jobs at its limits.
    fixed: the overrides that all jobs have.
    space: None if all jobs are known.
    are_drawn: whether the jobs of `lists` are drawn at random.
    """

    lists: Sequence[Sequence[str]]
    fixed: Sequence[str]
    space: Space | None = None
    are_drawn: bool = False


def make_plan(
    settings: SweepSettings,
    fixed: Sequence[str],
    list_all: Callable[[], Sequence[Sequence[str]]],
    read_space: Callable[[], Space],
) -> Plan:
    """What to run.

    list_all: the overrides of each job of the product of all lists; it raises ConfigError for an interval.
    read_space: what the typed lists and intervals allow; it raises ConfigError if nothing varies.
    Raises ConfigError for values that do not fit the search.
    """
    search, trials = settings.search, settings.trials
    if search == LIST and trials is not None:
        raise ConfigError("sweep.trials belongs to a search that draws its jobs; type sweep.search=random")
    if search == LIST:
        return Plan(list_all(), fixed)
    if trials is None:
        raise ConfigError(f"sweep.search={search} needs the number of its jobs; type sweep.trials=20")
    space = read_space()
    if search == TPE:
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError("sweep.search=tpe needs Optuna; type pip install optuna, or sweep.search=random")
        corners = [[*fixed, *words(values)] for values in limits_of(space)]
        return Plan(corners, fixed, space)
    drawn = [[*fixed, *words(draw(space, settings.seed, number))] for number in range(trials)]
    return Plan(drawn, fixed, are_drawn=True)


def check_search(settings: SweepSettings, objectives: Sequence[str], submits: bool) -> None:
    """Raise ConfigError for a search that cannot run its jobs.

    objectives: of the jobs.
    submits: whether the jobs go to Slurm, and nobody waits for them.
    """
    if settings.search != TPE:
        return
    if submits:
        raise ConfigError(
            "sweep.search=tpe waits for the result of each job, and launch=slurm does not; type launch=env"
        )
    if len(set(objectives)) > 1:
        raise ConfigError(
            f"sweep.search=tpe compares the objectives of its jobs, and these are different metrics: "
            f"{', '.join(sorted(set(objectives)))}; type monitor={objectives[0]}"
        )


def build_search(table: SweepTable, settings: SweepSettings, plan: Plan, name: Name, slots: int) -> Search:
    """The search, whose jobs get rows in the table. slots: how many jobs run at once."""
    if plan.space is not None:
        from lockstep.sweeps.tpe import Tpe

        return Tpe(table, plan, name, settings, slots)
    jobs = add_jobs(table, plan.lists, set(plan.fixed), name)
    return JobList(to_run(table, jobs, settings.retries_failed))
