"""The loader that gives one rank its parts of every global batch, on its device, as model and task take them."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, tee
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.augment import ShiftFlip, leaves
from lockstep.data.partition import Order, Part, fold_in, random_states_kept, seed_all
from lockstep.data.reader import EVALUATION, Request, SampleReader, batches, request_of
from lockstep.data.source import map_tensors, of_each_sample, unwrapped, without_samples
from lockstep.failures.record import heartbeat

# Values in memory that are looked up and converted together: step by step, the calls cost more than the work.
VALUES_AT_ONCE = 2**20
MIX = 5  # folded into the seed of what batch-wide transforms draw


class LoadedPart(NamedTuple):
    """The samples of one forward pass: inputs and targets (n, ...), or tuples or dicts of such, on the device.
    number, start: as of `Part`. numbers: (n,) of the samples in the data set that is read."""

    number: int
    start: int
    inputs: Any
    targets: Any
    numbers: Tensor


@dataclass(frozen=True)
class Batch:
    """One optimizer step's work for one rank. number: of the batch in its epoch. count: its samples, over all ranks.
    parts: [] is no work."""

    number: int
    count: int
    parts: list[LoadedPart]


@dataclass
class Progress:
    """How far a training is. A snapshot stores it."""

    epoch: int = 0  # whole epochs done
    samples: int = 0  # of all ranks, of the current epoch
    step: int = 0  # optimizer steps done
    ahead: int = 0  # steps by which the schedule is ahead of `step`, after a resume with another batch size
    best: float | None = None  # evaluation so far
    best_step: int | None = None
    evals_since_best: int = 0
    evaluation_pending: bool = False  # the run stopped after its last step, and before the evaluation of it
    has_drawn: bool = False  # whether a forward or backward pass has drawn random numbers
    skipped: int = 0  # updates that watch.nan=skip has left out
    skipped_in_a_row: int = 0  # since one was taken

    def advance(self, batch: Batch) -> None:
        """An optimizer step over `batch` is done."""
        self.samples += batch.count
        self.step += 1
        heartbeat.step_ended(self.epoch + 1, self.step)


class InputConverter(nn.Module):
    """Brings inputs to the type and memory layout of a model. uint8 is scaled to 0..1; other integers stay as they are.
    mean, std: a number for each channel (the second dimension), or one for all."""

    def __init__(
        self,
        dtype: torch.dtype,
        memory_format: torch.memory_format = torch.contiguous_format,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.memory_format = dtype, memory_format
        wide = torch.promote_types(dtype, torch.float32)
        self.normalises = mean is not None or std is not None
        deviation = torch.tensor(std or [1.0], dtype=wide)
        self.scale = nn.Buffer(1 / deviation, persistent=False)
        self.shift = nn.Buffer(-torch.tensor(mean or [0.0], dtype=wide) / deviation, persistent=False)

    def forward(self, inputs: Any) -> Any:
        """Raw inputs (N, ...). Among several inputs, only images (N, C, H, W) are known to have channels."""
        if isinstance(inputs, Tensor):
            return self._converted(inputs, self.normalises)
        return map_tensors(lambda one: self._converted(one, self.normalises and one.dim() == 4), inputs)

    def _converted(self, inputs: Tensor, normalises: bool) -> Tensor:
        is_image = inputs.dtype == torch.uint8
        if not is_image and not inputs.is_floating_point():
            return inputs
        layout = self.memory_format if inputs.dim() == 4 else torch.preserve_format
        values = inputs.to(self.scale.dtype, memory_format=layout)
        if normalises:
            beside = [-1, *[1] * (inputs.dim() - 2)]
            scale = (self.scale / 255 if is_image else self.scale).view(beside)
            # In place, where `values` is a copy: a new tensor of a batch costs more than the arithmetic.
            values = (values.mul_(scale) if is_image else values * scale).add_(self.shift.view(beside))
        elif is_image:
            values = values.div_(255)
        return values.to(self.dtype)

    def target(self, target: Tensor) -> Tensor:
        """Whole numbers as int64, others in the type of the model; float32 beside bfloat16, as losses are."""
        is_number = target.is_floating_point() or target.dtype == torch.bool
        return target.to(self.scale.dtype) if is_number else target.long()


@dataclass(eq=False)
class Loader:
    """Reads a data set for one rank: `batches` to train on, `evaluation` of each sample once. A data set with `gather`
    is read here, where it is, any other by `reader`. parts: (number of a batch in its epoch, its samples) -> this
    rank's parts of it. share: (rank, ranks) of an evaluation. device: what inputs and targets go to. workers: processes
    that read: those of one iterator.

    transforms: of a whole batch, such as torchvision's v2.MixUp and v2.CutMix, alike on all ranks. These take one draw
    for a batch, and mix each sample with the one before it. So all ranks are seeded alike, and each loads the sample
    before its part, too, whose row is dropped after the transform; for each of several transforms one.
    """

    reader: SampleReader
    order: Order
    converter: InputConverter
    device: torch.device
    seed: int
    batch_size: int
    parts: Callable[[int, int], Sequence[Part]]
    share: tuple[int, int] = (0, 1)
    augment: ShiftFlip | None = None
    transforms: Sequence[Callable[[Any, Any], tuple[Any, Any]]] = ()
    workers: int = 0

    def __post_init__(self) -> None:
        self.before = sum(map(leaves, self.transforms))  # samples that a part is loaded with
        whole, _ = unwrapped(self.reader.dataset)
        self.memory: Any = None
        if hasattr(whole, "gather") and not self.reader.transforms:
            self.memory = whole.to(self.device)
            values = self.memory.gather(torch.zeros(1, dtype=torch.int64))[0].numel()
            self.samples_at_once = VALUES_AT_ONCE // max(1, values)
        self.is_whole = bool(getattr(whole, "is_whole", False))  # whether all targets count, also those of tokens

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.order)

    def batches(self, progress: Progress) -> Iterator[Batch]:
        """The batches from `progress` on, without end: workers read ahead beyond the end of an epoch."""
        asked, waiting = tee(self._plan(progress.epoch, progress.samples))
        loaded = self._loaded(request for _, _, requests in asked for request in requests)
        for number, count, requests in waiting:
            yield Batch(number, count, [next(loaded) for _ in requests])

    def evaluation(self, batch_size: int) -> Iterator[LoadedPart]:
        """Parts of at most `batch_size` samples of the whole job; over all ranks each sample comes once, and every rank
        gets equally many parts, perhaps with an empty last one: ranks may have to compute together."""
        (rank, size), samples = self.share, len(self.reader)

        def requests() -> Iterator[Request]:
            for start in range(0, samples, batch_size):
                stop = min(start + batch_size, samples)
                numbers = np.arange(min(start + rank, stop), stop, size)
                yield Request(EVALUATION, start, Part(rank, start, start + len(numbers)), numbers, numbers)

        return self._loaded(requests())

    def read(self, request: Request) -> tuple[Any, Any]:
        """(inputs, targets) as model and task take them, but not augmented. In this process."""
        return self._converted(self.reader.read(request))

    def requests_at(self, epoch: int, start: int) -> list[Request]:
        """This rank's parts of the batch that begins after `start` samples of the epoch."""
        return next(self._plan(epoch, start))[2]

    def shown(self, number: int) -> Tensor:
        """The inputs of a sample as the data set and its transforms give them; an empty tensor if they are several."""
        inputs, _ = self.reader.read(request_of([number]))
        return inputs[0] if isinstance(inputs, Tensor) else torch.empty(0)

    def _plan(self, epoch: int, done: int) -> Iterator[tuple[int, int, list[Request]]]:
        """(number, samples, this rank's requests) of each batch after `done` samples of the epoch."""
        while True:
            order = self.order.epoch(epoch).numpy()
            for start in range(done, len(order), self.batch_size):
                number, count = start // self.batch_size, min(self.batch_size, len(order) - start)
                requests = []
                for part in self.parts(number, count):
                    places = np.arange(part.start - self.before, part.stop) % count + start  # and those to mix in
                    requests.append(Request(epoch, start, part, places, order[places]))
                yield number, count, requests
            epoch, done = epoch + 1, 0

    def _loaded(self, requests: Iterator[Request]) -> Iterator[LoadedPart]:
        """Each part, as model and task take it."""
        for group, raw in self._read(requests):
            inputs, targets = self._converted(raw, group)
            of_each = [(inputs, targets)]
            if len(group) > 1:
                sizes = [len(request.numbers) for request in group]
                of_each = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
            for (epoch, start, part, _, numbers), (inputs, targets) in zip(group, of_each, strict=True):
                if self.augment is not None:
                    inputs = self.augment.resized(inputs, epoch)
                for number, transform in enumerate(self.transforms):
                    with random_states_kept():
                        seed_all(fold_in(self.seed, epoch, start, MIX, number))
                        inputs, targets = transform(inputs, targets)
                if self.before:
                    inputs, targets = inputs[self.before :], targets[self.before :]
                yield LoadedPart(part.number, part.start, inputs, targets, torch.from_numpy(numbers[self.before :]))

    def _converted(self, raw: tuple[Any, Any], augmented: Sequence[Request] = ()) -> tuple[Any, Any]:
        """augmented: which parts these are, if they are to be."""
        inputs, targets = self._to_device(raw)
        if self.augment is not None and augmented:
            columns = zip(*((request.places, request.numbers) for request in augmented), strict=True)
            rows = self._to_device([torch.from_numpy(np.concatenate(column)).long() for column in columns])
            inputs = self.augment(inputs, self.seed, augmented[0].epoch, *rows)
        return self.converter(inputs), map_tensors(self.converter.target, targets)

    def _read(self, requests: Iterator[Request]) -> Iterator[tuple[list[Request], tuple[Any, Any]]]:
        """Raw inputs and targets, and of which parts they are: of several at once from memory."""
        if self.memory is not None:
            for group in self._groups(requests):
                numbers = np.concatenate([request.numbers for request in group])
                yield group, self.memory.gather(torch.from_numpy(self.reader.whole(numbers)).long())
            return
        asked, waiting = tee(requests)  # workers are some parts ahead of what is used
        read = batches(self.reader, asked, self.workers, self.device.type == "cuda")
        for request, pair in zip(waiting, read, strict=False):
            yield [request], pair if len(request.numbers) else without_samples(pair)  # one came for its shape

    def _groups(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        """Those of one epoch with at most VALUES_AT_ONCE values, one at least. The first part of an epoch is the
        largest."""
        for _, of_epoch in groupby(requests, attrgetter("epoch")):
            parts = iter(of_epoch)
            for first in parts:
                others = self.samples_at_once // max(1, len(first.numbers)) - 1
                yield [first, *islice(parts, max(0, others))]

    def _to_device(self, value: Any) -> Any:
        """By way of pinned memory, where that lets a GPU compute on."""

        def moved(tensor: Tensor) -> Tensor:
            is_copied = self.device.type == "cuda" and tensor.is_cpu
            return (tensor.pin_memory() if is_copied else tensor).to(self.device, non_blocking=True)

        return map_tensors(moved, value)


def files_of(loader: Loader) -> Sequence[str]:
    """The names of the files of images in their folder, in their order; empty for other data."""
    files = of_each_sample(loader.reader.dataset, "files")
    return [] if files is None else [*map(os.fsdecode, files.tolist())]
