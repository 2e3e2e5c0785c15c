"""The loader that gives one rank its parts of every global batch, on its device, as model and task take them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.data.dataset import (
    InMemoryDataset,
    count_samples,
    map_tensors,
    numbers_of,
    on_device,
    tensors_in,
    whole_of,
)
from lockstep.data.partition import Batch, LoadedPart, Part, drawn, fold_in, generator, seeded
from lockstep.data.samples import EVALUATION, Key, Samples
from lockstep.data.transforms import Augment, BatchTransform, BatchTransforms
from lockstep.data.workers import DatasetReader
from lockstep.errors import ConfigError

# Values of samples in memory that are looked up and converted together. Step by step, the calls cost more than their
# work.
VALUES_AT_ONCE = 2**20


class _Share(NamedTuple):
    """Samples that one forward pass of this rank reads. The fields below `indices` are of a training only.

    start: samples of the epoch before the global batch.
    augmentation: their rows of the augmentation's plan, which is drawn for the global batch and cut as the batch is.
    plans: their rows of the plan of each batch transform.
    draws: their places in the epoch, where samples are drawn: a sample that is drawn twice has other random numbers.
    part: the samples that the pass uses: a batch transform may mix in others.
    batch_samples: of the global batch, over all ranks.
    ends_batch: whether this is the last part that the rank has of the batch.
    """

    epoch: int
    indices: Tensor
    start: int = 0
    augmentation: Tensor | None = None
    plans: Sequence[Tensor] = ()
    draws: Tensor | None = None
    part: Part | None = None
    batch_samples: int = 0
    ends_batch: bool = False


class BatchLoader:
    """Loads one rank's samples: `epoch` for training, `eval_batches` for evaluation.

    dataset: tensors in memory, or `Samples`, or any other map-style data set.
    rank, size: this rank's share of an evaluation, and how many shares there are; what it trains on, `epoch` is told.
    augment, transforms: of training batches.
    workers: processes that read a data set which is not in memory. They start here.
    weights: (N,) by which an epoch draws its samples, see `partition.drawn`; None: each sample comes once.
    """

    def __init__(
        self,
        dataset: Any,
        converter: "Converter",
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        augment: Augment | None = None,
        workers: int = 0,
        transforms: Sequence[BatchTransform] = (),
        weights: Tensor | None = None,
    ) -> None:
        self.weights = weights
        self.converter, self.rank, self.size, self.seed = converter, rank, size, seed
        self.augment, self.transforms = augment or Augment(), BatchTransforms(transforms)
        self.dataset = dataset
        self.first_flips = self.augment.first_flips(dataset, seed)
        self.index_device = torch.device("cpu")
        self.reader: DatasetReader | None = None
        self.is_stream = False  # whether samples come in the data set's own order
        self.leaves_out = False  # whether an evaluation may miss samples, which cannot be read
        self.reads_ahead = False  # whether workers go on with the next epoch while this one is still used
        # What the workers read ahead: the arguments of the call of `epoch` that will use it, and its batches.
        self._ahead: tuple[tuple[int, int, int, slice], Iterator[Batch]] | None = None
        if isinstance(dataset, InMemoryDataset):
            self.dataset = dataset.to(converter.device)
            self.index_device = self.dataset.samples.device
            if self.first_flips is not None:
                self.first_flips = self.first_flips.to(self.index_device)
            return
        samples = dataset if isinstance(dataset, Samples) else Samples(dataset, seed=seed)
        self.leaves_out = samples.skips
        self.dataset = samples.dataset
        self.is_stream = samples.stream is not None
        self.samples = samples
        self.reader = DatasetReader(samples, workers, pin_memory=converter.device.type == "cuda")
        self.reads_ahead = workers > 0 and not self.is_stream

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self.dataset.epoch_samples if isinstance(self.dataset, InMemoryDataset) else len(self.dataset)

    def numbers_of(self, indices: Tensor) -> Tensor:
        """The numbers that samples (N,) have in the whole data set, of which this may be a part."""
        numbers = numbers_of(self.dataset)
        return indices if numbers is None else numbers.to(indices.device)[indices].long()

    @property
    def evaluated(self) -> range:
        """The numbers of the samples that an evaluation takes: those of an epoch may be drawn from more."""
        return self.dataset.evaluated if isinstance(self.dataset, InMemoryDataset) else range(len(self.dataset))

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
        last_epoch: int = 0,
    ) -> Iterator[Batch]:
        """This rank's batches of one epoch; over all ranks every sample of the epoch comes once, or as it was drawn.

        batch_size: of the samples of all ranks.
        parts: which parts of a global batch of indices (N,) are this rank's.
        skip: samples used before the run was resumed.
        turns: which of the batches, if ranks take turns.
        last_epoch: the number of the last epoch that will be asked for. Workers go on with the epochs up to it.
        """
        call, steps = (epoch, batch_size, skip, turns), len(range(skip, len(self), batch_size)[turns])
        # A pass over some turns can end before its epoch does, so the next epoch is not read ahead.
        reads_on = self.reads_ahead and turns == slice(None) and epoch < last_epoch
        if self._ahead is not None and self._ahead[0] == call:
            batches = self._ahead[1]
        else:
            epochs = range(epoch, last_epoch + 1 if reads_on else epoch + 1)
            batches = self._batches(self._shares(epochs, batch_size, parts, skip, turns))
        self._ahead = None
        for step, batch in enumerate(islice(batches, steps), start=1):
            if step == steps and reads_on:
                self._ahead = (epoch + 1, batch_size, 0, turns), batches
            yield batch

    def _batches(self, shares: Iterator[_Share]) -> Iterator[Batch]:
        """The batches that these shares make up, one after the other."""
        parts: list[LoadedPart] = []
        for share, inputs, targets in self._load(shares):
            assert share.part is not None
            parts.append(LoadedPart(share.part.number, share.part.start, inputs, targets, share.part.indices))
            if share.ends_batch:
                yield Batch(share.batch_samples, parts)
                parts = []

    def _shares(
        self, epochs: range, batch_size: int, parts: Callable[[Tensor], list[Part]], skip: int, turns: slice
    ) -> Iterator[_Share]:
        """What this rank reads in these epochs. skip: samples of the first one that were used before."""
        for epoch in epochs:
            order = self._order(generator(self.seed, epoch))
            for start in range(skip if epoch == epochs[0] else 0, len(self), batch_size)[turns]:
                # A slice of a tensor would keep all of it in memory.
                batch = order[start : start + batch_size].clone().to(self.index_device)
                yield from self._shares_of_batch(batch, epoch, start, parts)
            del order  # before the next one takes as much memory

    def _shares_of_batch(
        self, batch: Tensor, epoch: int, start: int, parts: Callable[[Tensor], list[Part]]
    ) -> Iterator[_Share]:
        """batch: indices (N,) of a global batch, before which come `start` samples of its epoch."""
        count, numbers = len(batch), (self.seed, epoch, start)
        mine = [part._replace(indices=part.indices.clone()) for part in parts(batch)]  # a slice would keep all of it
        if not self.augment.moves and not self.transforms:
            for part in mine:
                draws = self._draws(start + part.start + torch.arange(len(part.indices)))
                yield _Share(epoch, part.indices, start, None, (), draws, part, count, part is mine[-1])
            return
        augmentation = self.augment.plan(count, generator(*numbers), epoch) if self.augment.moves else None
        plans = self.transforms.plans(count, *numbers)
        for part, in_batch in zip(mine, parts(torch.arange(count)), strict=True):
            places = self.transforms.with_samples_before(in_batch.indices, count)
            rows = None if augmentation is None else augmentation[places]
            of_plans = [plan[places] for plan in plans]
            draws, indices = self._draws(start + places), batch[on_device(places, batch.device)]
            yield _Share(epoch, indices, start, rows, of_plans, draws, part, count, part is mine[-1])

    def _draws(self, places: Tensor) -> Tensor | None:
        return None if self.weights is None else places

    def _order(self, generator: torch.Generator) -> Any:
        """The indices of an epoch's samples, in their order: a tensor, or of what slices are tensors.

        A map-style data set may have a method `epoch_order(generator, numbers)` with an order of its own, where
        `numbers` are those of the samples in a part of it, None for all.
        """
        if self.weights is not None:
            return drawn(self.weights, generator)
        if isinstance(self.dataset, InMemoryDataset):
            return self.dataset.epoch_order(generator).to(self.index_device)
        if self.is_stream:
            return torch.arange(len(self))
        whole = whole_of(self.dataset)
        if hasattr(whole, "epoch_order"):
            numbers = numbers_of(self.dataset)
            return whole.epoch_order(generator, None if numbers is None else numbers.long())
        return torch.randperm(len(self), generator=generator)

    def evaluation_draws(self) -> AbstractContextManager[None]:
        """In the block a model draws in an evaluation whatever was drawn before: a stop changes nothing."""
        return seeded(fold_in(self.seed, EVALUATION, self.rank))

    def eval_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) of at most `batch_size` samples; over all ranks every sample comes once.

        Every rank gets equally many batches, perhaps with an empty last one: ranks may have to compute together.
        """
        for _, inputs, targets in self._load(_Share(EVALUATION, indices) for indices in self.eval_shares(batch_size)):
            yield inputs, targets

    def eval_shares(self, batch_size: int) -> Iterator[Tensor]:
        """The numbers of the samples of each of `eval_batches`."""
        return map(self._indices, self.eval_numbers(batch_size))

    def eval_numbers(self, batch_size: int) -> Iterator[range]:
        """As `eval_shares`, as ranges."""
        together, numbers = self.size * batch_size, self.evaluated
        for first in range(0, len(numbers), together):
            yield numbers[first : first + together][self.rank :: self.size]

    def first_sample(self) -> tuple[Any, Any]:
        """(inputs, targets) of sample 0 as a batch of one, as the model and the task would take them."""
        _, inputs, targets = self.read(self._indices(range(1)))
        return inputs, targets

    def read(self, indices: Tensor, epoch: int = EVALUATION) -> tuple[Tensor, Any, Any]:
        """(numbers, inputs, targets) of the samples with these numbers (N,), without augmentation, for messages.

        It reads in this process, also while another pass goes on. Samples that cannot be read may be missing.
        """
        if self.reader is None:
            _, inputs, targets = next(self._load([_Share(epoch, indices)]))
            return self.numbers_of(indices), inputs, targets
        read = self.samples.read([(epoch, number) for number in indices.tolist()])
        collated = self.samples.collate(read)
        if isinstance(collated, ConfigError):
            raise collated
        inputs, targets = map(self.converter.to_device, collated)
        return torch.tensor(read.numbers[: read.kept]), *self.converter(inputs, targets)

    def raw_inputs(self, count: int, epoch: int = EVALUATION) -> Any:
        """Inputs of the first samples, at most `count`, as the data set and its transforms give them."""
        share = _Share(epoch, self._indices(range(min(count, len(self)))))
        return next(self._raw([share]))[0]

    def shown_sample(self, number: int) -> Tensor:
        """The inputs of a sample as the data set has them; an empty tensor if they are several."""
        if isinstance(self.dataset, InMemoryDataset):
            inputs, _ = self.dataset.one(number)
            return inputs[0]
        inputs, _ = self.samples.one(number)
        return inputs[0] if isinstance(inputs, Tensor) else torch.empty(0)

    def _indices(self, numbers: range) -> Tensor:
        return torch.arange(numbers.start, numbers.stop, numbers.step, device=self.index_device)

    def _load(self, shares: Iterable[_Share]) -> Iterator[tuple[_Share, Any, Any]]:
        """Each share, in order, with its inputs and targets as model and task take them."""
        read, waiting = tee(shares)  # what is read is some shares ahead of what is used
        for samples, targets, sizes in self._raw(read):
            group = list(islice(waiting, len(sizes)))
            plans = [share.augmentation for share in group if share.augmentation is not None]
            samples, targets = self.converter.to_device(samples), self.converter.to_device(targets)
            if plans:
                plan = self.converter.to_device(torch.cat(plans))
                if self.first_flips is not None:
                    first = self.first_flips[torch.cat([share.indices for share in group])]
                    plan[:, 2] ^= self.converter.to_device(first)
                targets = self.augment.move_with(samples, targets, plan)
                samples = self.augment(samples, plan)
            samples, targets = self.converter(samples, targets)
            if len(sizes) == 1:
                of_shares = [(samples, targets)]
            else:
                of_shares = list(zip(samples.split(sizes), targets.split(sizes), strict=True))
            for share, (inputs, labels) in zip(group, of_shares, strict=True):
                if share.part is not None:
                    inputs = self.augment.resized(inputs, labels, share.epoch)
                if share.plans:
                    inputs, labels = self.transforms(inputs, labels, share.plans)
                yield share, inputs, labels

    def _raw(self, shares: Iterable[_Share]) -> Iterator[tuple[Any, Any, list[int]]]:
        """Raw inputs and targets of one share or several after the other, and how many belong to each of them.

        Several at once come from memory only. The workers drop what they read ahead.
        """
        self._ahead = None
        if self.reader is None:
            return self._raw_from_memory(iter(shares))
        return ((inputs, targets, [count_samples(targets)]) for inputs, targets in self.reader.read(map(_keys, shares)))

    def _raw_from_memory(self, shares: Iterator[_Share]) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        values_per_sample = self.dataset.samples.shape[1:].numel()
        for share in shares:
            at_once = VALUES_AT_ONCE // max(1, values_per_sample, len(share.indices) * values_per_sample)
            group = [share.indices, *(more.indices for more in islice(shares, max(0, at_once - 1)))]
            indices = self.dataset.rows(torch.cat(group))
            # index_select copies whole rows; samples[indices] copies value by value and takes five times as long.
            samples, targets = (
                self.dataset.samples.index_select(0, indices),
                self.dataset.targets.index_select(0, indices),
            )
            yield samples, targets, [len(one) for one in group]


