"""Learning-rate schedules, stepped after every optimizer step.

Each is a function (optimizer, steps_per_epoch, total_steps) -> a torch scheduler.
"""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from lockstep.errors import ConfigError


def constant(optimizer: Optimizer, steps_per_epoch: int, total_steps: int) -> LambdaLR:
    """The optimizer's lr in every step."""
    return LambdaLR(optimizer, lambda step: 1.0)


def step(optimizer: Optimizer, steps_per_epoch: int, total_steps: int, step_epochs: float, gamma: float) -> LambdaLR:
    """lr times `gamma` after every `step_epochs` epochs."""
    return LambdaLR(optimizer, lambda number: gamma ** (number // (step_epochs * steps_per_epoch)))


def cosine(
    optimizer: Optimizer, steps_per_epoch: int, total_steps: int, warmup_epochs: float, final_lr_ratio: float
) -> LambdaLR:
    """Linear warm-up, then half a cosine down to `final_lr_ratio` times lr (Loshchilov and Hutter 2017)."""
    warmup_steps = int(warmup_epochs * steps_per_epoch)

    def shape(done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, _with_warmup(shape, warmup_steps, total_steps, final_lr_ratio))


def linear_decay(
    optimizer: Optimizer, steps_per_epoch: int, total_steps: int, warmup_epochs: float, final_lr_ratio: float
) -> LambdaLR:
    """Linear warm-up, then a straight line down to `final_lr_ratio` times lr."""
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


def one_cycle(optimizer: Optimizer, steps_per_epoch: int, total_steps: int, pct_start: float) -> OneCycleLR:
    """Up to the optimizer's lr and down again, momentum the other way round (Smith 2018), by torch's OneCycleLR."""
    peak = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, peak, total_steps=total_steps + 1, pct_start=pct_start)


class AnySchedule(LRScheduler):
    """Any schedule of torch, or of the user's own, stepped after each optimizer step or each epoch, with a warm-up.

    schedule: (optimizer) -> a torch scheduler. every: "step" or "epoch". warmup_epochs: epochs in which the learning
    rate rises linearly to what the schedule says. Raises ConfigError for a schedule that wants a metric.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps_per_epoch: int,
        total_steps: int,
        schedule: Callable[[Optimizer], LRScheduler],
        every: str,
        warmup_epochs: float,
    ) -> None:
        self.optimizer, self.schedule = optimizer, schedule(optimizer)
        require_no_metric(self.schedule)
        self.interval = steps_per_epoch if every == "epoch" else 1
        self.warmup_steps = int(warmup_epochs * steps_per_epoch)
        self.number = 0  # optimizer steps done
        self.factor = 1.0  # of the warm-up, in the groups' learning rates now
        self._apply_warmup()

    def step(self, epoch: int | None = None) -> None:
        """Call it after each optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] /= self.factor  # some schedules go on from the learning rate that they find
        self.factor = 1.0
        self.number += 1
        if self.number % self.interval == 0:
            self.schedule.step()
        self._apply_warmup()

    def _apply_warmup(self) -> None:
        if self.number < self.warmup_steps:
            self.factor = (self.number + 1) / self.warmup_steps
        for group in self.optimizer.param_groups:
            group["lr"] *= self.factor
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "factor": self.factor, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number, self.factor = state_dict["number"], state_dict["factor"]
        self.schedule.load_state_dict(state_dict["schedule"])


def require_no_metric(scheduler: LRScheduler) -> None:
    """Raise ConfigError for a schedule whose steps want a metric: evaluations come after epochs, and not after all."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau wants a metric at each step, and schedules get none; "
            "type scheduler=cosine or scheduler=step"
        )
