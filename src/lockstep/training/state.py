"""What a training run is: its fixed settings, and everything that changes as it goes on."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy
from lockstep.tasks.base import Task
from lockstep.training.buffers import Buffers
from lockstep.training.early_steps import EarlySteps
from lockstep.training.ema import average_of
from lockstep.training.meter import Meter
from lockstep.training.nan import NanPolicy, ReadSamples
from lockstep.training.sample_noise import SampleNoise
from lockstep.training.schedulers import FollowsObjective, constant, require_schedule
from lockstep.training.setup import grad_scaler
from lockstep.training.trained_parameters import TrainedParameters

SECONDS = {"s": 1, "min": 60, "h": 3600}


def time_limit(max_time: str | None) -> float | None:
    """The seconds of trainer.max_time, None without it. Raises ConfigError."""
    if max_time is None:
        return None
    match = re.fullmatch(r"(?!0+(\.0+)?\D)(\d+(\.\d+)?)\s*(s|min|h)", max_time)
    if match is None:
        accepted = "a time such as 90s, 30min or 2h"
        raise ConfigError(f"trainer.max_time={max_time} should be {accepted}; type trainer.max_time=null")
    return float(match[2]) * SECONDS[match[4]]


@dataclass(frozen=True)
class TrainSettings:
    """What stays the same from the first step to the last. Batch sizes count samples.

    epoch_samples: of an epoch, over all ranks.
    batch_size: of a global batch, over all ranks. eval_batch_size: of one forward pass on one rank.
    max_seconds: as trainer.max_time.
    draws_by_sample: dropout belongs to the samples. False: to a rank, which a compiled model needs.
    """

    epochs: int
    epoch_samples: int
    max_steps: int | None = None
    max_seconds: float | None = None
    pause_after: int | None = None  # epochs
    batch_size: int = 64
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    precision: str = "fp32"
    eval_batch_size: int = 128
    eval_every: int = 1  # epochs
    patience: int | None = None  # evaluations
    log_every: int = 10  # steps
    draws_by_sample: bool = True

    @property
    def last_epoch(self) -> int:
        """The number of the last epoch, counted from 0, if nothing ends the run before."""
        return (self.epochs if self.pause_after is None else min(self.epochs, self.pause_after)) - 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return math.ceil(self.epoch_samples / self.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run."""
        steps = self.epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def is_logged(self, step: int, steps: int = 1) -> bool:
        """Whether the loss is reported after optimizer step `step`, the last of `steps` that were taken together."""
        return step // self.log_every > (step - steps) // self.log_every


