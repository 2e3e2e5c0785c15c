"""The loader: the same global batches at any world size, every sample evaluated once, data sets of every kind."""

import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.data import loader as loader_module
from lockstep.data.builtin import digits
from lockstep.data.dataset import InMemoryDataset
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import Part, generator, micro_batch_parts
from lockstep.data.transforms import Augment
from support.commands import wait_for
from support.worlds import in_world


class Numbers(torch.utils.data.Dataset):
    """Sample number n is [n], its target n. Read one at a time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index


def in_memory(count: int) -> InMemoryDataset:
    return InMemoryDataset(torch.arange(count).float().reshape(-1, 1), torch.arange(count))


def loader(dataset: Any, rank: int = 0, size: int = 1, augment: Augment | None = None, workers: int = 0) -> BatchLoader:
    converter = Converter(torch.device("cpu"), torch.float32, torch.contiguous_format, None, None)
    return BatchLoader(dataset, converter, rank, size, seed=1, augment=augment, workers=workers)


def parts(steps: int, rank: int, size: int) -> Any:
    return partial(micro_batch_parts, accumulation_steps=steps, rank=rank, size=size)


def global_batches(dataset: Any, size: int, steps: int, skip: int = 0) -> list[tuple[int, list[list[int]]]]:
    """(samples, the targets of each micro-batch over all ranks) of each batch of epoch 4."""
    each = [list(loader(dataset, rank, size).epoch(4, 10, parts(steps, rank, size), skip)) for rank in range(size)]
    batches = []
    for of_ranks in zip(*each, strict=True):
        micro_batches = zip(*[batch.parts for batch in of_ranks], strict=True)
        joined = [torch.cat([part.targets for part in micro_batch]).tolist() for micro_batch in micro_batches]
        batches.append((of_ranks[0].count, joined))
    return batches


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("at_once", [1, 9, loader_module.VALUES_AT_ONCE])
def test_ranks_parts_make_up_the_same_global_batches(
    size: int, steps: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "VALUES_AT_ONCE", at_once)
    whole = global_batches(in_memory(23), 1, steps)
    assert [count for count, _ in whole] == [10, 10, 3]  # nothing padded, nothing dropped
    assert sorted(sum((sum(rows, []) for _, rows in whole), [])) == list(range(23))
    assert global_batches(in_memory(23), size, steps) == whole
    assert global_batches(in_memory(23), size, steps, skip=10) == whole[1:]  # a resume in mid-epoch


@pytest.mark.parametrize("size", [1, 3])
def test_a_data_set_that_is_read_sample_by_sample_gives_the_same_batches(size: int) -> None:
    assert global_batches(Numbers(23), size, 2) == global_batches(in_memory(23), 1, 2)


def test_worker_processes_give_the_same_batches_and_an_empty_part_its_shape() -> None:
    reader = loader(Numbers(21), rank=1, size=2, workers=1)
    batches = list(reader.epoch(4, 10, parts(1, 1, 2)))
    assert [batch.parts[0].targets.tolist() for batch in batches] == [
        batch.parts[0].targets.tolist() for batch in loader(in_memory(21), 1, 2).epoch(4, 10, parts(1, 1, 2))
    ]
    assert batches[-1].parts[0].inputs.shape == (0, 1)  # 21 samples: the last batch has one, which rank 0 takes


class Counted(Numbers):
    """Counts what is read of it, in all processes."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.reads = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self.reads:
            self.reads.value += 1
        return super().__getitem__(index)


def test_workers_read_the_next_epoch_while_this_one_is_still_used_and_none_after_the_last() -> None:
    counted = Counted(30)
    reader = loader(counted, workers=2)
    list(reader.epoch(0, 10, parts(1, 0, 1), last_epoch=1))
    wait_for(lambda: counted.reads.value == 60, "an epoch that is read ahead")
    list(reader.epoch(1, 10, parts(1, 0, 1), last_epoch=1))
    list(reader.epoch(7, 10, parts(1, 0, 1)))
    assert counted.reads.value == 90
    reader.close()


def test_workers_read_no_other_epoch_if_ranks_take_turns() -> None:
    """The pass ends before its epoch does: the next one is of the same epoch."""
    counted = Counted(30)
    reader = loader(counted, workers=2)
    list(reader.epoch(0, 10, parts(1, 0, 1), turns=slice(0, 2), last_epoch=1))
    list(reader.epoch(0, 10, parts(1, 0, 1), skip=20, turns=slice(0, 2), last_epoch=1))
    reader.close()
    assert counted.reads.value == 30


