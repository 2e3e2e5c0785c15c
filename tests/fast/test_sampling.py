"""loader.sampling: what an epoch draws, and which weights it draws by."""

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch.utils.data import Subset

from lockstep.data.build import sampling_weights
from lockstep.data.partition import Order, generator
from lockstep.data.source import Tensors
from lockstep.errors import ConfigError
from support.own_data import Noisy

UNEVEN = torch.tensor([0] * 80 + [1] * 15 + [2] * 5)


def test_an_epoch_draws_at_random_each_sample_as_often_as_its_weight_says() -> None:
    weights = torch.rand(1000, dtype=torch.float64, generator=generator(3)) ** 4
    weights[::7] = 0
    order = Order(1000, 0, weights=weights)
    counts = torch.stack([order.epoch(epoch) for epoch in range(200)]).flatten().bincount(minlength=1000)
    assert not counts[::7].any()
    assert chisquare(counts[weights > 0], (weights / weights.sum() * 200_000)[weights > 0]).pvalue > 1e-3
    assert order.epoch(0).equal(order.epoch(0))
    assert not order.epoch(0).equal(order.epoch(1))
    order = Order(10, 0, draws=20_000)
    assert len(order) == len(order.epoch(0)) == 20_000
    pairs = order.epoch(0).view(-1, 2)
    assert chisquare((pairs[:, 0] * 10 + pairs[:, 1]).bincount(minlength=100)).pvalue > 1e-3


def test_balanced_draws_every_class_equally_often_and_keeps_the_length_of_an_epoch() -> None:
    part = Subset(Tensors(torch.zeros(100, 1), UNEVEN), range(0, 100, 2))
    weights = sampling_weights(part, "balanced")
    rows = torch.cat([Order(50, 1, weights=weights).epoch(epoch) for epoch in range(50)])
    assert len(rows) == 50 * 50
    assert chisquare(UNEVEN[::2][rows].bincount()).pvalue > 1e-3


def own(**attributes: Any) -> Any:
    dataset = Noisy(4)
    dataset.__dict__ |= attributes
    return dataset


REFUSED = [
    (own(), "balanced", "needs an attribute `targets` .*; give it one, or type loader.sampling=null"),
    (own(targets=[0.5, 1.0, 2.0, 3.0]), "balanced", "needs an attribute `targets`"),
    (own(targets=[0, 1]), "balanced", "Noisy has 4 samples, and its attribute targets 2 values"),
    (own(targets=torch.zeros(4, 2)), "balanced", "needs an attribute `targets`"),
    (own(), "weights", "needs an attribute `weights` .*, or type loader.sampling=null"),
    (own(weights=[1] * 5), "weights", "has 4 samples, and its attribute weights 5 values"),
]


def test_weights_are_those_of_the_samples_of_a_part_and_data_that_does_not_tell_them_is_refused() -> None:
    found = sampling_weights(Subset(own(weights=[1, 2, 0, 0.5]), [3, 1]), "weights")
    assert (found.tolist(), found.dtype) == ([0.5, 2], torch.float64)
    for dataset, sampling, sentence in REFUSED:
        with pytest.raises(ConfigError, match=sentence):
            sampling_weights(dataset, sampling)
    with pytest.raises(RuntimeError, match="probability"):
        Order(4, 0, weights=torch.tensor([1, 2, -1, 0], dtype=torch.float64)).epoch(0)
    with pytest.raises(ValueError, match="negative"):
        sampling_weights(own(targets=[0, 1, -100, 1]), "balanced")
