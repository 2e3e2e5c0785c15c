"""Which jobs a sweep runs: the contract of a search, the list of jobs that was typed, the values that are drawn, and
the constraints between them.
"""

import ast
import importlib.util
import math
import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.config.schema import Sweep
from lockstep.errors import ConfigError
from lockstep.sweeps.table import FAILED, FINISHED, PRUNED, RUNNING, WAITING, Row, SweepTable

LIST, HALVING, RANDOM, TPE, RACE = "list", "halving", "random", "tpe", "race"
PAUSE = "trainer.pause_after"  # how a job is trained to a rung of a search by halving
OF_RUNGS = ("trainer.epochs", PAUSE)
LONGEST_NAME = 120  # characters of a job's folder
DRAWS = 200  # of the values of one job, until the constraints allow one
DIGITS = 6  # of a drawn number, so that it is read and typed easily, and does not depend on the C library
CONSTRAINTS = "sweep.constraints"
EXAMPLE = f"{CONSTRAINTS}=['optimizer.lr * trainer.epochs <= 10']"
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)

Name = Callable[[int, str, Sequence[str]], str]
"""The folder of a job, from its number, what it changes, and all its overrides."""


@dataclass(frozen=True)
class SweepSettings(Sweep):
    """The section `sweep` of the config, and what a sweep needs to know of the rest.

    objective: "test/<metric>".
    mode: "min" or "max", the better direction of the objective.
    epochs: of a whole job.
    pause_after: `trainer.pause_after` of the config, which a search by halving sets itself.
    first_seed: `seed` of the config, from which a race counts.
    """

    objective: str
    mode: str
    epochs: int
    pause_after: int | None = None
    first_seed: int = 0

    @property
    def retries_failed(self) -> bool:
        return self.retry == "failed"


@dataclass(frozen=True)
class Job:
    """One run of a sweep. overrides: all words of its command. number: its row in the table.

    part: in words, which part of the run this is, empty for a whole run.
    """

    number: int
    overrides: tuple[str, ...]
    part: str = ""

    def describe(self, changed: str) -> str:
        """ "job 3, optimizer.lr=0.1, to epoch 3 of 9". changed: what it changes."""
        return ", ".join(filter(None, [f"job {self.number}", changed or "no override", self.part]))


class Search:
    """Chooses the jobs of a sweep while it runs. One process asks and tells: the sweep's parent, or rank 0."""

    def ask(self) -> Job | None:
        """The next job to start, which has a row in the table. None: none until the next `tell`.

        The sweep ends when this returns None and no job runs. The same number may be asked for again, with other
        overrides: the run then goes on from its snapshot in the same folder.
        """
        raise NotImplementedError

    def tell(self, number: int) -> None:
        """A job has ended, as its row of the table says."""

    def outlook(self) -> str:
        """One sentence: what this may run beyond the jobs that it asks for before the first result. Empty: nothing."""
        return ""

    def verdict(self) -> str:
        """A line for the end of the summary: what this has found out. Empty: nothing beyond the table."""
        return ""


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
    return {FINISHED, PRUNED} if retry_failed else {FINISHED, PRUNED, FAILED}


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
        raise ConfigError(f"{key}={typed} must have the smaller limit first; type {key}=interval({high},{low})")
    if log and low <= 0:
        raise ConfigError(f"{key}=tag(log,{typed}) must have limits above 0; type {key}={typed}")
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


