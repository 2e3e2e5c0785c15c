"""Learning-rate schedules, stepped after every optimizer step.

Each is a function of the optimizer and, by name, of what it needs of steps_per_epoch, total_steps, and objective_mode
("min" or "max": which values of the objective are better). It returns a torch scheduler.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from annotated_types import Gt, Lt
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from lockstep.config.schema import NotNegative, Positive, Whole
from lockstep.errors import ConfigError


@runtime_checkable
class FollowsObjective(Protocol):
    """A scheduler that is moved on by evaluations, too. Its own `step` is called after each step, as that of any."""

    def evaluated(self, value: float) -> None:
        """value: of the objective, the same on every rank."""

    def forget_best(self) -> None:
        """The values from now on cannot be compared with those before."""

    def resume_at(self, step: int) -> None:
        """A run goes on from its state after `step` steps of this run's batch size."""


def require_schedule(made: Any, key: str) -> Any:
    """`made`, which the function that `key` names has returned. Raises ConfigError if it is no scheduler."""
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
    if not missing:
        return made
    if missing[0] != "step":
        raise ConfigError(
            f"{key}._target_ returns an object of {type(made).__name__} without {missing[0]}, and a snapshot keeps "
            f"what that gives; derive it from torch.optim.lr_scheduler.LRScheduler, or type scheduler=constant"
        )
    found = "None" if made is None else f"an object of {type(made).__name__}"
    raise ConfigError(
        f"{key}._target_ returns {found}, and a scheduler of torch is wanted; type return before the scheduler in that "
        f"function, or scheduler=constant"
    )


def constant(optimizer: Optimizer) -> LambdaLR:
    """The optimizer's lr in every step."""
    return LambdaLR(optimizer, lambda step: 1.0)


