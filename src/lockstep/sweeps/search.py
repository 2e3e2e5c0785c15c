"""hydra/sweeper=optuna: an Optuna study as a source of jobs, and its pruners."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from lockstep.config.check import check_value
from lockstep.config.nodes import check_nodes, instantiate
from lockstep.config.schema import Count, Node
from lockstep.errors import ConfigError
from lockstep.launchers.base import print_line
from lockstep.sweeps.jobs import Job, Jobs, Outcome
from lockstep.sweeps.launch import Sweep

DIGITS = 6  # of a number that was drawn, so that it is read and typed easily
AGAIN = "again"  # attribute of a trial that goes on with one that was interrupted


def search(sweep: Sweep, n_trials: int, sampler: Node, pruner: Node | None) -> None:
    """Run trials until there are `n_trials`, those of earlier commands in this folder included. Raises ConfigError."""
    check_value(Count, n_trials, "hydra.sweeper.n_trials")
    check_nodes(sampler, "hydra.sweeper.sampler")
    check_nodes(pruner, "hydra.sweeper.pruner")
    fixed, space = distributions(OverridesParser.create(config_loader=sweep.loader).parse_overrides(sweep.typed))
    if not space:
        raise ConfigError("nothing varies in this search; type 'optimizer.lr=tag(log,interval(0.001,0.1))'")
    sweep.check([[*fixed, *corner] for corner in corners(space)])
    if sweep.objective is None:
        raise ConfigError("a search compares evaluations, and here nothing is chosen; type loader.validation=0.1")
    sweep.hold()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(sweep.folder / "optuna.journal"))),
        study_name=sweep.folder.name,
        direction="maximize" if sweep.direction == "max" else "minimize",
        pruner=instantiate(pruner) or optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    sweep.results.clear()  # of the corners
    trials = OptunaSearch(sweep, study, fixed, space, n_trials, sampler)
    sweep.run(trials, trials.left)


class OptunaSearch(Jobs):
    """The trials of a study.

    sampler: made anew for each trial, with its `seed` plus the trial's number: a search of one job at a time that was
    killed goes on with the values that it would have drawn.
    """

    def __init__(
        self,
        sweep: Sweep,
        study: optuna.Study,
        fixed: Sequence[str],
        space: dict[str, BaseDistribution],
        n_trials: int,
        sampler: Node,
    ) -> None:
        self.sweep, self.study, self.fixed, self.space = sweep, study, fixed, space
        self.n_trials, self.sampler = n_trials, sampler
        self.trials = dict[Path, list[Trial]]()  # with equal values, which one job serves
        self.reported = dict[Path, int]()  # the last epoch
        for trial in study.get_trials(states=(TrialState.RUNNING,)):  # of a command that was killed or stopped
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})

    @property
    def left(self) -> int:
        """How many trials have not begun. One that goes on with another one is none of its own."""
        trials = self.study.get_trials(deepcopy=False)
        waiting = sum(trial.state == TrialState.WAITING for trial in trials)
        return max(0, self.n_trials - sum(AGAIN not in trial.user_attrs for trial in trials)) + waiting

    def next(self) -> Job | None:
        while left := self.left:
            seed = {"seed": self.sampler["seed"] + self.n_trials - left} if self.sampler.get("seed") is not None else {}
            self.study.sampler = instantiate(self.sampler | seed)
            try:
                trial = self.study.ask(self.space)
            except ValueError as error:
                what = f"this search was begun with other lists ({error})"
                raise ConfigError(f"{what}; type hydra.sweep.dir=<another folder>") from None
            words = [f"{key}={as_word(value)}" for key, value in trial.params.items() if key in self.space]
            try:
                job, _ = self.sweep.compose([*self.fixed, *words])
            except ConfigError as refusal:
                print_line(f"sweep: {refusal}", sys.stdout)
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            is_running = job.folder in self.trials
            self.trials.setdefault(job.folder, []).append(trial)
            if job.folder in self.sweep.results:  # it had these values, and has ended
                self.ended(job, self.sweep.results[job.folder])
            elif not is_running:
                return replace(job, title=f"trial {self.n_trials - left + 1} of {self.n_trials}, {job.title}")
        return None

    def is_hopeless(self, job: Job) -> bool:
        trial, run = self.trials[job.folder][0], job.run()
        for row in [] if run is None else run["history"]:
            if self.sweep.objective in row and row["epoch"] > self.reported.get(job.folder, 0):
                self.reported[job.folder] = row["epoch"]
                trial.report(row[self.sweep.objective], step=row["epoch"])
                if trial.should_prune():
                    return True
        return False

    def ended(self, job: Job, outcome: Outcome) -> None:
        self.sweep.results[job.folder] = outcome
        value = math.nan if outcome.run is None else outcome.run["objective"]["best"]
        is_known = outcome.state == "finished" and value is not None and math.isfinite(value)
        state = TrialState.PRUNED if outcome.state == "pruned" else TrialState.FAIL
        for trial in self.trials.pop(job.folder) if outcome.state != "stopped" else []:  # that one goes on later
            self.study.tell(trial, value if is_known else None, None if is_known else state)


def distributions(overrides: Sequence[Override]) -> tuple[list[str], dict[str, BaseDistribution]]:
    """(the words that all jobs have, {key: what its values are drawn from}), of Hydra's sweep syntax.

    Raises ConfigError for an interval that Optuna refuses.
    """
    fixed, space = dict[str, str](), dict[str, BaseDistribution]()
    for override in overrides:
        key, value = override.get_key_element(), override.value()
        fixed.pop(key, None)
        space.pop(key, None)  # of a key typed twice the last one counts
        if not override.is_sweep_override():
            fixed[key] = f"{key}={override.get_value_element_as_str()}"
        elif isinstance(value, IntervalSweep):
            is_whole, log = isinstance(value.start, int) or "int" in value.tags, "log" in value.tags
            kind: Any = IntDistribution if is_whole else FloatDistribution
            try:
                space[key] = kind(value.start, value.end, log=log)
            except ValueError as error:
                what = f"{override.input_line} is no interval ({error})"
                raise ConfigError(f"{what}; type {key}=tag(log,interval(0.001,0.1))") from None
        else:
            space[key] = CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
    return list(fixed.values()), space


def corners(space: Mapping[str, Any]) -> list[list[str]]:
    """A few jobs that have every limit and every value of a list once."""
    columns = {key: getattr(one, "choices", None) or (one.low, one.high) for key, one in space.items()}
    longest = max(map(len, columns.values()))
    return [[f"{key}={as_word(some[place % len(some)])}" for key, some in columns.items()] for place in range(longest)]


def as_word(value: Any) -> str:
    """A value of a trial as it is typed."""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)
