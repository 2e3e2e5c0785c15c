"""Learning rates as functions of the step: nothing of them is in a snapshot, and a resumed run computes them again.

A schedule of the user's is a function of the optimizer and, by name, of what it needs of steps_per_epoch, total_steps,
and direction ("min" or "max": which values of the monitor are better). It returns a scheduler of torch, which is
stepped after every optimizer step, or a `Schedule`.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from lockstep.config.schema import NotNegative, Positive, Whole
from lockstep.errors import ConfigError


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
            set_lr(group, lr * factor)

    def evaluated(self, value: float) -> None:
        """value: of the monitor, the same on every rank."""

    def forget_best(self) -> None:
        """The values from now on cannot be compared with those before."""

    def state_dict(self) -> dict[str, Any]:
        """What evaluations have made of it: all else follows from the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse, before the call for the step at which a run goes on."""


def set_lr(group: dict[str, Any], lr: float) -> None:
    """A capturable optimizer has its rate in a tensor."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(float(lr))
    else:
        group["lr"] = float(lr)


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
        left = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return final_lr_ratio + (1 - final_lr_ratio) * left

    return Schedule(optimizer, factor)


def one_cycle(optimizer: Optimizer, total_steps: int, pct_start: Annotated[float, Gt(0), Lt(1)]) -> "TorchSchedule":
    """Up to the optimizer's lr and down again (Smith 2018), by torch's OneCycleLR.

    The momentum, or the first of the betas, goes the other way round: from the optimizer's own to 0.1 less.

    pct_start: share of the run in which the learning rate rises.
    """
    has_betas, has_momentum = "betas" in optimizer.defaults, "momentum" in optimizer.defaults
    momentum = [group["betas"][0] if has_betas else group.get("momentum", 0.0) for group in optimizer.param_groups]

    def made(optimizer: Optimizer) -> LRScheduler:
        return OneCycleLR(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps + 1,
            pct_start=pct_start,
            cycle_momentum=has_betas or has_momentum,
            max_momentum=momentum,
            base_momentum=[max(0.0, value - 0.1) for value in momentum],
        )

    return TorchSchedule(optimizer, 1, made, "step", 0.0)


class TorchSchedule(Schedule):
    """Any schedule of torch, or of the user's own, stepped after each optimizer step or each epoch, with a warm-up.

    A resumed run steps it again, from the first step on.

    schedule: the schedule's _target_ and its arguments: (optimizer) -> a torch scheduler.
    every: when the schedule moves on.
    warmup_epochs: epochs in which the learning rate rises linearly to the schedule's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps_per_epoch: int,
        schedule: Callable[[Optimizer], Any],
        every: Literal["epoch", "step"],
        warmup_epochs: NotNegative,
    ) -> None:
        self.optimizer, self.interval = optimizer, steps_per_epoch if every == "epoch" else 1
        self.warmup, self.number = int(warmup_epochs * steps_per_epoch), 0
        self.base = self._rates()
        self.schedule = schedule(optimizer)
        if not callable(getattr(self.schedule, "step", None)):
            found = "None" if self.schedule is None else f"an object of {type(self.schedule).__name__}"
            what = f"scheduler._target_ returns {found}, and a scheduler of torch is wanted"
            raise ConfigError(f"{what}; type return before the scheduler in that function, or scheduler=constant")
        self.rates = self._rates()  # of the schedule, without the warm-up
        self._warm_up()

    def __call__(self, step: int) -> None:
        with self._moving(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Detected call of `lr_scheduler.step"
            )  # before the optimizer's, in a resume
            while self.number < step:
                self.number += 1
                if self.number % self.interval == 0:
                    self.move()

    def move(self) -> None:
        self.schedule.step()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """In the block the optimizer has the schedule's own rates: some schedules go on from what they find."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            set_lr(group, rate)
        yield
        self.rates = self._rates()
        self._warm_up()

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _warm_up(self) -> None:
        if self.number < self.warmup:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                set_lr(group, rate * (self.number + 1) / self.warmup)


class Plateau(TorchSchedule):
    """torch's ReduceLROnPlateau, stepped with the monitor after each evaluation, with a warm-up.

    factor: factor of each change of the learning rate.
    patience: evaluations in a row without a better monitor that are waited for.
    threshold: share of the best value by which a better one differs from it.
    min_lr: the learning rate falls no lower.
    warmup_epochs: epochs in which the learning rate rises to optimizer.lr.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps_per_epoch: int,
        direction: Literal["min", "max"],
        factor: Annotated[float, Gt(0), Lt(1)],
        patience: Whole,
        threshold: NotNegative,
        min_lr: NotNegative,
        warmup_epochs: NotNegative,
    ) -> None:
        def made(optimizer: Optimizer) -> ReduceLROnPlateau:
            return ReduceLROnPlateau(optimizer, direction, factor, patience, threshold, min_lr=min_lr)

        super().__init__(optimizer, steps_per_epoch, made, "step", warmup_epochs)

    def move(self) -> None:
        """Only an evaluation moves it on."""

    def evaluated(self, value: float) -> None:
        with self._moving():
            self.schedule.step(value)

    def forget_best(self) -> None:
        self.schedule.best, self.schedule.num_bad_epochs = self.schedule.mode_worse, 0

    def state_dict(self) -> dict[str, Any]:
        factors = [rate / base if base else 1.0 for rate, base in zip(self.rates, self.base, strict=True)]
        return {"factors": factors, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = [base * factor for base, factor in zip(self.base, state["factors"], strict=True)]
        self.schedule.load_state_dict(state["schedule"])


def as_schedule(made: Any, optimizer: Optimizer) -> Schedule:
    """What the function of `scheduler._target_` has returned, as a Schedule."""
    return made if isinstance(made, Schedule) else TorchSchedule(optimizer, 1, lambda _: made, "step", 0.0)
