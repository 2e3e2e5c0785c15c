"""What a training run is, for everybody who looks at it, and how far it has come."""

import math
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.config.schema import RunConfig
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat
from lockstep.strategies.base import Strategy
from lockstep.tasks.base import Task

if TYPE_CHECKING:
    from lockstep.data.loader import Batch, Loader
    from lockstep.training.callbacks import Callback
    from lockstep.training.ema import Average
    from lockstep.training.metrics import Meter
    from lockstep.training.schedules import Schedule
    from lockstep.training.step import Step

SECONDS = {"s": 1, "min": 60, "h": 3600}


def time_limit(max_time: str | None) -> float:
    """The seconds of trainer.max_time, infinite without it. Raises ConfigError."""
    if max_time is None:
        return math.inf
    match = re.fullmatch(r"(?!0+(\.0+)?\D)(\d+(\.\d+)?)\s*(s|min|h)", max_time)
    if match is None:
        accepted = "a time such as 90s, 30min or 2h"
        raise ConfigError(f"trainer.max_time={max_time} should be {accepted}; type trainer.max_time=null")
    return float(match[2]) * SECONDS[match[4]]


@dataclass
class Progress:
    """How far a run is. A snapshot stores it.

    epoch: whole epochs done. samples: global samples used of the current epoch. step: optimizer steps done.
    ahead: steps by which the schedule is before `step`, after a resume with another batch size.
    best, best_step: the best evaluation so far, and the step of it. evals_since_best: evaluations since then.
    evaluation_pending: the run stopped early after its last step and before the evaluation of it.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    ahead: int = 0
    best: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    evaluation_pending: bool = False

    def advance(self, batch: "Batch") -> None:
        """An optimizer step over `batch` is done."""
        self.samples += batch.count
        self.step += 1
        heartbeat.step_ended(self.epoch + 1, self.step)


class Loaders(NamedTuple):
    """What gives this rank its share of each split. val: None without a validation set.

    split: which samples the validation set has, in words with a hash; None without one.
    held_out: (n,) indices of the validation samples in the training data; None if they are other data.
    """

    train: "Loader"
    test: "Loader"
    split: str | None
    held_out: Any
    val: "Loader | None" = None


@dataclass
class Run:
    """A run's parts. Everybody may read them; `progress` and what the parts hold change as it goes on.

    objective: such as "val/accuracy", which chooses the best weights; None: the last ones are the result.
    direction: whether "min" or "max" of it is better. batch_size: samples of a global batch. hyperparameters: of each
    parameter group, before a schedule changed any.
    """

    config: RunConfig
    strategy: Strategy
    task: Task
    step: "Step"
    optimizer: torch.optim.Optimizer
    schedule: "Schedule"
    scaler: torch.amp.GradScaler
    meter: "Meter"
    progress: Progress
    loaders: Loaders
    batch_size: int
    clock: "Clock"
    average: "Average | None" = None
    objective: str | None = None
    direction: str = "min"
    callbacks: "Sequence[Callback]" = ()
    hyperparameters: "Sequence[dict[str, Any]]" = ()

    @property
    def world(self) -> World:
        return self.strategy.world

    @property
    def model(self) -> torch.nn.Module:
        return self.strategy.model

    @property
    def epoch_samples(self) -> int:
        """Of all ranks."""
        return len(self.loaders.train)

    @property
    def place(self) -> int:
        """The step of a run with this batch size that is as far from the end of the epoch."""
        samples = self.epoch_samples - self.progress.samples
        per_epoch, left = (-(-count // self.batch_size) for count in (self.epoch_samples, samples))
        return (self.progress.epoch + 1) * per_epoch - left

    @property
    def finished(self) -> bool:
        return self.reached_limit is not None

    @property
    def reached_limit(self) -> str | None:
        """The config key of the limit that the run has reached, None if it can train on."""
        trainer, progress, patience = self.config.trainer, self.progress, self.config.evaluation.patience
        limits = {
            "trainer.max_steps": trainer.max_steps is not None and progress.step >= trainer.max_steps,
            "trainer.max_time": progress.step >= self.clock.last_step,
            "evaluation.patience": patience is not None and progress.evals_since_best >= patience,
            "trainer.epochs": progress.epoch >= trainer.epochs,
            "trainer.pause_after": trainer.pause_after is not None and progress.epoch >= trainer.pause_after,
        }
        return None if progress.evaluation_pending else next((key for key in limits if limits[key]), None)

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the end of this epoch, or of the run if that is nearer."""
        of_epoch = -(-(self.epoch_samples - self.progress.samples) // self.batch_size)
        last = min(self.config.trainer.max_steps or math.inf, self.clock.last_step)
        return int(max(0, min(of_epoch, last - self.progress.step)))

    def samples_of_batch(self) -> list[int]:
        """The numbers in the data set of the samples that this rank computes in this step."""
        loader, numbers = self.loaders.train, list[int]()
        for request in loader.requests_at(self.progress.epoch, self.progress.samples):
            numbers += request.numbers[loader.before :].tolist()
        return numbers

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model has its averaged weights, if the run keeps any. Begin it in training mode."""
        return nullcontext() if self.average is None else self.average.applied()

    def end_epoch(self) -> None:
        """Go on to the next epoch if all samples of this one are used."""
        if self.progress.samples >= self.epoch_samples:
            self.progress.epoch, self.progress.samples = self.progress.epoch + 1, 0

    def await_evaluation(self) -> None:
        """Go back to the end of the last step: a resumed run ends the epoch again, and evaluates what is due then."""
        if self.progress.samples == 0:
            self.progress.epoch, self.progress.samples = self.progress.epoch - 1, self.epoch_samples
        self.progress.evaluation_pending = self.finished

    @property
    def evaluation_due(self) -> bool:
        return self.finished or self._evaluates_each_time

    @property
    def _evaluates_each_time(self) -> bool:
        every = self.config.evaluation.every if self.config.trainer.final is None else self.config.trainer.epochs
        return self.progress.epoch % every == 0

    def update_best(self, value: float) -> bool:
        """Record an evaluation of the objective, the same number on every rank. Returns True if it is the best so far.

        Where a limit ends the run in mid-epoch or between two evaluations, nothing is recorded: the same run with more
        steps would not have evaluated there.
        """
        progress = self.progress
        is_cut = self.reached_limit in ("trainer.pause_after", "trainer.max_steps", "trainer.max_time")
        is_extra = is_cut and progress.epoch < self.config.trainer.epochs and not self._evaluates_each_time
        if progress.samples or is_extra or math.isnan(value):
            return False
        self.schedule.evaluated(value)
        progress.evals_since_best += 1
        best = progress.best
        if best is None or (value < best if self.direction == "min" else value > best):
            progress.best, progress.best_step, progress.evals_since_best = value, progress.step, 0
        return progress.evals_since_best == 0

    def forget_best(self) -> None:
        """Evaluations from now on measure something else than those before."""
        self.progress.best, self.progress.best_step, self.progress.evals_since_best = None, None, 0


class Clock:
    """How long a run has trained, with its evaluations and snapshots, in earlier lives, too.

    limit: seconds of trainer.max_time. last_step: the step at which it ends the run; infinite until the ranks agree.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit, self.last_step = limit, math.inf
        self.before, self.started = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    @property
    def is_over(self) -> bool:
        return self.seconds >= self.limit

    def start(self, before: float, step: int) -> None:
        """Training begins, or goes on after `before` seconds and `step` steps."""
        self.before, self.started = before, time.monotonic()
        if before >= self.limit:
            self.last_step = step

    def end_at(self, step: int) -> None:
        """All ranks have agreed that the run ends at this step."""
        self.last_step = min(self.last_step, step)
