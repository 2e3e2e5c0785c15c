"""Which search a sweep uses, and its jobs or its space. The scan for plugins leaves this file out."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from lockstep.config.check import check_value
from lockstep.config.schema import find_rule
from lockstep.errors import ConfigError
from lockstep.sweeps.halving import PAUSE, Halving
from lockstep.sweeps.output import show
from lockstep.sweeps.search import Job, JobList, Search, add_jobs, changed_words, over, to_run
from lockstep.sweeps.space import Allows, Choices, Numbers, Space, allow_all, draw, interval, limits_of, words
from lockstep.sweeps.sweep import OpenSweep
from lockstep.sweeps.table import Row
from lockstep.sweeps.tpe import Tpe, require_optuna

LIST, HALVING, RANDOM, TPE = "list", "halving", "random", "tpe"
OF_RUNGS = ("trainer.epochs", PAUSE)
Name = Callable[[int, str, Sequence[str]], str]


@dataclass(frozen=True)
class Plan:
    """lists: the overrides of each job; of a space from which jobs are drawn later, those of jobs at its limits.

    fixed: the overrides that all jobs have. space: None if all jobs are known.
    allows: what may be drawn from it. left_out: listed jobs that the constraints refuse. are_drawn: whether the jobs of
    `lists` are drawn at random.
    """

    lists: Sequence[Sequence[str]]
    fixed: Sequence[str]
    space: Space | None = None
    allows: Allows = allow_all
    left_out: int = 0
    are_drawn: bool = False


def make_plan(
    base: Any,
    overrides: list[Override],
    fixed: Sequence[str],
    list_all: Callable[[], Sequence[Sequence[str]]],
    allows: Callable[[Sequence[str]], bool],
) -> Plan:
    """What to run. base: the config of a job without what varies. list_all: the product of all lists.

    allows: whether the constraints allow a job with these overrides. Raises ConfigError for values that do not fit the
    search, and if no job is left.
    """
    for key in ("search", "trials", "seed"):
        rule = find_rule(f"sweep.{key}")
        assert rule is not None
        check_value(f"sweep.{key}", base.sweep[key], rule)
    search, trials = base.sweep.search, base.sweep.trials
    if search in (RANDOM, TPE) and trials is None:
        raise ConfigError(f"sweep.search={search} wants the number of its jobs; type sweep.trials=20")
    if search == LIST and trials is not None:
        raise ConfigError("sweep.trials belongs to a search that draws its jobs; type sweep.search=random")
    if trials is None:
        _refuse_intervals(overrides)
        return _without_refused(list_all(), fixed, allows)
    space = read_space(overrides, fixed)

    def allows_values(values: Mapping[str, str]) -> bool:
        return allows([*fixed, *words(values)])

    seed = base.sweep.seed
    if search == TPE:
        require_optuna()
        draw(space, seed, 0, allows_values)  # raises an error if nothing can be drawn
        corners = [[*fixed, *words(values)] for values in limits_of(space) if allows_values(values)]
        return Plan(corners, fixed, space, allows_values)
    drawn = [[*fixed, *words(draw(space, seed, number, allows_values))] for number in range(trials)]
    return Plan(drawn, fixed, are_drawn=True)


def with_earlier_jobs(plan: Plan, rows: Sequence[Row], retry_failed: bool) -> Plan:
    """The plan with the jobs of earlier commands that are not over, and that this command does not list.

    TPE finds its own in the table.
    """
    if plan.space is not None:
        return plan
    listed = {changed_words(overrides, set(plan.fixed)) for overrides in plan.lists}
    earlier = [row.overrides for row in rows if row.state not in over(retry_failed) and row.overrides not in listed]
    return replace(plan, lists=[*plan.lists, *([*plan.fixed, *shlex.split(changed)] for changed in earlier)])


def _without_refused(
    lists: Sequence[Sequence[str]], fixed: Sequence[str], allows: Callable[[Sequence[str]], bool]
) -> Plan:
    allowed = [overrides for overrides in lists if allows(overrides)]
    if not allowed:
        raise ConfigError(f"sweep.constraints refuse all {len(lists)} jobs; type other values, or sweep.constraints=[]")
    return Plan(allowed, fixed, left_out=len(lists) - len(allowed))


def read_space(overrides: list[Override], fixed: Sequence[str]) -> Space:
    """What Hydra's sweep syntax lists. Raises ConfigError if nothing varies.

    A plain word that is not in `fixed` is of a key that earlier jobs of this sweep vary: here it has one value.
    """
    typed = {override.get_key_element(): override for override in overrides}  # of a key typed twice the last one
    if not any(override.is_sweep_override() for override in typed.values()):
        raise ConfigError("nothing varies in this sweep; type optimizer.lr=tag(log,interval(0.001,0.1))")
    space: dict[str, Numbers | Choices] = {}
    for key, override in typed.items():
        if override.is_sweep_override():
            space[key] = _values(override)
        elif f"{key}={override.get_value_element_as_str()}" not in fixed:
            space[key] = Choices((override.get_value_element_as_str(),))
    return space


def _values(override: Override) -> Numbers | Choices:
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return Choices(tuple(dict.fromkeys(override.sweep_string_iterator())))
    assert value.start is not None
    assert value.end is not None
    return interval(override.get_key_element(), value.start, value.end, set(value.tags))


def _refuse_intervals(overrides: list[Override]) -> None:
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line} is no list of values; type sweep.search=random sweep.trials=20")


def refuse_search(base: Any) -> None:
    """Raise ConfigError for a search or constraints beside a sweeper of Hydra's."""
    if base.sweep.constraints:
        raise ConfigError("sweep.constraints are for this project's own sweeper; leave hydra/sweeper= out")
    if base.sweep.search != LIST:
        raise ConfigError(f"sweep.search={base.sweep.search} and hydra/sweeper= both choose the jobs; leave out one")