def step(optimizer: Optimizer, steps_per_epoch: int, step_epochs: Positive, gamma: Positive) -> LambdaLR:
    """lr times a factor after every few epochs.

    step_epochs: epochs between two changes of the learning rate.
    gamma: factor of each change.
    """
    return LambdaLR(optimizer, lambda number: gamma ** (number // (step_epochs * steps_per_epoch)))


def cosine(
    optimizer: Optimizer,
    steps_per_epoch: int,
    total_steps: int,
    warmup_epochs: NotNegative,
    final_lr_ratio: NotNegative,
) -> LambdaLR:
    """Linear warm-up, then half a cosine down (Loshchilov and Hutter 2017).

    warmup_epochs: epochs in which the learning rate rises to optimizer.lr.
    final_lr_ratio: learning rate at the end, as a share of optimizer.lr.
    """
    warmup_steps = int(warmup_epochs * steps_per_epoch)

    def shape(done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, _with_warmup(shape, warmup_steps, total_steps, final_lr_ratio))


def linear_decay(
    optimizer: Optimizer,
    steps_per_epoch: int,
    total_steps: int,
    warmup_epochs: NotNegative,
    final_lr_ratio: NotNegative,
) -> LambdaLR:
    """Linear warm-up, then a straight line down.

    warmup_epochs: epochs in which the learning rate rises to optimizer.lr.
    final_lr_ratio: learning rate at the end, as a share of optimizer.lr.
    """
    warmup_steps = int(warmup_epochs * steps_per_epoch)
    return LambdaLR(optimizer, _with_warmup(lambda done: 1 - done, warmup_steps, total_steps, final_lr_ratio))


def _with_warmup(
    decay: Callable[[float], float], warmup_steps: int, total_steps: int, final_lr_ratio: float
) -> Callable[[int], float]:
    """step -> factor of lr. decay: from 1 to 0 as the share of the steps after the warm-up grows from 0 to 1."""

    def factor(number: int) -> float:
        if number < warmup_steps:
            return (number + 1) / warmup_steps
        done = min(1.0, (number - warmup_steps) / max(1, total_steps - warmup_steps))
        return final_lr_ratio + (1 - final_lr_ratio) * decay(done)

    return factor


def one_cycle(
    optimizer: Optimizer,
    total_steps: int,
    pct_start: Annotated[float, Gt(0), Lt(1)],
) -> OneCycleLR:
    """Up to the optimizer's lr and down again (Smith 2018), by torch's OneCycleLR.

    The momentum, or the first of the betas, goes the other way round: from the optimizer's own to 0.1 less.

    pct_start: share of the run in which the learning rate rises.
    """
    peak = [group["lr"] for group in optimizer.param_groups]
    has_betas, has_momentum = "betas" in optimizer.defaults, "momentum" in optimizer.defaults
    momentum = [group["betas"][0] if has_betas else group.get("momentum", 0.0) for group in optimizer.param_groups]
    return OneCycleLR(
        optimizer,
        peak,
        total_steps=total_steps + 1,
        pct_start=pct_start,
        cycle_momentum=has_betas or has_momentum,
        max_momentum=momentum,
        base_momentum=[max(0.0, value - 0.1) for value in momentum],
    )


class WithWarmup(LRScheduler):
    """A schedule of torch, with a linear warm-up of `warmup_steps` optimizer steps to what the schedule says."""

    def __init__(self, optimizer: Optimizer, schedule: LRScheduler, warmup_steps: int) -> None:
        self.optimizer, self.schedule, self.warmup_steps = optimizer, schedule, warmup_steps
        self.number = 0  # optimizer steps done
        self.factor = 1.0  # of the warm-up, in the groups' learning rates now
        self._apply_warmup()

    def step(self, epoch: int | None = None) -> None:
        """Call it after each optimizer step."""
        with self.without_warmup():
            self.number += 1
            self.move()

    def move(self) -> None:
        """Step the schedule if it is due. `self.number` is the optimizer step that has ended."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @contextmanager
    def without_warmup(self) -> Iterator[None]:
        """Inside the block the learning rates are those of the schedule: some go on from what they find."""
        for group in self.optimizer.param_groups:
            group["lr"] /= self.factor
        self.factor = 1.0
        yield
        self._apply_warmup()

    def _apply_warmup(self) -> None:
        if self.number < self.warmup_steps:
            self.factor = (self.number + 1) / self.warmup_steps
        for group in self.optimizer.param_groups:
            group["lr"] *= self.factor

    def take_over_factor(self, factor: float) -> None:
        """The groups have got their learning rates from elsewhere, with this factor of the warm-up in them."""
        self.factor = factor

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "factor": self.factor, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number, self.factor = state_dict["number"], state_dict["factor"]
        self.schedule.load_state_dict(state_dict["schedule"])


class AnySchedule(WithWarmup):
    """Any schedule of torch, or of the user's own, stepped after each optimizer step or each epoch, with a warm-up.

    schedule: the schedule's _target_ and its arguments: (optimizer) -> a torch scheduler.
    every: when the schedule moves on.
    warmup_epochs: epochs in which the learning rate rises linearly to the schedule's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps_per_epoch: int,
        schedule: Callable[[Optimizer], LRScheduler],
        every: Literal["epoch", "step"],
        warmup_epochs: NotNegative,
    ) -> None:
        self.interval = steps_per_epoch if every == "epoch" else 1
        made = require_schedule(schedule(optimizer), "scheduler.schedule")
        super().__init__(optimizer, made, int(warmup_epochs * steps_per_epoch))

    def move(self) -> None:
        if self.number % self.interval == 0:
            self.schedule.step()


class Plateau(WithWarmup):
    """torch's ReduceLROnPlateau, stepped with the objective after each evaluation, with a warm-up.

    factor: factor of each change of the learning rate.
    patience: evaluations in a row without a better objective that are waited for.
    threshold: share of the best value by which a better one differs from it.
    min_lr: the learning rate falls no lower.
    warmup_epochs: epochs in which the learning rate rises to optimizer.lr.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps_per_epoch: int,
        objective_mode: Literal["min", "max"],
        factor: Annotated[float, Gt(0), Lt(1)],
        patience: Whole,
        threshold: NotNegative,
        min_lr: NotNegative,
        warmup_epochs: NotNegative,
    ) -> None:
        schedule = ReduceLROnPlateau(optimizer, objective_mode, factor, patience, threshold, min_lr=min_lr)
        super().__init__(optimizer, schedule, int(warmup_epochs * steps_per_epoch))
        self.schedule: ReduceLROnPlateau = schedule

    def move(self) -> None:
        """Only an evaluation moves it on."""

    def forget_best(self) -> None:
        """The values from now on cannot be compared with those before."""
        self.schedule.best, self.schedule.num_bad_epochs = self.schedule.mode_worse, 0

    def resume_at(self, step: int) -> None:
        """`step` tells how far the warm-up is; what evaluations have made of the rate is kept."""
        self.number = step

    def evaluated(self, value: float) -> None:
        """value: of the objective, the same on every rank."""
        with self.without_warmup():
            self.schedule.step(value)
