"""loader.sampling: what an epoch draws, and which weights it draws by."""

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch.utils.data import Subset

from lockstep.data.build import sampling_weights
from lockstep.data.partition import Order, drawn, generator
from lockstep.data.source import Tensors
from lockstep.errors import ConfigError
from support.own_data import Noisy

UNEVEN = torch.tensor([0] * 80 + [1] * 15 + [2] * 5)


def test_an_epoch_draws_each_sample_as_often_as_its_weight_says() -> None:
    weights = torch.rand(1000, dtype=torch.float64, generator=generator(3)) ** 4
    weights[::7] = 0
    expected = weights / weights.sum() * 1000
    counts = torch.stack([drawn(weights, generator(0, epoch)).bincount(minlength=1000) for epoch in range(200)])
    assert ((counts - expected).abs() < 1).all()
    assert (counts.double().mean(0) - expected).abs().max() < 0.2  # 5 standard deviations of a coin
    assert chisquare(counts.sum(0)[weights > 0], 200 * expected[weights > 0]).pvalue > 1e-3
    orders = [Order(1000, 0, weights=weights).epoch(epoch) for epoch in (0, 0, 1)]
    assert orders[0].equal(orders[1])
    assert not orders[0].equal(orders[2])


def test_equal_weights_draw_each_sample_once_in_random_order() -> None:
    order = drawn(torch.full((999,), 3.0, dtype=torch.float64), generator(1))
    assert order.sort().values.equal(torch.arange(999))
    assert not order.equal(torch.arange(999))


def test_samples_are_not_drawn_side_by_side() -> None:
    """Neighbours in the data set come into one epoch as often as any other two: the points lie on a random order."""
    together = torch.zeros(2)
    weights = torch.tensor([1.0] * 8 + [8.0], dtype=torch.float64)  # half of the samples 0 to 7 come into an epoch
    for epoch in range(2000):
        found = set(drawn(weights, generator(epoch)).tolist())
        together += torch.tensor([{0, 1} <= found, {0, 5} <= found])
    assert (together[0] - together[1]).abs() < 5 * (together.sum() / 2).sqrt()


def test_draws_are_random_and_independent() -> None:
    order = Order(10, 0, draws=20_000)
    assert len(order) == len(order.epoch(0)) == 20_000
    pairs = order.epoch(0).view(-1, 2)
    assert chisquare((pairs[:, 0] * 10 + pairs[:, 1]).bincount(minlength=100)).pvalue > 1e-3


@pytest.mark.parametrize("part", [None, range(0, 100, 2)])
def test_balanced_draws_every_class_equally_often_and_keeps_the_length_of_an_epoch(part: Any) -> None:
    targets = UNEVEN if part is None else UNEVEN[::2]
    data: Any = Tensors(torch.zeros(100, 1), UNEVEN)
    weights = sampling_weights(data if part is None else Subset(data, part), "balanced")
    rows = torch.cat([Order(len(targets), 1, weights=weights).epoch(epoch) for epoch in (0, 1)])
    assert len(rows) == 2 * len(targets)
    assert chisquare(targets[rows].bincount()).pvalue > 0.5


def own(**attributes: Any) -> Any:
    dataset = Noisy(4)
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


def test_weights_are_those_of_the_samples_of_a_part() -> None:
    found = sampling_weights(Subset(own(weights=[1, 2, 0, 0.5]), [3, 1]), "weights")
    assert (found.tolist(), found.dtype) == ([0.5, 2], torch.float64)


REFUSED = {
    "no classes": (own(), "balanced", "says no class of each sample; give it .*, or type loader.sampling=null"),
    "numbers": (own(targets=[0.5, 1.0, 2.0, 3.0]), "balanced", "says no class"),
    "too few": (own(targets=[0, 1]), "balanced", "Noisy has 4 samples, and its attribute targets 2 values"),
    "left out": (own(targets=[0, 1, -100, 1]), "balanced", "says no class"),
    "several": (own(targets=torch.zeros(4, 2)), "balanced", "says no class"),
    "no weights": (own(), "weights", "needs an attribute `weights` .*, or type loader.sampling=balanced"),
    "negative": (own(weights=[1, 2, -1, 0]), "weights", "0 or more for each sample"),
    "not finite": (own(weights=[1, 2, float("nan"), 0]), "weights", "0 or more for each sample"),
    "all zero": (own(weights=[0, 0, 0, 0]), "weights", "needs an attribute"),
    "too many weights": (own(weights=[1] * 5), "weights", "has 4 samples, and its attribute weights 5 values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_does_not_say_it_is_refused(case: str) -> None:
    dataset, sampling, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        sampling_weights(dataset, sampling)
