"""The loader that gives one rank its parts of every global batch, on its device."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.in_memory import InMemoryDataset
from lockstep.data.partition import Batch, LoadedPart, Part, generator
from lockstep.data.workers import DatasetReader

# Values of samples that are looked up and converted together. Step by step, the calls cost more than their work.
VALUES_AT_ONCE = 2**20

RawGroup = tuple[Tensor, Tensor, list[int]]
"""Raw samples, targets, and how many of them belong to each share."""


class Converter:
    """Brings raw samples and targets to the device, type and memory layout that a model computes in.

    uint8 samples are scaled to 0..1. With `mean` and `std`, one number for each channel (the second dimension) or one
    for all, samples are normalised. Integer samples of another type stay as they are. Floating-point targets take the
    model's type.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
    ) -> None:
        self.device, self.dtype, self.memory_format = device, dtype, memory_format
        deviation = self._per_channel([1.0] if std is None else std)
        self.float_scale, self.image_scale = 1 / deviation, 1 / (255 * deviation)
        self.shift = None if mean is None else -self._per_channel(mean) / deviation

    def _per_channel(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(list(values), dtype=self.dtype, device=self.device)

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on the device. A GPU copies from pinned memory while the host goes on."""
        if tensor.device == self.device:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def __call__(self, samples: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Raw samples (N, ...) and targets (N, ...), on the device -> what the model and the task take."""
        if samples.dtype == torch.uint8:
            samples = self._shifted(samples.to(self.dtype).mul_(_beside(self.image_scale, samples)))
        elif samples.is_floating_point():
            samples = samples.to(self.dtype)
            if self.shift is not None:
                samples = self._shifted(samples * _beside(self.float_scale, samples))
        if targets.is_floating_point():
            targets = targets.to(self.dtype)
        if samples.dim() == 4:
            samples = samples.contiguous(memory_format=self.memory_format)
        return samples, targets

    def _shifted(self, scaled: Tensor) -> Tensor:
        return scaled if self.shift is None else scaled.add_(_beside(self.shift, scaled))


def _beside(values: Tensor, samples: Tensor) -> Tensor:
    """One number per channel (C,), shaped so that it broadcasts over samples (N, C, ...)."""
    return values.view(-1, *[1] * (samples.dim() - 2))


class BatchLoader:
    """Loads one rank's samples: `epoch` for training, `eval_batches` for evaluation.

    rank, size: this rank's share, and how many shares there are. parts: cuts a global batch into this rank's parts.
    workers: processes that read a data set which is not in memory. They start here.
    """

    def __init__(
        self,
        dataset: Any,
        converter: Converter,
        rank: int,
        size: int,
        seed: int,
        augment: Augment | None = None,
        workers: int = 0,
    ) -> None:
        self.converter, self.rank, self.size, self.seed = converter, rank, size, seed
        self.augment = augment or Augment()
        self.dataset = dataset
        self.index_device = torch.device("cpu")
        self.reader: DatasetReader | None = None
        if isinstance(dataset, InMemoryDataset):
            self.index_device = converter.device
            self.dataset = InMemoryDataset(dataset.samples.to(converter.device), dataset.targets.to(converter.device))
        else:
            self.reader = DatasetReader(dataset, workers, pin_memory=converter.device.type == "cuda")

    def __len__(self) -> int:
        return len(self.dataset)

    def close(self) -> None:
        """End the worker processes."""
        if self.reader is not None:
            self.reader.close()

    def epoch(
        self,
        epoch: int,
        batch_size: int,
        parts: Callable[[Tensor], list[Part]],
        skip: int = 0,
        turns: slice = slice(None),
    ) -> Iterator[Batch]:
        """This rank's batches of one epoch; over all ranks every sample comes once.

        batch_size counts the samples of all ranks. parts: which parts of a global batch of indices (N,) are this
        rank's. skip: samples used before the run was resumed. turns: which of the batches, if ranks take turns.
        """
        order = torch.randperm(len(self), generator=generator(self.seed, epoch)).to(self.index_device)
        starts = range(skip, len(self), batch_size)[turns]
        batches = [order[start : start + batch_size] for start in starts]
        mine = [parts(batch) for batch in batches]
        plans = self._plans(epoch, starts, batches, parts) if self.augment.enabled else None
        loaded = self._load([part.indices for batch_parts in mine for part in batch_parts], plans)
        for batch, batch_parts in zip(batches, mine, strict=True):
            yield Batch(len(batch), [LoadedPart(part.number, *next(loaded), part.indices) for part in batch_parts])

    def _plans(
        self, epoch: int, starts: range, batches: list[Tensor], parts: Callable[[Tensor], list[Part]]
    ) -> Iterator[Tensor]:
        """The augmentation of each of this rank's parts: drawn for the global batch, cut as the batch is cut."""
        for start, batch in zip(starts, batches, strict=True):
            plan = self.augment.plan(len(batch), generator(self.seed, epoch, start))
            for part in parts(torch.arange(len(batch))):
                yield plan[part.indices]

    def eval_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) of at most `batch_size` samples; over all ranks every sample comes once.

        Every rank gets equally many batches, perhaps with an empty last one: ranks may have to compute together.
        """
        mine = torch.arange(len(self), device=self.index_device)[self.rank :: self.size]
        rounds = -(-len(self) // (self.size * batch_size))
        yield from self._load([mine[number * batch_size : (number + 1) * batch_size] for number in range(rounds)])

    def _load(self, shares: list[Tensor], plans: Iterator[Tensor] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs and targets of each share of indices, in order, augmented by its plan."""
        raw = read_memory(self.dataset, shares) if self.reader is None else read_dataset(self.reader, shares)
        for samples, targets, sizes in raw:
            samples, targets = self.converter.to_device(samples), self.converter.to_device(targets)
            if plans is not None:
                plan = torch.cat([next(plans) for _ in sizes])
                samples = self.augment(samples, self.converter.to_device(plan))
            samples, targets = self.converter(samples, targets)
            yield from zip(samples.split(sizes), targets.split(sizes), strict=True)


def read_memory(dataset: InMemoryDataset, shares: list[Tensor]) -> Iterator[RawGroup]:
    """Several shares at once, from a data set in memory."""
    values_per_sample = dataset.samples.shape[1:].numel()
    largest = max(map(len, shares), default=0)
    at_once = max(1, VALUES_AT_ONCE // max(1, largest * values_per_sample))
    for first in range(0, len(shares), at_once):
        group = shares[first : first + at_once]
        indices = torch.cat(group)
        # index_select copies whole rows; samples[indices] copies value by value and takes five times as long.
        samples, targets = dataset.samples.index_select(0, indices), dataset.targets.index_select(0, indices)
        yield samples, targets, [len(share) for share in group]


def read_dataset(reader: DatasetReader, shares: list[Tensor]) -> Iterator[RawGroup]:
    """Share by share, from a data set that loads its samples one by one."""
    # An empty share has nothing to collate. Sample 0 stands in, to give the shape, and none of it is kept.
    batches = [share.tolist() or [0] for share in shares]
    for share, (samples, targets) in zip(shares, reader.read(batches), strict=True):
        yield samples[: len(share)], targets[: len(share)], [len(share)]
