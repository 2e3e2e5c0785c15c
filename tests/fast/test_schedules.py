"""The learning-rate schedules against numbers worked out by hand."""

import inspect
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.training import schedules


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0, momentum=0.9)


def rates(schedule: Any, steps: int, steps_per_epoch: int = 4) -> list[float]:
    """The learning rate of each step, of a peak of 2: as they come, and as a run that goes on computes them."""
    facts = {"steps_per_epoch": steps_per_epoch, "total_steps": steps}
    taken = {name: value for name, value in facts.items() if name in inspect.signature(schedule).parameters}

    running, found, resumed = optimizer(), [], []
    follow = schedule(running, **taken)
    for step in range(steps):
        found.append(running.param_groups[0]["lr"])
        follow(step + 1)
        other = optimizer()
        schedule(other, **taken)(step)
        resumed.append(other.param_groups[0]["lr"])
    assert resumed == found
    return found


def half_cosine(n: int) -> float:
    return (1 + math.cos(math.pi * n / 10)) / 2


FORMULAS: list[tuple[Any, list[float]]] = [  # two epochs and a half of four steps, of which the first two warm up
    (schedules.constant, [2.0] * 12),
    (partial(schedules.step, step_epochs=2, gamma=0.1), [2.0] * 8 + [0.2] * 4),
    (
        partial(schedules.decay, shape="cosine", warmup_epochs=0.5, final_lr_ratio=0.1),
        [1.0, 2.0, *(2 * (0.1 + 0.9 * half_cosine(n)) for n in range(10))],
    ),
    (
        partial(schedules.decay, shape="linear", warmup_epochs=0.5, final_lr_ratio=0.1),
        [1.0, 2.0, *(2 * (1 - 0.9 * n / 10) for n in range(10))],
    ),
    (partial(schedules.decay, shape="linear", warmup_epochs=0, final_lr_ratio=0), [2 - n / 6 for n in range(12)]),
]


@pytest.mark.parametrize(("schedule", "expected"), FORMULAS)
def test_schedules_are_their_formulas(schedule: Any, expected: list[float]) -> None:
    assert rates(schedule, 12) == pytest.approx(expected)


@pytest.mark.parametrize("pct_start", [0.05, 0.25, 0.75])
def test_one_cycle_is_torchs(pct_start: float) -> None:
    plain, expected = optimizer(), []
    theirs = torch.optim.lr_scheduler.OneCycleLR(plain, 2.0, 17, pct_start=pct_start, cycle_momentum=False)
    for _ in range(16):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        theirs.step()
    assert rates(partial(schedules.one_cycle, pct_start=pct_start), 16) == pytest.approx(expected, rel=1e-12)
