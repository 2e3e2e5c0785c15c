"""The loader that gives one rank its parts of every global batch, on its device, as model and task take them."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count as numbers_from
from itertools import tee
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lockstep.data.augment import BatchWide, Places, ShiftFlip
from lockstep.data.partition import Order, Part, fold_in
from lockstep.data.reader import EVALUATION, Request, SampleReader, Stream, batches
from lockstep.data.source import map_tensors, unwrapped, without_samples

# Values in memory that are looked up and converted together: step by step, the calls cost more than the work.
VALUES_AT_ONCE = 2**20
MIX = 5  # folded into the seed of what batch-wide transforms draw


class Position(Protocol):
    """Where a training stands: after `step` steps, in `epoch`, after `samples` of it."""

    epoch: int
    samples: int
    step: int


class LoadedPart(NamedTuple):
    """The samples of one forward pass: inputs and targets (n, ...), or tuples or dicts of such, on the device.

    number, start: as of `Part`. numbers: (n,) of the samples in the data set that is read.
    """

    number: int
    start: int
    inputs: Any
    targets: Any
    numbers: Tensor


@dataclass(frozen=True)
class Batch:
    """One optimizer step's work for one rank.

    number: of the batch in its epoch. count: its samples, over all ranks. parts: [] is no work.
    """

    number: int
    count: int
    parts: list[LoadedPart]


class _Share(NamedTuple):
    """What one forward pass reads. start: samples of the epoch before the global batch. samples: of the batch.
    numbers: (n,) in the data set; with batch-wide transforms, of the sample before the part, too."""

    epoch: int
    start: int
    samples: int
    part: Part
    numbers: Tensor


class InputConverter(nn.Module):
    """Brings inputs to the type and memory layout that a model computes in.

    uint8 inputs are scaled to 0..1. With `mean` and `std`, a number for each channel (the second dimension) or one for
    all, inputs are normalised. Integers of another type stay as they are.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        dtype: torch.dtype,
        memory_format: torch.memory_format = torch.contiguous_format,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.memory_format = dtype, memory_format
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        self.normalises = mean is not None or std is not None
        deviation = torch.tensor(std or [1.0], dtype=wide)
        self.register_buffer("scale", 1 / deviation, persistent=False)
        self.register_buffer("shift", -torch.tensor(mean or [0.0], dtype=wide) / deviation, persistent=False)

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
            scale = self.scale / 255 if is_image else self.scale
            values = torch.addcmul(self.shift.view(beside), values, scale.view(beside))
        elif is_image:
            values = values / 255
        return values.to(self.dtype)

    def target(self, target: Tensor) -> Tensor:
        """Whole numbers as int64, others in the type of the model; float32 beside bfloat16, as losses are."""
        is_number = target.is_floating_point() or target.dtype == torch.bool
        return target.to(self.scale.dtype) if is_number else target.long()


