"""Learning rates as functions of the step: nothing of them is in a snapshot, and a resumed run computes them again.

A schedule of the user's is a function of the optimizer and, by name, of what it needs of steps_per_epoch, total_steps,
and direction ("min" or "max": which values of the monitor are better). It returns a scheduler of torch, which is
stepped after every optimizer step, or a `Schedule`.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.config.schema import NotNegative, Positive, Whole

START_OF_CYCLE, END_OF_CYCLE = 1 / 25, 1 / 25e4  # torch's own shares of the highest rate


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
    """The optimizer's lr in every step."""
    return Schedule(optimizer, lambda step: 1.0)


def step(optimizer: Optimizer, steps_per_epoch: int, step_epochs: Positive, gamma: Positive) -> Schedule:
    """lr times a factor after every few epochs.

    step_epochs: epochs between two changes of the learning rate.
    gamma: factor of each change.
    """
    return Schedule(optimizer, lambda number: gamma ** (number // (step_epochs * steps_per_epoch)))


def decay(
    optimizer: Optimizer,
    steps_per_epoch: int,
    total_steps: int,
    shape: Literal["cosine", "linear"],
    warmup_epochs: NotNegative,
    final_lr_ratio: NotNegative,
) -> Schedule:
    """Linear warm-up, then half a cosine (Loshchilov and Hutter 2017) or a straight line down.

    warmup_epochs: epochs in which the learning rate rises to optimizer.lr.
    final_lr_ratio: learning rate at the end, as a share of optimizer.lr.
    """
    warmup = int(warmup_epochs * steps_per_epoch)

    def factor(number: int) -> float:
        if number < warmup:
            return (number + 1) / warmup
        done = min(1.0, (number - warmup) / max(1, total_steps - warmup))
        return 1 - done * (1 - final_lr_ratio) if shape == "linear" else _along_cosine(1.0, final_lr_ratio, done)

    return Schedule(optimizer, factor)


def one_cycle(optimizer: Optimizer, total_steps: int, pct_start: Annotated[float, Gt(0), Lt(1)]) -> Schedule:
    """Up to the optimizer's lr and down again (Smith 2018): torch's OneCycleLR with cycle_momentum=False.

    pct_start: share of the run in which the learning rate rises.
    """
    peak = pct_start * (total_steps + 1) - 1

    def factor(number: int) -> float:
        if number < peak:
            return _along_cosine(START_OF_CYCLE, 1.0, number / peak)
        return _along_cosine(1.0, END_OF_CYCLE, min(1.0, (number - peak) / (total_steps - peak)))

    return Schedule(optimizer, factor)


def _along_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


class TorchSchedule(Schedule):
    """Any schedule of torch, or of the user's own. A resumed run steps it again, from the first step on.

    schedule: the schedule's _target_ and its arguments: (optimizer) -> a torch scheduler.
    every: when the schedule moves on.
    is_judged: of `plateau`: it moves on after each evaluation alone, by the monitor's value.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps_per_epoch: int,
        schedule: Callable[[Optimizer], Any],
        every: Literal["epoch", "step"],
        is_judged: bool = False,
    ) -> None:
        self.optimizer, self.interval = optimizer, steps_per_epoch if every == "epoch" else 1
        self.number, self.is_judged, self.base = 0, is_judged, self._rates()
        self.schedule = schedule(optimizer)
        self.move = self.schedule.step
        self.rates = self._rates()

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def __call__(self, step: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate  # a resume has put the snapshot's there, and some schedules go on from what they find
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the optimizer's: a resume
            while self.number < step:
                self.number += 1
                if not self.is_judged and self.number % self.interval == 0:
                    self.move()
        self.rates = self._rates()

    def evaluated(self, value: float) -> None:
        if self.is_judged:
            self.move(value)
            self.rates = self._rates()

    def state_dict(self) -> dict[str, Any]:
        if not self.is_judged:
            return {}
        factors = [rate / base if base else 1.0 for rate, base in zip(self.rates, self.base, strict=True)]
        return {"factors": factors, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_judged:
            self.rates = [base * factor for base, factor in zip(self.base, state["factors"], strict=True)]
            self.schedule.load_state_dict(state["schedule"])


def plateau(
    optimizer: Optimizer,
    direction: Literal["min", "max"],
    factor: Annotated[float, Gt(0), Lt(1)],
    patience: Whole,
    threshold: NotNegative,
    min_lr: NotNegative,
) -> TorchSchedule:
    """torch's ReduceLROnPlateau, which has these arguments, stepped with the monitor after each evaluation."""
    options: dict[str, Any] = {"factor": factor, "patience": patience, "threshold": threshold, "min_lr": min_lr}
    return TorchSchedule(optimizer, 1, partial(ReduceLROnPlateau, mode=direction, **options), "step", is_judged=True)


def as_schedule(made: Any, optimizer: Optimizer) -> Schedule:
    """What the function of `scheduler._target_` has returned, as a Schedule."""
    return made if isinstance(made, Schedule) else TorchSchedule(optimizer, 1, lambda _: made, "step")
