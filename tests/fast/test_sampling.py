"""loader.sampling: what an epoch draws, and that every rank, resume and worker draws the same."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from lockstep.data.dataset import InMemoryDataset, weight_of_each_sample
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import drawn, generator, micro_batch_parts
from lockstep.data.transforms import Augment
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
    orders = [drawn(weights, generator(0, epoch)) for epoch in (0, 0, 1)]
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


class Listed(Noisy):
    """Samples with noise from all generators, whose classes are in a list."""

    def __init__(self) -> None:
        super().__init__(len(UNEVEN))
        self.targets = UNEVEN.tolist()
        self.sample_weights = [1.0 + number % 3 for number in range(len(UNEVEN))]

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], self.targets[index]


def in_memory() -> InMemoryDataset:
    return InMemoryDataset(torch.arange(3200, dtype=torch.float64).reshape(100, 2, 4, 4), UNEVEN)


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "in memory": (in_memory, {}),
    "in memory, augmented": (in_memory, {"augment": Augment(pad=1)}),
    "workers": (Listed, {"workers": 2}),
    "part of a data set": (lambda: Subset(Listed(), range(0, 100, 2)), {}),
}


def batches(source: str, sampling: Any, size: int, skip: int) -> list[Tensor]:
    """The inputs of each global batch of two epochs, put together from the ranks; the first epoch from `skip` on."""
    make, options = SOURCES[source]
    found = []
    for rank in range(size):
        dataset = make()
        loader = BatchLoader(
            dataset,
            Converter(torch.device("cpu"), torch.float64),
            *(rank, size),
            seed=1,
            weights=weight_of_each_sample(dataset, sampling),
            **options,
        )
        parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=size)
        epochs = [*loader.epoch(0, 16, parts, skip, last_epoch=1), *loader.epoch(1, 16, parts, last_epoch=1)]
        found.append([(batch.parts[0].indices.unsqueeze(1), batch.parts[0].inputs.flatten(1)) for batch in epochs])
        loader.close()
    return [torch.cat([torch.cat(part, 1) for part in of_ranks]) for of_ranks in zip(*found, strict=True)]


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_samples_with_the_same_noise_on_any_ranks_and_after_a_resume(source: str) -> None:
    whole = batches(source, "balanced", 1, 0)
    for size, skip in ((2, 0), (3, 32)):
        assert all(map(torch.equal, whole[skip // 16 :], batches(source, "balanced", size, skip)))
    rows = torch.cat(whole)
    if source != "in memory":  # a sample that is drawn again gets other random numbers
        assert len(rows.unique(dim=0)) > 1.5 * len(rows[:, 0].unique())


def test_balanced_draws_every_class_equally_often_and_keeps_the_length_of_an_epoch() -> None:
    rows = torch.cat(batches("workers", "balanced", 1, 0))
    counts = UNEVEN[rows[:, 0].long()].bincount()
    assert len(rows) == 200
    assert chisquare(counts).pvalue > 0.5
    weighted = torch.cat(batches("workers", "weights", 1, 0))[:, 0].long() % 3
    assert chisquare(weighted.bincount(), torch.tensor([34, 66, 99]).double() / 199 * 200).pvalue > 0.5


def own(**attributes: Any) -> Any:
    dataset = Noisy(4)
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


class Items(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ()


REFUSED = {
    "no classes": (own(), "balanced", "Noisy does not keep them; give it an attribute `targets`"),
    "numbers": (own(targets=[0.5, 1.0, 2.0, 3.0]), "balanced", "does not keep them"),
    "too few": (own(targets=[0, 1]), "balanced", "does not keep them"),
    "left out": (own(targets=[0, 1, -100, 1]), "balanced", "a whole number from 0 on"),
    "pairs": (TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2)), "balanced", "or type loader.sampling=null"),
    "stream": (Items(), "balanced", "is an IterableDataset, Items, .*; type loader.sampling=null"),
    "no weights": (own(), "weights", "no attribute `sample_weights` with 4 numbers of 0 or more"),
    "negative": (own(sample_weights=[1, 2, -1, 0]), "weights", "or type loader.sampling=balanced"),
    "not finite": (own(sample_weights=[1, 2, float("nan"), 0]), "weights", "4 numbers of 0 or more"),
    "all zero": (own(sample_weights=[0, 0, 0, 0]), "weights", "some of them above 0"),
    "too many weights": (own(sample_weights=[1] * 5), "weights", "4 numbers of 0 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_does_not_say_it_is_refused(case: str) -> None:
    dataset, sampling, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        weight_of_each_sample(dataset, sampling)