def _keys(share: _Share) -> list[Key]:
    """The keys of a share's samples."""
    numbers = share.indices.tolist()
    if share.draws is None:
        return [(share.epoch, number, share.start) for number in numbers]
    return [
        (share.epoch, number, share.start, draw) for number, draw in zip(numbers, share.draws.tolist(), strict=True)
    ]


class Converter:
    """Brings raw samples and targets to the device, type and memory layout that a model computes in.

    uint8 samples are scaled to 0..1. With `mean` or `std`, one number for each channel (the second dimension) or one
    for all, samples are normalised. Integer samples of another type stay as they are. Targets that are whole numbers
    become int64, others take the model's type. Of bfloat16 that is the inputs' alone: they are normalised in float32,
    and targets stay float32, as the loss does.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        self.device, self.input_type, self.memory_format = device, dtype, memory_format
        self.dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        deviation = self._per_channel([1.0] if std is None else std)
        self.float_scale, self.image_scale = 1 / deviation, 1 / (255 * deviation)
        self.normalises = mean is not None or std is not None
        self.shift = None if mean is None else -self._per_channel(mean) / deviation

    def _per_channel(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(list(values), dtype=self.dtype, device=self.device)

    def to_device(self, value: Any) -> Any:
        """The tensors in `value` on the device."""
        return map_tensors(lambda tensor: on_device(tensor, self.device), value)

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Raw inputs and targets, on the device, (N, ...) or tuples or dicts of such -> what model and task take."""
        if isinstance(inputs, Tensor):
            return self._input(inputs, normalised=True), map_tensors(self._target, targets)
        # Among several inputs only images are known to have channels.
        converted = map_tensors(lambda tensor: self._input(tensor, normalised=tensor.dim() == 4), inputs)
        return converted, map_tensors(self._target, targets)

    def _input(self, samples: Tensor, normalised: bool) -> Tensor:
        if samples.dtype == torch.uint8:
            samples = samples.to(self.dtype)
            samples = self._shifted(samples.mul_(_beside(self.image_scale, samples))) if normalised else samples / 255
        elif samples.is_floating_point():
            samples = samples.to(self.dtype)
            if self.normalises and normalised:
                samples = self._shifted(samples * _beside(self.float_scale, samples))
        if samples.dtype == self.dtype:
            samples = samples.to(self.input_type)
        if samples.dim() == 4:
            samples = samples.contiguous(memory_format=self.memory_format)
        return samples

    def _target(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or targets.dtype == torch.bool:
            return targets.to(self.dtype)
        return targets.long()

    def _shifted(self, scaled: Tensor) -> Tensor:
        return scaled if self.shift is None else scaled.add_(_beside(self.shift, scaled))


def require_channels(inputs: Any, **options: Sequence[float] | None) -> None:
    """Raise ConfigError if `mean` or `std` has another number of values than samples have channels.

    One number is for all values of samples that are no images. That of grey images is no other images' one.

    inputs: a batch of raw ones. Of several, and of whole numbers, those that are no images are not normalised.
    """
    least = 2 if isinstance(inputs, Tensor) else 4
    for tensor in tensors_in(inputs):
        if tensor.dim() < least or not (tensor.is_floating_point() or tensor.dtype == torch.uint8):
            continue
        channels = tensor.shape[1]
        allowed, advised = ((channels,), channels) if tensor.dim() == 4 else ((1, channels), 1)
        for name, values in options.items():
            if values is not None and len(values) not in allowed:
                numbers = "1 number" if len(values) == 1 else f"{len(values)} numbers"
                raise ConfigError(
                    f"dataset.{name} has {numbers}, and the samples have the shape {list(tensor.shape[1:])}; "
                    f"type dataset.{name}=[{','.join(['0.5'] * advised)}] or dataset.{name}=null"
                )


def _beside(values: Tensor, samples: Tensor) -> Tensor:
    """One number per channel (C,), shaped so that it broadcasts over samples (N, C, ...)."""
    return values.view(-1, *[1] * (samples.dim() - 2))
