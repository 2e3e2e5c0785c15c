"""Batches are the same on any number of ranks, with workers, in micro-batches, and after a stop in mid-epoch."""

import random
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset
from torchvision.transforms import v2

from lockstep.data import loader as loader_module
from lockstep.data.augment import BatchWide, ShiftFlip
from lockstep.data.loader import Batch, InputConverter
from lockstep.data.partition import Order, fold_in
from lockstep.data.source import Tensors
from support.loaders import BATCH, SEED, Position, loader

SAMPLES = 103  # the last batch of an epoch has 3 samples: fewer than ranks times micro-batches


class Drawing(Dataset[Any]):
    """Each sample draws from all three generators."""

    def __init__(self, memory: Tensors) -> None:
        self.memory = memory

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, index: int) -> Any:
        image, target = self.memory[index]
        return image.float() / 255 + torch.rand(()) + np.random.rand() + random.random(), int(target)


def images(count: int = SAMPLES) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=draw)
    return Tensors(pixels, torch.randint(0, 10, (count,), generator=draw))


def train(data: Any, size: int = 1, start: tuple[int, int] = (0, 0), batches: int = 7, **options: Any) -> list[Any]:
    """What all ranks get of so many batches: (number, samples, inputs, targets), in the order of the global batch."""
    if options.pop("augment", False):
        options["augment"] = ShiftFlip(pad=2, flip="alternating", sizes=None, epochs=2)
    if options.pop("mixes", False):
        options["transforms"] = [BatchWide(v2.MixUp(alpha=1.0, num_classes=10))]
    ranks: list[list[Batch]] = []
    for rank in range(size):
        ranks.append(list(islice(loader(data, rank, size, **options).batches(Position(*start)), batches)))
    found = []
    for of_ranks in zip(*ranks, strict=True):
        loaded = sorted((part for batch in of_ranks for part in batch.parts), key=lambda part: part.number)
        inputs, targets = (torch.cat([getattr(part, name) for part in loaded]) for name in ("inputs", "targets"))
        assert [part.start for part in loaded] == sorted(part.start for part in loaded)
        found.append((of_ranks[0].number, of_ranks[0].count, inputs, targets))
    return found


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert [batch[:2] for batch in one] == [batch[:2] for batch in other]
    for (_, count, *first), (_, _, *second) in zip(one, other, strict=True):
        assert len(first[0]) == count
        assert all(a.equal(b) for a, b in zip(first, second, strict=True))


ORDERS: dict[str, dict[str, Any]] = {
    "memory": {},
    "part of memory": {},
    "read": {},
    "shards": {"shards": torch.arange(SAMPLES) // 20, "window": 30},
    "weights": {"weights": torch.rand(SAMPLES, generator=torch.Generator().manual_seed(1)).double()},
    "draws": {"draws": 60},
}


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("changes", ["", "mixes", "augment mixes"])
def test_same_bits_on_any_ranks_in_any_parts_and_after_a_stop(kind: str, changes: str) -> None:
    part = Subset(images(), list(range(0, SAMPLES, 2)))
    data: Any = {"memory": images(), "part of memory": part}.get(kind, Drawing(images()))
    options = ORDERS[kind] | dict.fromkeys(changes.split(), True)
    one = train(data, **options)
    for size, micro in ((1, 3), (3, 2)):
        assert_same(one, train(data, size, micro=micro, **options))
    assert_same(one[2:], train(data, 2, (0, 2 * BATCH), 5, micro=2, **options))
    if kind == "weights" and not changes:
        assert_same(one, train(data, 2, workers=1, **options))


@pytest.mark.parametrize("at_once", [1, 60, 2**20])
def test_an_epoch_has_each_sample_once_normalised(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """at_once: samples that are looked up together."""
    monkeypatch.setattr(loader_module, "VALUES_AT_ONCE", at_once * 192)
    memory = images()
    batches = train(memory, 2, batches=5)
    assert [batch[:2] for batch in batches] == [(0, 25), (1, 25), (2, 25), (3, 25), (4, 3)]  # none padded, none dropped
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(fold_in(SEED, 0)))
    expected = (memory.inputs[order].double() / 255 - 0.4) / 0.2
    torch.testing.assert_close(torch.cat([batch[2] for batch in batches]), expected, rtol=0, atol=1e-14)
    assert torch.cat([batch[3] for batch in batches]).equal(memory.targets[order])


def test_files_are_shuffled_and_samples_within_windows_of_files() -> None:
    shards = torch.arange(1000) // 50
    order = Order(1000, 1, shards=shards, window=120).epoch(0)
    assert order.sort().values.equal(torch.arange(1000))
    windows = [shards[rows].unique() for rows in order.split(150)]  # the first files that hold 120 samples or more
    assert [len(files) for files in windows] == [3] * 6 + [2]
    assert torch.cat(windows).sort().values.equal(torch.arange(20))
    assert not torch.cat(windows).equal(torch.arange(20))
    assert (shards[order].diff() != 0).sum() > 400


@pytest.mark.parametrize("is_read", [True, False])
def test_every_sample_is_evaluated_once_for_any_size_and_world(is_read: bool) -> None:
    for count, size in product((1, 6, 7, 8, 22), (1, 2, 4)):
        memory = Tensors(torch.zeros(count, 1), torch.arange(count))
        data: Any = [memory[number] for number in range(count)] if is_read else memory
        of_ranks = [list(loader(data, rank, size, mean=None).evaluation(7)) for rank in range(size)]
        assert len({len(found) for found in of_ranks}) == 1  # ranks may have to compute together
        loaded = [part for found in of_ranks for part in found]
        assert all(part.inputs.shape[1:] == (1,) for part in loaded)  # an empty part has its shape
        assert sorted(torch.cat([part.targets for part in loaded]).tolist()) == list(range(count))
        assert all(part.numbers.equal(part.targets) for part in loaded)


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 3), (5, 3, 7)])
def test_inputs_are_scaled_normalised_by_channel_and_brought_to_the_type_of_the_model(shape: tuple[int, ...]) -> None:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    means, stds = (torch.tensor(values, dtype=torch.double).view(-1, *[1] * (len(shape) - 2)) for values in (mean, std))
    scaled = pixels.double() / 255
    for samples in (pixels, scaled, scaled.float()):  # floats are not scaled
        for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
            layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            found = InputConverter(dtype, layout, mean, std)(samples)
            assert (found.dtype, found.is_contiguous(memory_format=layout)) == (dtype, True)
            exact = (scaled - means) / stds
            limit = max(limit, 1e-6) if samples.dtype == torch.float32 else limit
            assert ((found.double() - exact).abs() <= limit * exact.abs().clamp(min=1)).all()
        limit = 1e-6 if samples.dtype == torch.float32 else 1e-14
        torch.testing.assert_close(InputConverter(torch.float64)(samples), scaled, rtol=0, atol=limit)
        torch.testing.assert_close(InputConverter(torch.float64, std=std)(samples), scaled / stds, rtol=0, atol=limit)