class Constraint:
    """One comparison, or a chain of them, of keys, numbers, + - * / and parentheses. keys: those that it names.

    Raises ConfigError for anything else. So Python itself may compute it.
    """

    def __init__(self, text: str) -> None:
        self.text, self.keys = text, dict[str, None]()
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._unreadable() from None
        compared = tree.body
        if not isinstance(compared, ast.Compare):
            raise ConfigError(f"{CONSTRAINTS}: {text} compares nothing; type {EXAMPLE}")
        if not all(isinstance(comparison, COMPARISONS) for comparison in compared.ops):
            raise self._unreadable()
        first, *others = map(self._checked, [compared.left, *compared.comparators])
        checked = ast.Expression(ast.Compare(first, compared.ops, others))
        self.code = compile(ast.fix_missing_locations(checked), CONSTRAINTS, "eval")

    def holds(self, values: Mapping[str, object]) -> bool:
        """values: of the keys that it names, which a job has. Raises ConfigError for a value that is no number."""
        for key in self.keys:
            if key not in values:
                raise ConfigError(f"{CONSTRAINTS}: {self.text} names {key}, which is no key of a job; type {EXAMPLE}")
            value = values[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"{CONSTRAINTS}: {self.text} needs a number, and {key} is {value}; type {key}=<a number>"
                )
        try:
            return bool(eval(self.code, {"__builtins__": {}}, dict(values)))
        except ArithmeticError as error:
            raise ConfigError(f"{CONSTRAINTS}: {self.text} cannot be computed ({error}); type {EXAMPLE}") from None

    def _checked(self, node: ast.expr) -> ast.expr:
        """An expression in which each key, such as optimizer.lr, is one name. Raises ConfigError for another."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
            return ast.BinOp(self._checked(node.left), node.op, self._checked(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return ast.UnaryOp(node.op, self._checked(node.operand))
        if not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
            key = ast.unparse(node)
            if not isinstance(node, ast.Name | ast.Attribute) or not re.fullmatch(r"\w+(\.\w+)*", key):
                raise self._unreadable(f": {key}")
            self.keys[key] = None
            return ast.Name(key, ast.Load())
        return node

    def _unreadable(self, part: str = "") -> ConfigError:
        return ConfigError(
            f"{CONSTRAINTS}: {self.text} cannot be read{part}; "
            f"type keys, numbers, + - * / and a comparison, such as {EXAMPLE}"
        )


@dataclass(frozen=True)
class Plan:
    """What a sweep shall run.

    lists: the overrides of each job; of a space from which jobs are drawn later, those of jobs at its limits.
    fixed: the overrides that all jobs have.
    space: None if all jobs are known.
    allows: what may be drawn from it.
    left_out: how many listed jobs the constraints refuse.
    are_drawn: whether the jobs of `lists` are drawn at random.
    """

    lists: Sequence[Sequence[str]]
    fixed: Sequence[str]
    space: Space | None = None
    allows: Allows = allow_all
    left_out: int = 0
    are_drawn: bool = False


def make_plan(
    settings: SweepSettings,
    fixed: Sequence[str],
    list_all: Callable[[], Sequence[Sequence[str]]],
    read_space: Callable[[], Space],
    allows: Callable[[Sequence[str]], bool],
) -> Plan:
    """What to run.

    list_all: the overrides of each job of the product of all lists; it raises ConfigError for an interval.
    read_space: what the typed lists and intervals allow; it raises ConfigError if nothing varies.
    allows: whether the constraints allow a job with these overrides.
    Raises ConfigError for values that do not fit the search, and if no job is left.
    """
    search, trials = settings.search, settings.trials
    if search in (RANDOM, TPE) and trials is None:
        raise ConfigError(f"sweep.search={search} needs the number of its jobs; type sweep.trials=20")
    if search == LIST and trials is not None:
        raise ConfigError("sweep.trials belongs to a search that draws its jobs; type sweep.search=random")
    if search == RACE and trials is None:
        raise ConfigError("sweep.search=race needs the most jobs that it may take; type sweep.trials=60")
    if trials is None or search == RACE:
        lists = list_all()
        if search == RACE:
            from lockstep.sweeps.race import first_round

            lists = first_round(lists, settings.first_seed)
        allowed = [overrides for overrides in lists if allows(overrides)]
        if not allowed:
            raise ConfigError(f"{CONSTRAINTS} refuse all {len(lists)} jobs; type other values, or {CONSTRAINTS}=[]")
        return Plan(allowed, fixed, left_out=len(lists) - len(allowed))
    space = read_space()

    def allows_values(values: Mapping[str, str]) -> bool:
        return allows([*fixed, *words(values)])

    if search == TPE:
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError("sweep.search=tpe needs Optuna; type pip install optuna, or sweep.search=random")
        draw(space, settings.seed, 0, allows_values)  # raises an error if nothing can be drawn
        corners = [[*fixed, *words(values)] for values in limits_of(space) if allows_values(values)]
        return Plan(corners, fixed, space, allows_values)
    drawn = [[*fixed, *words(draw(space, settings.seed, number, allows_values))] for number in range(trials)]
    return Plan(drawn, fixed, are_drawn=True)


def check_search(settings: SweepSettings, plan: Plan, objectives: Sequence[str], submits: bool) -> None:
    """Raise ConfigError for a search that cannot run these jobs.

    objectives: of the jobs.
    submits: whether the jobs go to Slurm, and nobody waits for them.
    """
    search = settings.search
    if search not in (HALVING, TPE, RACE):
        return
    if submits:
        raise ConfigError(
            f"sweep.search={search} waits for the result of each job, and launch=slurm does not; type launch=env"
        )
    if len(set(objectives)) > 1:
        raise ConfigError(
            f"sweep.search={search} compares the objectives of its jobs, and these are different metrics: "
            f"{', '.join(sorted(set(objectives)))}; type monitor={objectives[0]}"
        )
    if search == RACE:
        from lockstep.sweeps.race import fewest_rounds

        count = len(plan.lists)
        if count < 2:
            raise ConfigError("sweep.search=race compares settings, and there is one; type optimizer.lr=0.1,0.05")
        fewest = count * fewest_rounds(count, settings.confidence)
        if settings.trials is not None and settings.trials < fewest:
            raise ConfigError(
                f"sweep.trials={settings.trials} is too few for a race of {count} settings, of which none can win "
                f"before {fewest} jobs; type sweep.trials={3 * fewest}"
            )
        return
    if search == TPE:
        return
    varied = {word.partition("=")[0] for overrides in plan.lists for word in overrides if word not in plan.fixed}
    typed = sorted(varied & set(OF_RUNGS)) or [PAUSE] * (settings.pause_after is not None)
    if typed:
        raise ConfigError(f"sweep.search=halving sets the epochs of each job; leave {typed[0]}= out of what varies")
    if settings.first_rung >= settings.epochs:
        raise ConfigError(
            f"sweep.first_rung={settings.first_rung} must be less than trainer.epochs={settings.epochs}; "
            f"type trainer.epochs={settings.first_rung * settings.eta}"
        )


def build_search(table: SweepTable, settings: SweepSettings, plan: Plan, name: Name, slots: int) -> Search:
    """The search, whose jobs get rows in the table. slots: how many jobs run at once."""
    if plan.space is not None:
        from lockstep.sweeps.tpe import Tpe

        return Tpe(table, plan, name, settings, slots)
    if settings.search == RACE:
        from lockstep.sweeps.race import Race

        return Race(table, plan, name, settings)
    jobs = add_jobs(table, plan.lists, set(plan.fixed), name)
    chosen = to_run(table, jobs, settings.retries_failed)
    if settings.search != HALVING:
        return JobList(chosen)
    from lockstep.sweeps.halving import Halving

    return Halving(table, jobs, settings)
