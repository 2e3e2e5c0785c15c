"""Learning rates as functions of the step: a resumed run computes them again. A snapshot has what evaluations made of a
Plateau, and no more.

A schedule of the user's is a function of the optimizer and, by name, of what it needs of steps_per_epoch, total_steps,
and direction ("min" or "max": which values of the monitor are better). It returns a scheduler of torch, which is
stepped after every optimizer step, or a `Schedule`.
"""

import logging
import math
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt
from torch.optim import Optimizer

from lockstep.config.schema import NotNegative, Positive, Whole

log = logging.getLogger(__name__)


class Schedule:
    """The learning rate of each group times `factor(step)`, where `step` steps are done."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.base = [float(group["lr"]) for group in optimizer.param_groups]
        self(0)

    def __call__(self, step: int) -> None:
        """`step` steps are done: set what the next one takes."""
        factor = self.factor(step)
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = lr * factor

    def evaluated(self, value: float) -> None:
        """value: of the monitor, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """What evaluations have made of it: all else follows from the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse, before the call for the step at which a run goes on."""


def constant(optimizer: Optimizer) -> Schedule:
    return Schedule(optimizer, lambda step: 1.0)


def step(optimizer: Optimizer, steps_per_epoch: int, step_epochs: Positive, gamma: Positive) -> Schedule:
    """lr times `gamma` after every `step_epochs` epochs."""
    return Schedule(optimizer, lambda number: gamma ** (number // (step_epochs * steps_per_epoch)))


def decay(
    optimizer: Optimizer,
    steps_per_epoch: int,
    total_steps: int,
    shape: Literal["cosine", "linear"],
    warmup_epochs: NotNegative,
    final_lr_ratio: NotNegative,
) -> Schedule:
    """Linear warm-up, then half a cosine (Loshchilov and Hutter 2017) or a straight line down to a share of lr."""
    warmup = int(warmup_epochs * steps_per_epoch)
    if warmup > total_steps:
        log.warning(
            "scheduler.warmup_epochs=%g is longer than the training, which ends below optimizer.lr", warmup_epochs
        )

    def factor(number: int) -> float:
        if number < warmup:
            return (number + 1) / warmup
        done = min(1.0, (number - warmup) / max(1, total_steps - warmup))
        return 1 - done * (1 - final_lr_ratio) if shape == "linear" else _along_cosine(1.0, final_lr_ratio, done)

    return Schedule(optimizer, factor)


def one_cycle(optimizer: Optimizer, total_steps: int, pct_start: Annotated[float, Gt(0), Lt(1)]) -> Schedule:
    """Up to lr and down again (Smith 2018): torch's OneCycleLR with cycle_momentum=False, whose shares these are."""
    peak = pct_start * (total_steps + 1) - 1

    def factor(number: int) -> float:
        if number < peak:
            return _along_cosine(1 / 25, 1.0, number / peak)
        return _along_cosine(1.0, 1 / 25e4, min(1.0, (number - peak) / (total_steps - peak)))

    return Schedule(optimizer, factor)


def _along_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


class Plateau(Schedule):
    """torch's ReduceLROnPlateau, which has these arguments, with the monitor after each evaluation."""

    def __init__(
        self,
        optimizer: Optimizer,
        direction: Literal["min", "max"],
        factor: Annotated[float, Gt(0), Lt(1)],
        patience: Whole,
        threshold: NotNegative,
        min_lr: NotNegative,
    ) -> None:
        self.sign, self.by, self.patience = 1 if direction == "min" else -1, factor, patience
        self.threshold, self.min_lr = threshold, min_lr
        self.best, self.bad, self.reached = math.inf, 0, 1.0  # the best value times the sign
        super().__init__(optimizer, lambda step: self.reached)

    def __call__(self, step: int) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = max(lr * self.reached, min(lr, self.min_lr))

    def evaluated(self, value: float) -> None:
        is_better = self.sign * value < self.best * (1 - self.sign * self.threshold)
        self.best, self.bad = (self.sign * value, 0) if is_better else (self.best, self.bad + 1)
        if self.bad > self.patience:
            self.reached, self.bad = self.reached * self.by, 0
            self(0)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad": self.bad, "reached": self.reached}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad, self.reached = state["best"], state["bad"], state["reached"]


class TorchSchedule(Schedule):
    """Any schedule of torch, or of the user's own. A resumed run steps it again, from the first step on. schedule: the
    schedule's _target_ and its arguments: (optimizer) -> a torch scheduler. every: when it moves on."""

    def __init__(
        self,
        optimizer: Optimizer,
        steps_per_epoch: int,
        schedule: Callable[[Optimizer], Any],
        every: Literal["epoch", "step"],
    ) -> None:
        self.optimizer, self.interval = optimizer, steps_per_epoch if every == "epoch" else 1
        self.moves, self.move = 0, schedule(optimizer).step
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the optimizer's: a resume

    def __call__(self, step: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate  # a resume has put the snapshot's there, and some schedules go on from what they find
        while self.moves < step // self.interval:
            self.moves += 1
            self.move()
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