@dataclass
class Progress:
    """How far a run is. A snapshot stores it.

    epoch: whole epochs done. samples: global samples used of the current epoch. step: optimizer steps done.
    best, best_step: the best evaluation so far, and the step of it. evals_since_best: evaluations since then.
    evaluation_pending: the run stopped early after its last step and before the evaluation of it.
    draws: whether a forward pass has drawn random numbers; None where that is not known.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    best: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    evaluation_pending: bool = False
    draws: bool | None = None


class TrainState:
    """A run's settings and everything that changes while it trains: what a snapshot saves and restores.

    objective: (its name, "min" or "max"); None: nothing chooses.
    initial_hyperparameters: of each parameter group, before a scheduler changed any.
    grad_norm: (step, norm before clipping) of the newest step after which the loss is reported.
    """

    def __init__(
        self,
        settings: TrainSettings,
        task: Task,
        strategy: Strategy,
        optimizer: Optimizer,
        schedule: Callable[[Optimizer], LRScheduler] = constant,
        ema: float | None = None,
        nan: str = "stop",
        read: ReadSamples | None = None,
        objective: str | None = None,
        buffers: str = "auto",
    ) -> None:
        """The state before the first step.

        strategy: the model is set up in it.
        optimizer: of the parameters of `strategy.module`.
        schedule: makes the scheduler, which is stepped after each step.
        ema: decay of an average of the weights.
        nan: as watch.nan.
        read: reads training samples, to find those that hold a NaN.
        objective: such as "val/accuracy", which evaluation is the best one; None: the last weights are the result.
        buffers: as trainer.buffers.
        """
        self.settings, self.task, self.strategy, self.optimizer = settings, task, strategy, optimizer
        # Before the scheduler, which changes the learning rate.
        self.initial_hyperparameters: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.scheduler = require_schedule(schedule(optimizer), "scheduler")
        self.scaler = grad_scaler(strategy.world, settings.precision)
        self.meter = Meter(task, strategy.world)
        self.nan = NanPolicy(nan, strategy, self.meter, settings.precision != "fp16", read)
        self.ema = average_of(strategy, optimizer, ema)
        self.objective = None if objective is None else (objective, task.mode(objective))
        self.progress = Progress()
        self.started, self.seconds_before = time.monotonic(), 0.0
        self.time_ends_at: int | None = None  # the step at which trainer.max_time ends the run
        self.trained = TrainedParameters(strategy, optimizer)
        self.buffers = Buffers(strategy, buffers)
        shares = strategy.data_parallel_size(strategy.world.size)
        # Ranks that compute the same samples draw for their own parts of the model.
        shares_samples = shares < strategy.world.size
        self.noise = SampleNoise() if settings.draws_by_sample and not shares_samples else None
        self.early_steps = EarlySteps(task, strategy, shares * settings.gradient_accumulation_steps, self.noise)
        self.grad_norm: tuple[int, Tensor] | None = None

    @property
    def finished(self) -> bool:
        return self.reached_limit is not None

    @property
    def reached_limit(self) -> str | None:
        """The config key of the limit that the run has reached, None if it can train on."""
        settings, progress = self.settings, self.progress
        if progress.evaluation_pending:
            return None
        if settings.max_steps is not None and progress.step >= settings.max_steps:
            return "trainer.max_steps"
        if self.time_is_up:
            return "trainer.max_time"
        if settings.patience is not None and progress.evals_since_best >= settings.patience:
            return "evaluation.patience"
        if progress.epoch >= settings.epochs:
            return "trainer.epochs"
        if settings.pause_after is not None and progress.epoch >= settings.pause_after:
            return "trainer.pause_after"
        return None

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the end of this epoch, or to `max_steps` if that is nearer."""
        return self._to_max_steps(-(-(self.settings.epoch_samples - self.progress.samples) // self.settings.batch_size))

    @property
    def whole_steps_left(self) -> int:
        """As `steps_left`, but of steps with whole batches."""
        return self._to_max_steps((self.settings.epoch_samples - self.progress.samples) // self.settings.batch_size)

    def _to_max_steps(self, steps: int) -> int:
        limits = [limit for limit in (self.settings.max_steps, self.time_ends_at) if limit is not None]
        return max(0, min([steps, *(limit - self.progress.step for limit in limits)]))

    @property
    def seconds(self) -> float:
        """How long the run has trained, with its evaluations and snapshots, in earlier lives, too."""
        return self.seconds_before + time.monotonic() - self.started

    def set_clock(self, seconds: float) -> None:
        """Go on with the time that the run has trained up to where it is now, the same on all ranks."""
        self.started, self.seconds_before, limit = time.monotonic(), seconds, self.settings.max_seconds
        if limit is not None and seconds >= limit:
            self.time_ends_at = self.progress.step

    @property
    def time_is_over(self) -> bool:
        """Whether trainer.max_time is over by rank 0's clock; False on other ranks, and without it."""
        limit = self.settings.max_seconds
        return limit is not None and self.strategy.world.is_rank_zero and self.seconds >= limit

    def end_here(self) -> None:
        """End the run at this step, on which all ranks have agreed, as if its time was up."""
        if self.time_ends_at is None:
            self.time_ends_at = self.progress.step

    @property
    def time_is_up(self) -> bool:
        return self.time_ends_at is not None and self.progress.step >= self.time_ends_at

    def begin_epoch(self) -> None:
        """An epoch, or the rest of one, is about to be trained."""
        self.progress.evaluation_pending = False
        self.trained.require_no_new(self.progress.step)
        self.strategy.module.train()
        if self.noise is not None:
            self.noise.begin_epoch(self.progress.draws, self.progress.samples > 0)
        if self.progress.samples == 0:
            self.meter.clear()

    def keep_grad_norm(self, step: int) -> None:
        """Keep the norm of the averaged gradients of `step` if it is reported."""
        if self.settings.is_logged(step):
            # The loss scale of fp16, or 1, as a tensor: get_scale() would wait for the device.
            scale = self.scaler.scale(torch.ones((), device=self.strategy.world.device))
            self.grad_norm = step, self.strategy.grad_norm() / scale

    def after_backward(self, step: int) -> None:
        """The gradients of `step` are computed. A collective.

        Raises ConfigError, on all ranks, for what would part them or would not be trained.
        """
        self.trained.after_backward(step)
        if self.early_steps.steps_to_watch:
            self.trained.require_no_new(step)
            self.early_steps.after_backward()

    def advance(self, samples: int, steps: int) -> None:
        """`steps` optimizer steps over `samples` global samples are done."""
        self.progress.samples += samples
        self.progress.step += steps
        self.progress.draws = None if self.noise is None else self.noise.has_drawn

    def end_epoch(self) -> None:
        """Go on to the next epoch if all samples of this one are used."""
        if self.progress.samples >= self.settings.epoch_samples:
            self.progress.epoch, self.progress.samples = self.progress.epoch + 1, 0

    def await_evaluation(self) -> None:
        """Go back to the end of the last step: a resumed run ends the epoch again, and evaluates what is due then."""
        if self.progress.samples == 0:
            self.progress.epoch, self.progress.samples = self.progress.epoch - 1, self.settings.epoch_samples
        self.progress.evaluation_pending = self.finished

    @property
    def evaluation_due(self) -> bool:
        return self.finished or self._evaluates_each_time

    @property
    def _evaluates_each_time(self) -> bool:
        return self.progress.epoch % self.settings.eval_every == 0

    @property
    def schedule_place(self) -> int:
        """The steps that the schedule has behind it: those of this batch size up to the run's place in its epochs.

        Where trainer.max_steps is the end, a schedule is one of steps, and its place is the run's step.
        """
        settings, progress = self.settings, self.progress
        of_all_epochs = settings.epochs * settings.steps_per_epoch
        if settings.max_steps is not None and settings.max_steps < of_all_epochs:
            return progress.step
        done = progress.epoch * settings.steps_per_epoch + math.ceil(progress.samples / settings.batch_size)
        return min(done, of_all_epochs)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model holds the averaged weights, if the run keeps an average."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def update_best(self, value: float) -> bool:
        """Record an evaluation of the objective, the same number on every rank. Returns True if it is the best so far.

        Where `max_steps`, `max_time` or a pause ends a run in mid-epoch or between two evaluations, nothing is
        recorded: the same run with more steps would not have evaluated there.
        """
        is_cut = self.reached_limit in ("trainer.pause_after", "trainer.max_steps", "trainer.max_time")
        is_before_end = self.progress.epoch < self.settings.epochs
        is_extra = is_cut and is_before_end and not self._evaluates_each_time
        if self.progress.samples or is_extra or math.isnan(value):
            return False
        if isinstance(self.scheduler, FollowsObjective):
            self.scheduler.evaluated(value)
        assert self.objective is not None
        best, (_, direction) = self.progress.best, self.objective
        if best is None or (value < best if direction == "min" else value > best):
            self._set_best(value, self.progress.step)
            return True
        self.progress.evals_since_best += 1
        return False

    def _set_best(self, value: float | None, step: int | None) -> None:
        self.progress.best, self.progress.best_step, self.progress.evals_since_best = value, step, 0

    def forget_best(self) -> None:
        """Evaluations from now on measure something else than those before."""
        self._set_best(None, None)
        if isinstance(self.scheduler, FollowsObjective):
            self.scheduler.forget_best()

    def average_replicas(self) -> None:
        """Make weights, optimizer state and moving average equal on all ranks, before they are evaluated or saved."""
        self.strategy.average_replicas(self.averaged_tensors())

    def averaged_tensors(self) -> Iterator[Tensor]:
        """Weights, optimizer state and moving average: what differs between ranks that step on their own gradients."""
        yield from self.strategy.module.parameters()
        for state in self.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    yield value
        if self.ema is not None:
            yield from self.ema.averages.values()
