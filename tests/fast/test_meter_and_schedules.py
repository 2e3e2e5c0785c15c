"""The meter, the moving average and the learning-rate schedules, each against numbers worked out by hand."""

import inspect
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.distributed.world import join_world
from lockstep.tasks.tasks import CrossEntropy
from lockstep.training import schedules
from lockstep.training.ema import Average
from lockstep.training.metrics import AT_ONCE, Meter
from support.worlds import in_world


def add(meter: Meter, loss: float, right: int, count: int, step: int = 0) -> None:
    meter.add(step, [torch.tensor(loss), torch.tensor(right)], [count, torch.tensor(count)])


def means(meter: Meter) -> dict[str, float]:
    return meter.means(meter.world.all_reduce_sum(meter.flush().clone()).tolist())


def measure() -> dict[str, Any]:
    """Rank r adds 3 samples with loss 1 + r and one right answer, for more steps than are added up at once."""
    with join_world("gloo", 60) as world:
        meter, found = Meter(CrossEntropy(), world), {}
        for step in range(1, AT_ONCE + 7):
            add(meter, 1.0 + world.rank, 1, 3, step)
        found["first"] = means(meter)
        add(meter, 12.0, 3, 3)
        add(meter, 1000.0, 3, 3, step=7000)
        meter.discard(7000)
        found["all"] = means(meter)
        meter.restore(world.all_reduce_sum(meter.flush().clone()))
        found["restored"] = means(meter)
        found["finite"] = meter.first_non_finite()
        add(meter, math.inf if world.rank else 1.0, 0, 1, step=90 + world.rank)
        add(meter, math.nan, 0, 1, step=95)
        found["not finite"] = meter.first_non_finite()
        meter.clear()
        found["cleared"] = means(meter)
        return found


def test_a_meter_of_two_ranks_has_the_means_over_all_samples() -> None:
    steps = AT_ONCE + 6
    for found in in_world(2, measure):
        assert found["first"] == {"loss": pytest.approx(0.5), "accuracy": pytest.approx(1 / 3)}
        both = {"loss": (3 * steps + 24) / (6 * steps + 6), "accuracy": (2 * steps + 6) / (6 * steps + 6)}
        assert found["all"] == found["restored"] == pytest.approx(both)
        assert (found["finite"], found["not finite"]) == (None, 91)
        assert found["cleared"] == {}


def test_a_moving_average_has_the_statistics_of_its_own_weights() -> None:
    model = nn.BatchNorm1d(1).double()
    model.register_buffer("table", torch.ones(1), persistent=False)
    average = Average(model, 0.9)
    for value in (1.0, 2.0):
        nn.init.constant_(model.running_mean, value)
        average.update()
    with average.applied():
        assert model.running_mean.item() == pytest.approx(0.9 * 1 + 0.1 * 2, rel=1e-12)
    assert model.running_mean.item() == 2.0
    assert list(average.averages) == ["weight", "bias", "running_mean", "running_var"]


def rates(schedule: Any, steps: int, steps_per_epoch: int = 4) -> list[float]:
    """The learning rate of each step, of a peak of 2: as they come, and as a run that goes on computes them."""
    facts = {"steps_per_epoch": steps_per_epoch, "total_steps": steps}
    taken = {name: value for name, value in facts.items() if name in inspect.signature(schedule).parameters}

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0, momentum=0.9)

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


def test_schedules_are_their_formulas() -> None:
    assert rates(schedules.constant, 5) == [2.0] * 5
    step = partial(schedules.step, step_epochs=2, gamma=0.1)
    assert rates(step, 17) == pytest.approx([2.0] * 8 + [0.2] * 8 + [0.02])
    cosine = rates(partial(schedules.decay, shape="cosine", warmup_epochs=0.5, final_lr_ratio=0.1), 12)
    assert cosine[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert cosine[7] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    expected = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / 10)) / 2) for n in range(10)]
    assert cosine[2:] == pytest.approx(expected)
    assert rates(partial(schedules.decay, shape="cosine", warmup_epochs=0, final_lr_ratio=0), 4)[0] == 2.0
    line = rates(partial(schedules.decay, shape="linear", warmup_epochs=0.5, final_lr_ratio=0.1), 12)
    assert line == pytest.approx([1.0, 2.0, *[2 * (1 - 0.9 * n / 10) for n in range(10)]])


@pytest.mark.parametrize("pct_start", [0.05, 0.25, 0.75])
def test_one_cycle_is_torchs(pct_start: float) -> None:
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(plain, 2.0, 17, pct_start=pct_start, cycle_momentum=False)
    expected = []
    for _ in range(16):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        theirs.step()
    assert rates(partial(schedules.one_cycle, pct_start=pct_start), 16) == pytest.approx(expected, rel=1e-12)
