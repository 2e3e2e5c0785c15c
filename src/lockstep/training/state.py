"""What a training run is: its fixed settings, and everything that changes as it goes on."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.base import Strategy
from lockstep.tasks.base import Task
from lockstep.training.ema import ExponentialMovingAverage
from lockstep.training.meter import Meter


@dataclass(frozen=True)
class TrainSettings:
    """What stays the same from the first step to the last. Batch sizes count samples.

    batch_size: of a global batch, over all ranks. eval_batch_size: of one forward pass on one rank.
    """

    epochs: int
    max_steps: int | None
    batch_size: int
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    precision: str
    eval_batch_size: int
    eval_every: int  # epochs
    patience: int | None  # evaluations
    log_every: int  # steps

    def steps_per_epoch(self, samples: int) -> int:
        """Optimizer steps in an epoch of `samples` samples."""
        return math.ceil(samples / self.batch_size)

    def total_steps(self, samples: int) -> int:
        """Optimizer steps in the whole run."""
        steps = self.epochs * self.steps_per_epoch(samples)
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass
class Progress:
    """How far a run is. A snapshot stores it.

    epoch: whole epochs done. samples: global samples used of the current epoch. step: optimizer steps done.
    best: the best evaluation so far. evals_since_best: evaluations since then.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    best: float | None = None
    evals_since_best: int = 0


@dataclass
class TrainState:
    """A run's settings and everything that changes while it trains: what a snapshot saves and restores."""

    settings: TrainSettings
    task: Task
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    initial_hyperparameters: list[dict[str, Any]]  # of each parameter group, before a scheduler changed any
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    meter: Meter
    ema: ExponentialMovingAverage | None
    progress: Progress = field(default_factory=Progress)

    @property
    def finished(self) -> bool:
        return self.reached_limit is not None

    @property
    def reached_limit(self) -> str | None:
        """The config key of the limit that the run has reached, None if it can train on."""
        settings, progress = self.settings, self.progress
        if settings.max_steps is not None and progress.step >= settings.max_steps:
            return "trainer.max_steps"
        if settings.patience is not None and progress.evals_since_best >= settings.patience:
            return "evaluation.patience"
        return "trainer.epochs" if progress.epoch >= settings.epochs else None

    @property
    def evaluation_due(self) -> bool:
        return self.finished or self.progress.epoch % self.settings.eval_every == 0

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model holds the averaged weights, if the run keeps an average."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def update_best(self, value: float, mode: str) -> bool:
        """Record an evaluation, the same number on every rank. Returns True if it is the best so far.

        mode: "min" or "max". In mid-epoch, where `max_steps` ends a run, nothing is recorded: the same run with more
        steps would not have evaluated there.
        """
        progress = self.progress
        if progress.samples or math.isnan(value):
            return False
        best = progress.best
        if best is None or (value < best if mode == "min" else value > best):
            progress.best, progress.evals_since_best = value, 0
            return True
        progress.evals_since_best += 1
        return False

    def average_replicas(self) -> None:
        """Make weights, optimizer state and moving average equal on all ranks, before they are evaluated or saved."""
        self.strategy.average_replicas(self._replicated_tensors())

    def _replicated_tensors(self) -> Iterator[Tensor]:
        """What differs between ranks that step on their own gradients."""
        yield from self.strategy.module.parameters()
        for state in self.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value) and value.is_floating_point():
                    yield value
        if self.ema is not None:
            yield from self.ema.averages.values()
