"""Learning-rate schedules, stepped after every optimizer step.

Each is a function (optimizer, steps_per_epoch, total_steps) -> a torch scheduler.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR


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

    def factor(number: int) -> float:
        if number < warmup_steps:
            return (number + 1) / warmup_steps
        done = min(1.0, (number - warmup_steps) / max(1, total_steps - warmup_steps))
        return final_lr_ratio + (1 - final_lr_ratio) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


def one_cycle(optimizer: Optimizer, steps_per_epoch: int, total_steps: int, pct_start: float) -> OneCycleLR:
    """Up to the optimizer's lr and down again, momentum the other way round (Smith 2018), by torch's OneCycleLR."""
    peak = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, peak, total_steps=total_steps + 1, pct_start=pct_start)
