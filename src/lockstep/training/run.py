"""What a training run is, for everybody who looks at it, and how far it has come."""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.config.schema import RunConfig
from lockstep.data.loader import Loader, Progress
from lockstep.distributed.world import World
from lockstep.strategies.base import Strategy
from lockstep.tasks.base import Task

if TYPE_CHECKING:
    from lockstep.training.callbacks import Callback
    from lockstep.training.ema import Average
    from lockstep.training.metrics import Meter
    from lockstep.training.schedules import Schedule
    from lockstep.training.step import Step


class Loaders(NamedTuple):
    """What gives this rank its share of each split."""

    train: Loader
    test: Loader
    split: str | None  # which samples the validation set has, in words with a hash; None without one
    val: Loader | None = None


@dataclass
class Run:
    """A run's parts. Everybody may read them; `progress` and what the parts hold change as it goes on."""

    config: RunConfig
    world: World
    model: torch.nn.Module
    strategy: Strategy
    task: Task
    step: "Step"
    optimizer: torch.optim.Optimizer
    schedule: "Schedule"
    scaler: torch.amp.GradScaler
    meter: "Meter"
    progress: Progress
    loaders: Loaders
    clock: "Clock"
    average: "Average | None" = None
    objective: str | None = None  # such as "val/accuracy", which chooses the best weights; None: the last ones are it
    direction: str = "min"  # of the objective is better, or "max"
    callbacks: "Sequence[Callback]" = ()
    hyperparameters: "Sequence[dict[str, Any]]" = ()  # of each parameter group, before a schedule changed any

    @property
    def place(self) -> int:
        """The step of a run with this batch size that is as far from the end of the epoch."""
        loader, samples = self.loaders.train, len(self.loaders.train)
        per_epoch, left = (-(-count // loader.batch_size) for count in (samples, samples - self.progress.samples))
        return (self.progress.epoch + 1) * per_epoch - left

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the end of this epoch, or of the run if that is nearer."""
        of_epoch = -(-(len(self.loaders.train) - self.progress.samples) // self.loaders.train.batch_size)
        last = min(self.config.trainer.max_steps or math.inf, self.clock.last_step)
        return int(max(0, min(of_epoch, last - self.progress.step)))

    @property
    def finished(self) -> bool:
        return self.reached_limit is not None

    @property
    def reached_limit(self) -> str | None:
        """The config key of the limit that the run has reached, None if it can train on."""
        trainer, progress = self.config.trainer, self.progress
        limits = {
            "trainer.max_steps": (trainer.max_steps, progress.step),
            "trainer.max_time": (self.clock.last_step, progress.step),
            "evaluation.patience": (self.config.evaluation.patience, progress.evals_since_best),
            "trainer.epochs": (trainer.epochs, progress.epoch),
            "trainer.pause_after": (trainer.pause_after, progress.epoch),
        }
        reached = (key for key, (limit, now) in limits.items() if limit is not None and now >= limit)
        return None if progress.evaluation_pending else next(reached, None)

    def samples_of_batch(self) -> list[int]:
        """The numbers in the data set of the samples that this rank computes in this step."""
        loader, progress = self.loaders.train, self.progress
        requests = loader.requests_at(progress.epoch, progress.samples)
        numbers = (loader.reader.whole(request.numbers[loader.before :]) for request in requests)
        return [number for of_request in numbers for number in of_request.tolist()]

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model has its averaged weights, if the run keeps any. Begin it in training mode."""
        return nullcontext() if self.average is None else self.average.applied()

    def end_epoch(self) -> None:
        """Go on to the next epoch if all samples of this one are used."""
        if self.progress.samples >= len(self.loaders.train):
            self.progress.epoch, self.progress.samples = self.progress.epoch + 1, 0

    def await_evaluation(self) -> None:
        """Go back to the end of the last step: a resumed run ends the epoch again, and evaluates what is due then."""
        if self.progress.samples == 0:
            self.progress.epoch, self.progress.samples = self.progress.epoch - 1, len(self.loaders.train)
        self.progress.evaluation_pending = self.finished

    @property
    def evaluates_each_time(self) -> bool:
        """Whether an evaluation is due here, whatever ends the run."""
        every = self.config.evaluation.every if self.config.trainer.final is None else self.config.trainer.epochs
        return self.progress.epoch % every == 0

    def update_best(self, value: float) -> bool:
        """Record an evaluation of the objective, the same number on every rank. Returns whether it is the best so far.
        Not where a limit ends the run in mid-epoch or between two evaluations: with more steps it would have none."""
        progress = self.progress
        is_cut = self.reached_limit in ("trainer.pause_after", "trainer.max_steps", "trainer.max_time")
        is_extra = is_cut and progress.epoch < self.config.trainer.epochs and not self.evaluates_each_time
        if progress.samples or is_extra or math.isnan(value):
            return False
        self.schedule.evaluated(value)
        best, progress.evals_since_best = progress.best, progress.evals_since_best + 1
        if best is None or (value < best if self.direction == "min" else value > best):
            progress.best, progress.best_step, progress.evals_since_best = value, progress.step, 0
        return progress.evals_since_best == 0


class Clock:
    """How long a run has trained, with evaluations and snapshots, in earlier starts, too. limit: trainer.max_time."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit, self.last_step = limit, math.inf  # at which it ends the run, when the ranks have agreed
        self.start(0.0, 0)

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def start(self, before: float, step: int) -> None:
        """Training begins, or goes on after `before` seconds and `step` steps."""
        self.before, self.started = before, time.monotonic()
        if before >= self.limit:
            self.last_step = step

    def end_at(self, step: int) -> None:
        """All ranks have agreed that the run ends at this step."""
        self.last_step = min(self.last_step, step)