class Loader:
    """Reads a data set for one rank: `batches` to train on, `evaluation` of each sample once.

    A data set with `gather` is read here, where it is, any other by `reader`.
    parts: (number of a batch in its epoch, its samples) -> this rank's parts of it.
    share: (rank, ranks) of an evaluation. device: what inputs and targets go to.
    workers: processes that read. They start with `batches` and with `evaluation`, and end with their iterators.
    """

    def __init__(
        self,
        reader: SampleReader,
        order: Order,
        converter: InputConverter,
        device: torch.device,
        seed: int,
        batch_size: int,
        parts: Callable[[int, int], Sequence[Part]],
        share: tuple[int, int] = (0, 1),
        augment: ShiftFlip | None = None,
        transforms: Sequence[BatchWide] = (),
        workers: int = 0,
    ) -> None:
        self.reader, self.order, self.converter, self.device = reader, order, converter, device
        self.seed, self.batch_size, self.parts, self.share = seed, batch_size, parts, share
        self.augment, self.transforms, self.workers = augment, transforms, workers
        self.before = sum(transform.before for transform in transforms)  # samples that a part is loaded with
        whole, indices = unwrapped(reader.dataset)
        self.indices = None if indices is None else torch.as_tensor(indices)
        self.memory: Any = None
        if hasattr(whole, "gather") and not reader.transforms:
            self.memory = whole.to(device)
            one = self.memory.gather(torch.zeros(1, dtype=torch.int64))[0]
            self.values, self.is_here = one.numel(), one.device == device
        self.is_stream = isinstance(reader.dataset, Stream)
        self.is_whole = bool(getattr(whole, "is_whole", False))  # whether all targets count, also those of tokens

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.order)

    def batches(self, position: Position) -> Iterator[Batch]:
        """The batches from `position` on, without end: workers read ahead beyond the end of an epoch."""
        asked, waiting = tee(self._plan(position))
        loaded = self._loaded(share for _, _, shares in asked for share in shares)
        for number, count, shares in waiting:
            yield Batch(number, count, [next(loaded) for _ in shares])

    def evaluation(self, batch_size: int) -> Iterator[LoadedPart]:
        """Parts of at most `batch_size` samples of the whole job; over all ranks each sample comes once, and every rank
        gets equally many parts, perhaps with an empty last one: ranks may have to compute together."""
        (rank, size), samples = self.share, len(self.reader)

        def shares() -> Iterator[_Share]:
            for start in range(0, samples, batch_size):
                stop = min(start + batch_size, samples)
                numbers = torch.arange(min(start + rank, stop), stop, size)
                yield _Share(EVALUATION, start, len(numbers), Part(rank, start, start + len(numbers)), numbers)

        return self._loaded(shares())

    def read(self, numbers: Tensor, epoch: int = EVALUATION) -> tuple[Tensor, Any, Any]:
        """(their numbers in the whole data set, inputs, targets) of these samples (n,), as model and task take them,
        but not augmented. In this process."""
        inputs, targets = self._to_device(self.raw(numbers, epoch))
        return self.whole(numbers), self.converter(inputs), map_tensors(self.converter.target, targets)

    def numbers_at(self, epoch: int, start: int) -> list[Tensor]:
        """Of the samples in each of this rank's parts of the batch that begins after `start` samples of the epoch."""
        order, count = self.order.epoch(epoch), min(self.batch_size, len(self) - start)
        return [order[start + part.start : start + part.stop] for part in self.parts(start // self.batch_size, count)]

    def whole(self, numbers: Tensor) -> Tensor:
        """The numbers that these samples (n,) have in the whole data set, of which this may be a part."""
        return numbers if self.indices is None else self.indices.index_select(0, numbers)

    def raw(self, numbers: Tensor, epoch: int = EVALUATION) -> tuple[Any, Any]:
        """(inputs, targets) of these samples (n,), as the data set and its transforms give them."""
        return self.reader.read(Request(epoch, 0, numbers.numpy(force=True)))

    def shown(self, number: int) -> Tensor:
        """The inputs of a sample as `raw` gives them; an empty tensor if they are several."""
        inputs, _ = self.raw(torch.tensor([number]))
        return inputs[0] if isinstance(inputs, Tensor) else torch.empty(0)

    def _plan(self, position: Position) -> Iterator[tuple[int, int, list[_Share]]]:
        """(number, samples, this rank's shares) of each batch."""
        skip, samples = position.samples, len(self)
        for epoch in numbers_from(position.epoch):
            order = self.order.epoch(epoch)
            for start in range(skip, samples, self.batch_size):
                number, count = start // self.batch_size, min(self.batch_size, samples - start)
                shares = [self._share(epoch, start, count, part, order) for part in self.parts(number, count)]
                yield number, count, shares
            skip = 0

    def _share(self, epoch: int, start: int, count: int, part: Part, order: Tensor) -> _Share:
        if self.transforms:
            return _Share(epoch, start, count, part, order.index_select(0, self._places(start, count, part)))
        numbers = order[start + part.start : start + part.stop]
        return _Share(epoch, start, count, part, numbers.clone())  # a slice would keep all of the order

    def _places(self, start: int, count: int, part: Part) -> Tensor:
        """(n,) of the samples of a part in their epoch. Batch-wide transforms mix in those before it."""
        first = part.start - self.before
        return torch.arange(first, part.stop) % count + start

    def _loaded(self, shares: Iterator[_Share]) -> Iterator[LoadedPart]:
        """Each share, as model and task take it."""
        for group, raw in self._read(shares):
            inputs, targets = self._to_device(raw)
            is_training = group[0].epoch != EVALUATION
            if self.augment is not None and is_training:
                inputs = self.augment(inputs, self._where(group))
            inputs, targets = self.converter(inputs), map_tensors(self.converter.target, targets)
            sizes = [share.numbers.shape[0] for share in group]
            of_each = [(inputs, targets)]
            if len(group) > 1:
                of_each = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
            for share, pair in zip(group, of_each, strict=True):
                found = self._mixed(share, *pair) if is_training else pair
                yield LoadedPart(share.part.number, share.part.start, *found, share.numbers)

    def _where(self, group: Sequence[_Share]) -> Places:
        first, numbers = group[0], torch.cat([share.numbers for share in group])
        places = torch.cat([self._places(share.start, share.samples, share.part) for share in group])
        return Places(self.seed, first.epoch, first.start, len(self.reader), *self._to_device((places, numbers)))

    def _mixed(self, share: _Share, inputs: Any, targets: Any) -> tuple[Any, Any]:
        if self.augment is not None:
            inputs = self.augment.resized(inputs, share.epoch)
        for number, transform in enumerate(self.transforms):
            inputs, targets = transform(inputs, targets, fold_in(self.seed, share.epoch, share.start, MIX, number))
        return (inputs[self.before :], targets[self.before :]) if self.before else (inputs, targets)

    def _read(self, shares: Iterator[_Share]) -> Iterator[tuple[list[_Share], tuple[Any, Any]]]:
        """Raw inputs and targets, and of which shares they are: of several at once from memory."""
        if self.memory is not None:
            yield from self._from_memory(shares)
            return
        asked, waiting = tee(shares)  # workers are some shares ahead of what is used
        requests = (self._request(share) for share in asked)
        read = batches(self.reader, requests, self.workers, self.device.type == "cuda")
        for share, pair in zip(waiting, read, strict=False):
            if not len(share.numbers):  # a sample came for its shape
                pair = without_samples(pair)
            yield [share], pair

    def _request(self, share: _Share) -> Request:
        is_drawn = self.order.repeats and share.epoch != EVALUATION
        draws = self._places(share.start, share.samples, share.part).numpy() if is_drawn else None
        return Request(share.epoch, share.start, share.numbers.numpy(), draws)

    def _from_memory(self, shares: Iterator[_Share]) -> Iterator[tuple[list[_Share], tuple[Tensor, Tensor]]]:
        groups = self._groups(shares)
        if self.is_here or self.device.type != "cuda":
            for group in groups:
                yield group, self._gathered(group)
            return
        with ThreadPoolExecutor(1) as thread:  # host memory: gathered and pinned while the GPU computes
            waiting = deque[tuple[list[_Share], Future[tuple[Tensor, Tensor]]]]()
            for group in groups:
                waiting.append((group, thread.submit(self._pinned, group)))
                if len(waiting) > 1:
                    now, pair = waiting.popleft()
                    yield now, pair.result()
            for now, pair in waiting:
                yield now, pair.result()

    def _gathered(self, group: Sequence[_Share]) -> tuple[Tensor, Tensor]:
        numbers = group[0].numbers if len(group) == 1 else torch.cat([share.numbers for share in group])
        inputs, targets = self.memory.gather(self.whole(numbers).long())
        return inputs, targets

    def _pinned(self, group: Sequence[_Share]) -> tuple[Tensor, Tensor]:
        inputs, targets = self._gathered(group)
        return inputs.pin_memory(), targets.pin_memory()

    def _groups(self, shares: Iterator[_Share]) -> Iterator[list[_Share]]:
        """Shares of one epoch with at most VALUES_AT_ONCE values, one at least."""
        most = VALUES_AT_ONCE // max(1, self.values)
        group, samples = list[_Share](), 0
        for share in shares:
            if group and (samples + share.numbers.shape[0] > most or share.epoch != group[0].epoch):
                yield group
                group, samples = [], 0
            group.append(share)
            samples += share.numbers.shape[0]
        if group:
            yield group

    def _to_device(self, value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), value)


def files_of(loader: Loader) -> Sequence[str]:
    """The names of the files of images in their folder, in their order; empty for other data."""
    whole, _ = unwrapped(loader.reader.dataset)
    files = getattr(whole, "files", None)
    if files is None:  # the folders of torchvision
        samples, root = getattr(whole, "samples", ()), getattr(whole, "root", None)
        are_files = root is not None and all(isinstance(sample, tuple) for sample in samples[:1])
        files = [os.path.relpath(path, root) for path, _ in samples] if are_files else []
    names = [os.fsdecode(name) for name in files]
    return names if loader.indices is None or not names else [names[number] for number in loader.indices.tolist()]