def test_epochs_that_are_read_ahead_have_the_batches_of_any_other() -> None:
    def targets(reader: BatchLoader, epoch: int, skip: int = 0, last: int = 0) -> list[list[int]]:
        batches = reader.epoch(epoch, 10, parts(1, 0, 1), skip, last_epoch=last)
        return [batch.parts[0].targets.tolist() for batch in batches]

    reader, each = loader(Numbers(25), workers=2), loader(in_memory(25))
    assert targets(reader, 3, skip=10, last=9) == targets(each, 3, skip=10)
    assert targets(reader, 4, last=9) == targets(each, 4)
    next(reader.epoch(5, 10, parts(1, 0, 1), last_epoch=9))  # a stop in mid-epoch
    assert targets(reader, 5, last=9) == targets(each, 5)
    assert targets(reader, 2, last=9) == targets(each, 2)  # a rollback
    assert reader.raw_inputs(2).tolist() == [[0.0], [1.0]]
    assert targets(reader, 3, last=9) == targets(each, 3)
    reader.close()


def test_epochs_and_seeds_differ_in_their_order() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        reader = loader(in_memory(40))
        reader.seed = seed
        return next(reader.epoch(epoch, 40, parts(1, 0, 1))).parts[0].targets.tolist()

    orders = [order(0, 1), order(1, 1), order(0, 2)]
    assert all(sorted(one) == list(range(40)) for one in orders)
    assert len({tuple(one) for one in orders}) == 3


def test_ranks_can_take_turns_at_whole_batches() -> None:
    every = [batch.parts[0].targets.tolist() for batch in loader(in_memory(50)).epoch(0, 10, parts(1, 0, 1))]
    turns = loader(in_memory(50)).epoch(0, 10, parts(1, 0, 1), turns=slice(1, 4, 2))
    assert [batch.parts[0].targets.tolist() for batch in turns] == every[1:4:2]


def test_every_sample_is_evaluated_once_for_any_size_and_world() -> None:
    for count in range(41):
        for size in range(1, 6):
            of_ranks = [list(loader(in_memory(count), rank, size).eval_batches(7)) for rank in range(size)]
            assert len({len(batches) for batches in of_ranks}) == 1  # ranks may have to compute together
            seen = [target for batches in of_ranks for _, targets in batches for target in targets.tolist()]
            assert sorted(seen) == list(range(count))


def linear_net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def accuracies() -> list[float]:
    """Accuracies of a fixed net over the first 1..40 digits, in this world."""
    from lockstep.distributed.world import init_distributed
    from lockstep.strategies.base import Strategy
    from lockstep.strategies.gradient_sync import GradientSync
    from lockstep.tasks.classification import Classification
    from lockstep.training.meter import Meter

    data, measured = digits(train=False), []
    with init_distributed("gloo", 60) as world:
        strategy, task = Strategy(), Classification({"loss": "min", "accuracy": "max"}, "accuracy", 0.0, None, {}, None)
        strategy.setup(linear_net(), world, GradientSync())
        for count in range(1, 41):
            part = InMemoryDataset(data.samples[:count], data.targets[:count])
            meter = Meter(task, world)
            for inputs, targets in loader(part, world.rank, world.size).eval_batches(7):
                meter.add(task(strategy.module(inputs), targets)[1], len(targets))
            measured.append(meter.means()["accuracy"])
    return measured


def test_accuracy_is_the_integer_count_of_one_process() -> None:
    data = digits(train=False)
    with torch.no_grad():
        right = linear_net()(data.samples[:40].float() / 255).argmax(1) == data.targets[:40]
    counted = [correct / count for count, correct in enumerate(right.cumsum(0).tolist(), start=1)]
    for size in (1, 3):
        assert in_world(size, accuracies) == [counted] * size


def test_parts_of_a_rank_are_numbered_over_all_ranks() -> None:
    numbers = [[part.number for part in micro_batch_parts(torch.arange(9), 3, rank, 2)] for rank in range(2)]
    assert numbers == [[0, 2, 4], [1, 3, 5]]
    assert isinstance(micro_batch_parts(torch.arange(3), 1, 0, 1)[0], Part)


@pytest.mark.parametrize(("workers", "ahead"), [(0, 1), (1, 3)])
def test_batches_of_a_long_epoch_are_planned_when_they_are_needed(workers: int, ahead: int) -> None:
    """Rank 7 of 256 in an epoch of 10^7 samples. All 1221 batches in front took a second and more."""
    planned = list[int]()

    def noted(batch: Tensor) -> list[Part]:
        planned.append(len(batch))
        return micro_batch_parts(batch, 1, rank=7, size=256)

    reader = loader(Numbers(10**7), rank=7, size=256, workers=workers)
    epoch = reader.epoch(0, 8192, noted)
    first, second = next(epoch).parts[0], next(epoch).parts[0]
    assert len(planned) <= 2 + ahead
    order = torch.randperm(10**7, generator=generator(1, 0))
    for number, part in enumerate((first, second)):
        assert torch.equal(part.targets, order[8192 * number : 8192 * (number + 1)].tensor_split(256)[7])
    assert len(next(reader.eval_batches(5))[1]) == 5
    reader.close()
