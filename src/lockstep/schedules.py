"""Learning-rate schedules: each is (optimizer, epoch_steps, total_steps) -> a torch scheduler stepped once per optimizer step."""

import math

from torch.optim.lr_scheduler import LambdaLR, OneCycleLR


def constant(optimizer, epoch_steps, total_steps):
    """The optimizer's lr from first to last."""
    return LambdaLR(optimizer, lambda step: 1.0)


def step(optimizer, epoch_steps, total_steps, every, gamma):
    """lr times `gamma` after each `every` epochs."""
    return LambdaLR(optimizer, lambda step: gamma ** (step // (every * epoch_steps)))


def cosine(optimizer, epoch_steps, total_steps, warmup, final):
    """Linear warm-up over `warmup` epochs, then half a cosine down to `final` times lr (Loshchilov and Hutter 2017)."""
    rise = int(warmup * epoch_steps)

    def factor(step):
        if step < rise:
            return (step + 1) / rise
        done = min(1.0, (step - rise) / max(1, total_steps - rise))
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


def one_cycle(optimizer, epoch_steps, total_steps, pct_start):
    """Up to the optimizer's lr and down again, momentum the other way round (Smith 2018), by torch's OneCycleLR."""
    peak = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, peak, total_steps=total_steps + 1, pct_start=pct_start)


def restore(scheduler, state):
    """Go on from `state`, but with this run's own length: more epochs may have been asked for since."""
    scheduler.load_state_dict({key: value for key, value in state.items() if key != "total_steps"})
