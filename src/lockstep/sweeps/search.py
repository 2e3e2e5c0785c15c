"""hydra/sweeper=optuna: an Optuna study as a source of jobs, and its pruners."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from lockstep.build import direction_of, objective_of
from lockstep.compat import open_trial
from lockstep.config.check import check_nodes, instantiate, instantiate_as
from lockstep.errors import ConfigError, print_line
from lockstep.sweeps.launch import Job, Outcome, Sweep
from lockstep.tasks.base import Task


class Search(Sweep):
    """Runs trials until there are `n_trials`, those of earlier commands in this folder included. Raises ConfigError.
    The sampler is made anew for each trial, with its `seed` plus the trial's number: a search that was killed goes on
    with the values that it would have drawn."""

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        super().__init__(loader, master)
        keys: Any = OmegaConf.to_container(master.hydra.sweeper)
        check_nodes(keys, "hydra.sweeper")
        self.n_trials, self.sampler = keys["n_trials"], keys["sampler"]
        self.fixed, self.space = distributions(self.overrides)
        if not self.space:
            raise ConfigError("nothing varies in this search; type 'optimizer.lr=tag(log,interval(0.001,0.1))'")
        least = {key: one.low if hasattr(one, "low") else one.choices[0] for key, one in self.space.items()}
        config = self.check([*self.fixed, *overrides_of(least)]).config
        self.results.clear()  # of that job
        task = instantiate_as(Task, config.task, "task")
        self.objective = objective_of(config, task)
        if self.objective is None:
            raise ConfigError("a search compares evaluations, and here nothing is chosen; type loader.validation=0.1")
        direction = direction_of(config, task, self.objective)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self.folder / "optuna.journal"))),
            study_name=self.folder.name,
            direction="maximize" if direction == "max" else "minimize",
            pruner=instantiate(keys["pruner"]) or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self.trials = dict[Path, Trial]()  # of jobs that run

    def search(self) -> None:
        begun = self.begun()
        running = [one for one in begun if one.state == TrialState.RUNNING]  # when a command was killed or stopped
        self.run(self.jobs(running), max(0, self.n_trials - len(begun) + len(running)))

    def begun(self) -> list[FrozenTrial]:
        """The trials, but for one that was killed while its values were drawn."""
        return [one for one in self.study.get_trials(deepcopy=False) if self.space.keys() <= one.params.keys()]

    def jobs(self, running: Sequence[FrozenTrial]) -> Iterator[Job]:
        for known in running:
            yield from self.job_of(open_trial(self.study, known))
        while (number := len(self.begun())) < self.n_trials:
            seed = {"seed": self.sampler["seed"] + number} if self.sampler.get("seed") is not None else {}
            self.study.sampler = instantiate(self.sampler | seed)
            yield from self.job_of(self.study.ask(self.space))

    def job_of(self, trial: Trial) -> Iterator[Job]:
        """Its job; nothing if none serves it: it is refused, or has the values of one that runs or has ended."""
        try:
            job = self.check([*self.fixed, *overrides_of({key: trial.params[key] for key in self.space})])
        except ConfigError as refusal:
            print_line(f"sweep: {refusal}", sys.stdout)
            job = None
        if job is None or job.folder in self.trials:
            self.study.tell(trial, state=TrialState.FAIL)
            return
        self.trials[job.folder] = trial
        if job.folder in self.results:
            self.ended(job, self.results[job.folder])
        else:
            yield job

    def is_hopeless(self, job: Job) -> bool:
        trial, run = self.trials[job.folder], job.run()
        reported = self.study.get_trials(deepcopy=False)[trial.number].last_step or 0
        for row in [] if run is None else run["history"]:
            if self.objective in row and row["epoch"] > reported:
                trial.report(row[self.objective], step=row["epoch"])
                if trial.should_prune():
                    return True
        return False

    def ended(self, job: Job, outcome: Outcome) -> None:
        super().ended(job, outcome)
        trial, value = self.trials.pop(job.folder), job.value()
        if outcome.state == "finished" and value is not None and math.isfinite(value):
            self.study.tell(trial, value)
        elif outcome.state != "stopped":  # that one goes on later
            self.study.tell(trial, state=TrialState.PRUNED if outcome.state == "pruned" else TrialState.FAIL)


def distributions(overrides: Sequence[Override]) -> tuple[list[str], dict[str, Any]]:
    """(the words that all jobs have, {key: what its values are drawn from}), of Hydra's sweep syntax."""
    fixed, space = dict[str, str](), dict[str, Any]()
    for key, override in {one.get_key_element(): one for one in overrides}.items():  # of a key typed twice the last
        value = override.value()
        if not override.is_sweep_override():
            fixed[key] = f"{key}={override.get_value_element_as_str()}"
        elif isinstance(value, IntervalSweep):
            is_whole, log = isinstance(value.start, int) or "int" in value.tags, "log" in value.tags
            kind: Any = IntDistribution if is_whole else FloatDistribution
            space[key] = kind(value.start, value.end, log=log)
        else:
            space[key] = CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
    return list(fixed.values()), space


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """The values of a trial as they are typed, with six digits: they are names of folders."""
    return [f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]
