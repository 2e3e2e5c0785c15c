"""Search with Optuna's tree-structured Parzen estimator (Bergstra et al. 2011): ask and tell, one job at a time."""

import math
import random
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.sweeps.search import (
    Choices,
    Job,
    Name,
    Numbers,
    Plan,
    Search,
    Space,
    SweepSettings,
    words,
)
from lockstep.sweeps.table import FAILED, FINISHED, Row, SweepTable

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class Tpe(Search):
    """`trials` jobs. Each is drawn where the finished ones were good; until ten have finished, at random.

    Job n is drawn from the results of the jobs 0 to n - slots, whatever else has ended by then. So the jobs depend on
    the number of slots, but not on which job is quicker, and after a kill they are drawn again from the table alone.
    """

    def __init__(self, table: SweepTable, plan: Plan, name: Name, settings: SweepSettings, slots: int) -> None:
        assert plan.space is not None
        assert settings.trials is not None
        self.table, self.space, self.fixed = table, plan.space, tuple(plan.fixed)
        self.name, self.trials, self.seed = name, settings.trials, settings.seed
        self.mode, self.slots = settings.mode, slots
        done = {FINISHED} if settings.retries_failed else {FINISHED, FAILED}
        self.started = {row.number for row in table if row.state in done}

    def ask(self) -> Job | None:
        for number in range(self.trials):
            if number in self.started:
                continue
            if number not in self.table.rows and not self._draw(number):
                return None
            self.started.add(number)
            return Job(number, (*self.fixed, *shlex.split(self.table.rows[number].overrides)))
        return None

    def _draw(self, number: int) -> bool:
        """Add the row of a job. Returns False as long as a result is missing that it depends on."""
        before = [self.table.rows[earlier] for earlier in range(number - self.slots + 1)]
        if any(row.state not in (FINISHED, FAILED) for row in before):
            return False
        chosen = words(suggest(self.space, before, self.seed, number, self.mode))
        changed = shlex.join(chosen)
        self.table.add([Row(number, changed, self.name(number, changed, [*self.fixed, *chosen]))])
        return True


def suggest(space: Space, rows: Sequence[Row], seed: int, number: int, mode: str) -> dict[str, str]:
    """{key: value as typed} of the job with this number. rows: those whose results count. mode: "min" or "max"."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(values) for key, values in space.items()}
    sampler = optuna.samplers.TPESampler(seed=random.Random(f"{seed} {number}").randrange(2**32))
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize", sampler=sampler)
    for row in rows:
        is_known = row.objective is not None and not math.isnan(row.objective)  # Optuna takes no NaN
        typed = row.values
        # An earlier command may have had other parameters or limits.
        if is_known and typed.keys() == space.keys() and all(space[key].holds(word) for key, word in typed.items()):
            values = {key: space[key].value(word) for key, word in typed.items()}
            trial = optuna.trial.create_trial(params=values, distributions=distributions, value=row.objective)
            study.add_trial(trial)
    params = study.ask(distributions).params
    return {key: each.word(params[key]) for key, each in space.items()}


def _distribution(values: Numbers | Choices) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, Choices):
        return CategoricalDistribution(values.words)
    if values.whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)
