"""What a training run is: its fixed settings, and everything that changes as it goes on."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lockstep.strategies.base import Strategy
from lockstep.tasks.base import Task
from lockstep.training.ema import ExponentialMovingAverage
from lockstep.training.meter import Meter
from lockstep.training.nan import NanPolicy
from lockstep.training.schedulers import Plateau, require_schedule
from lockstep.training.setup import grad_scaler


@dataclass(frozen=True)
class TrainSettings:
    """What stays the same from the first step to the last. Batch sizes count samples.

    batch_size: of a global batch, over all ranks. eval_batch_size: of one forward pass on one rank.
    """

    epochs: int
    max_steps: int | None = None
    pause_after: int | None = None  # epochs
    batch_size: int = 64
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    precision: str = "fp32"
    eval_batch_size: int = 128
    eval_every: int = 1  # epochs
    patience: int | None = None  # evaluations
    log_every: int = 10  # steps

    @property
    def last_epoch(self) -> int:
        """The number of the last epoch, counted from 0, if nothing ends the run before."""
        return (self.epochs if self.pause_after is None else min(self.epochs, self.pause_after)) - 1

    def steps_per_epoch(self, samples: int) -> int:
        """Optimizer steps in an epoch of `samples` samples."""
        return math.ceil(samples / self.batch_size)

    def is_logged(self, step: int, steps: int = 1) -> bool:
        """Whether the loss is reported after optimizer step `step`, the last of `steps` that were taken together."""
        return step // self.log_every > (step - steps) // self.log_every

    def total_steps(self, samples: int) -> int:
        """Optimizer steps in the whole run."""
        steps = self.epochs * self.steps_per_epoch(samples)
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass
class Progress:
    """How far a run is. A snapshot stores it.

    epoch: whole epochs done. samples: global samples used of the current epoch. step: optimizer steps done.
    best, best_step: the best evaluation so far, and the step of it. evals_since_best: evaluations since then.
    evaluation_pending: the run stopped early after its last step and before the evaluation of it.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    best: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    evaluation_pending: bool = False


def _do_nothing() -> None:
    """Only a run with trainer.digest looks at gradients here."""


@dataclass
class TrainState:
    """A run's settings and everything that changes while it trains: what a snapshot saves and restores.

    objective: such as ("test/accuracy", "max"): which evaluation is the best one; None: the task's monitor decides.
    grad_norm: (step, norm before clipping) of the newest step after which the loss is reported.
    gradients: of the last step of an epoch, before clipping, by parameter names; None: they are not kept.
    compare_weights: called on all ranks before weights are saved. Raises RanksDiffer if the ranks' weights differ.
    before_update: called in each step when its gradients are averaged, before they are clipped and applied.
    """

    settings: TrainSettings
    task: Task
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    initial_hyperparameters: list[dict[str, Any]]  # of each parameter group, before a scheduler changed any
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    meter: Meter
    ema: ExponentialMovingAverage | None
    nan: NanPolicy
    objective: tuple[str, str] | None = None
    progress: Progress = field(default_factory=Progress)
    first_batch_is_checked: bool = False  # whether model and task fit together, in the first step of this process
    grad_norm: tuple[int, Tensor] | None = None
    gradients: dict[str, Tensor] | None = None
    compare_weights: Callable[[], None] = lambda: None
    before_update: Callable[[], None] = _do_nothing

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
        if settings.patience is not None and progress.evals_since_best >= settings.patience:
            return "evaluation.patience"
        if progress.epoch >= settings.epochs:
            return "trainer.epochs"
        if settings.pause_after is not None and progress.epoch >= settings.pause_after:
            return "trainer.pause_after"
        return None

    @property
    def evaluation_due(self) -> bool:
        return self.finished or self._evaluates_each_time

    @property
    def _evaluates_each_time(self) -> bool:
        return self.progress.epoch % self.settings.eval_every == 0

    def schedule_place(self, epoch_samples: int) -> int:
        """The steps that the schedule has behind it: those of this batch size up to the run's place in its epochs.

        Where trainer.max_steps is the end, a schedule is one of steps, and its place is the run's step.
        """
        settings, progress = self.settings, self.progress
        per_epoch = settings.steps_per_epoch(epoch_samples)
        if settings.max_steps is not None and settings.max_steps < settings.epochs * per_epoch:
            return progress.step
        done = progress.epoch * per_epoch + math.ceil(progress.samples / settings.batch_size)
        return min(done, settings.epochs * per_epoch)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model holds the averaged weights, if the run keeps an average."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def update_best(self, value: float, mode: str) -> bool:
        """Record an evaluation, the same number on every rank. Returns True if it is the best so far.

        mode: "min" or "max". Where `max_steps` or a pause ends a run in mid-epoch or between two evaluations, nothing
        is recorded: the same run with more steps would not have evaluated there.
        """
        progress = self.progress
        is_cut = self.reached_limit in ("trainer.pause_after", "trainer.max_steps")
        is_extra = is_cut and progress.epoch < self.settings.epochs and not self._evaluates_each_time
        if progress.samples or is_extra or math.isnan(value):
            return False
        if isinstance(self.scheduler, Plateau):
            self.scheduler.evaluated(value)
        best = progress.best
        if best is None or (value < best if mode == "min" else value > best):
            progress.best, progress.best_step, progress.evals_since_best = value, progress.step, 0
            return True
        progress.evals_since_best += 1
        return False

    def forget_best(self) -> None:
        """Evaluations from now on measure something else than those before."""
        self.progress.best, self.progress.best_step, self.progress.evals_since_best = None, None, 0
        if isinstance(self.scheduler, Plateau):
            self.scheduler.forget_best()

    def average_replicas(self) -> None:
        """Make weights, optimizer state and moving average equal on all ranks, before they are evaluated or saved."""
        self.strategy.average_replicas(self.replicated_tensors())

    def replicated_tensors(self) -> Iterator[Tensor]:
        """Weights, optimizer state and moving average: what differs between ranks that step on their own gradients."""
        yield from self.strategy.module.parameters()
        for state in self.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value) and value.is_floating_point():
                    yield value
        if self.ema is not None:
            yield from self.ema.averages.values()


def constant_rate(optimizer: Optimizer) -> LRScheduler:
    """The learning rate stays as it is."""
    return LambdaLR(optimizer, lambda step: 1.0)


def fresh_state(
    settings: TrainSettings,
    task: Task,
    strategy: Strategy,
    optimizer: Optimizer,
    schedule: Callable[[Optimizer], LRScheduler] = constant_rate,
    ema: float | None = None,
    nan: str = "stop",
) -> TrainState:
    """What trains the model that `strategy` was set up with.

    optimizer: of the parameters of `strategy.module`. schedule: makes the scheduler, which is stepped after each step.
    ema: decay of an average of the weights. nan: as watch.nan.
    """
    # Before the scheduler, which changes the learning rate.
    initial = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    meter = Meter(task, strategy.world)
    return TrainState(
        settings=settings,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        initial_hyperparameters=initial,
        scheduler=require_schedule(schedule(optimizer), "scheduler"),
        scaler=grad_scaler(strategy.world, settings.precision),
        meter=meter,
        nan=NanPolicy(nan, strategy, meter, checks_gradients=settings.precision != "fp16"),
        ema=None if ema is None else ExponentialMovingAverage(strategy.model, ema),
    )