def check_search(base: Any, plan: Plan) -> None:
    """Raise ConfigError for a search that cannot run these jobs. base: the config of a job without what varies."""
    search = base.sweep.search
    if search in (HALVING, TPE) and base.launch._target_.endswith(".SlurmLauncher"):
        raise ConfigError(
            f"sweep.search={search} waits for the result of each job, and launch=slurm does not; type launch=env"
        )
    if search != HALVING:
        return
    varied = {word.partition("=")[0] for overrides in plan.lists for word in overrides if word not in plan.fixed}
    typed = sorted(varied & set(OF_RUNGS)) or [PAUSE] * (base.trainer.pause_after is not None)
    if typed:
        raise ConfigError(f"sweep.search=halving sets the epochs of each job; leave {typed[0]}= out of what varies")
    if base.sweep.first_rung >= base.trainer.epochs:
        raise ConfigError(
            f"sweep.first_rung={base.sweep.first_rung} wants less than trainer.epochs={base.trainer.epochs}; "
            f"type trainer.epochs={base.sweep.first_rung * base.sweep.eta}"
        )


def build_search(sweep: OpenSweep, plan: Plan, name: Name, slots: int) -> Search:
    """The search, whose jobs get rows in the table. name: see `add_jobs`. slots: how many jobs run at once."""
    settings, retry = sweep.settings, sweep.settings.retry == "failed"
    if plan.left_out:
        show(f"sweep: {plan.left_out} of {plan.left_out + len(plan.lists)} jobs are left out by sweep.constraints")
    if plan.space is not None:
        assert settings.trials is not None
        drawn = settings.trials, settings.seed, slots, settings.mode
        return Tpe(sweep.table, plan.space, plan.fixed, name, *drawn, retry, plan.allows)
    jobs: Sequence[Job] = add_jobs(sweep.table, plan.lists, set(plan.fixed), name)
    chosen = to_run(sweep.table, jobs, retry)
    if settings.search != HALVING:
        return JobList(chosen)
    return Halving(sweep.table, jobs, settings.first_rung, settings.eta, settings.epochs, settings.mode)
