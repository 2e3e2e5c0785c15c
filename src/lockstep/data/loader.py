"""The loader that gives one rank its parts of every global batch, on its device."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.batch_transforms import BatchTransform, BatchTransforms
from lockstep.data.converter import Converter
from lockstep.data.in_memory import InMemoryDataset
from lockstep.data.partition import Batch, LoadedPart, Part, generator
from lockstep.data.read_groups import RawGroup, read_memory, read_samples
from lockstep.data.samples import EVALUATION, Samples
from lockstep.data.workers import DatasetReader
from lockstep.errors import ConfigError


class _Planned(NamedTuple):
    """A global batch of an epoch that is not read yet, and this rank's parts of it.

    start: samples of the epoch before it. samples: how many it has, over all ranks. shares: what is read for each part.
    places: of each share in the batch, if a sample's place decides what it becomes; otherwise empty.
    """

    epoch: int
    start: int
    samples: int
    parts: list[Part]
    shares: list[Tensor]
    places: list[Tensor]


class _Pass(NamedTuple):
    """Batches in their order, some of which are read ahead, and what is read for each of their parts.

    next_call: (epoch, batch_size, skip, turns) of the call of `epoch` that may use the rest of it.
    """

    next_call: tuple[int, int, int, slice]
    planned: Iterator[_Planned]
    loaded: Iterator[tuple[Any, Any]]


class BatchLoader:
    """Loads one rank's samples: `epoch` for training, `eval_batches` for evaluation.

    dataset: tensors in memory, or `Samples`, or any other map-style data set. rank, size: this rank's share, and how
    many shares there are. workers: processes that read a data set which is not in memory. They start here.
    augment, transforms: of training batches.
    """

    def __init__(
        self,
        dataset: Any,
        converter: Converter,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        augment: Augment | None = None,
        workers: int = 0,
        transforms: Sequence[BatchTransform] = (),
    ) -> None:
        self.converter, self.rank, self.size, self.seed = converter, rank, size, seed
        self.augment, self.transforms = augment or Augment(), BatchTransforms(transforms)
        self.dataset = dataset
        self.index_device = torch.device("cpu")
        self.reader: DatasetReader | None = None
        self.is_stream = False  # whether samples come in the data set's own order
        self.leaves_out = False  # whether an evaluation may miss samples, which cannot be read
        self.reads_ahead = False  # whether workers go on with the next epoch while this one is still used
        self._pass: _Pass | None = None  # that the next epoch may go on with
        if isinstance(dataset, InMemoryDataset):
            self.dataset = dataset.to(converter.device)
            self.index_device = self.dataset.samples.device
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

    def _order(self, generator: torch.Generator) -> Tensor:
        """The indices of an epoch's samples, in their order."""
        if isinstance(self.dataset, InMemoryDataset):
            return self.dataset.epoch_order(generator)
        if self.is_stream:
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=generator)

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
        """This rank's batches of one epoch; over all ranks every sample of the epoch comes once.

        batch_size counts the samples of all ranks. parts: which parts of a global batch of indices (N,) are this
        rank's. skip: samples used before the run was resumed. turns: which of the batches, if ranks take turns.
        last_epoch: the number of the last epoch that will be asked for. Workers go on with the epochs up to it.
        """
        starts, call = range(skip, len(self), batch_size)[turns], (epoch, batch_size, skip, turns)
        # A pass over some turns can end before its epoch does, so the next epoch is not read ahead.
        last = max(epoch, last_epoch) if self.reads_ahead and turns == slice(None) else epoch
        current, self._pass = self._pass, None
        if current is None or current.next_call != call:
            current = self._begin(call, self._plans(range(epoch, last + 1), batch_size, parts, skip, turns))
        for batch in islice(current.planned, len(starts)):
            plans = self.transforms.plans(batch.samples, self.seed, epoch, batch.start)
            found = []
            for number, part in enumerate(batch.parts):
                inputs, targets = next(current.loaded)
                if self.transforms:
                    place = batch.places[number]
                    inputs, targets = self.transforms(inputs, targets, [plan[place] for plan in plans])
                found.append(LoadedPart(part.number, inputs, targets, part.indices))
            if batch.start == starts[-1] and epoch < last:
                self._pass = current._replace(next_call=(epoch + 1, batch_size, 0, turns))
            yield Batch(batch.samples, found)

    def _plans(
        self, epochs: range, batch_size: int, parts: Callable[[Tensor], list[Part]], skip: int, turns: slice
    ) -> Iterator[_Planned]:
        for epoch in epochs:
            order = self._order(generator(self.seed, epoch)).to(self.index_device)
            for start in range(skip if epoch == epochs[0] else 0, len(self), batch_size)[turns]:
                batch = order[start : start + batch_size].clone()  # a slice would keep all of `order` in memory
                yield self._plan(batch, epoch, start, parts)
            del order  # before the next one takes as much memory

    def _begin(self, call: tuple[int, int, int, slice], plans: Iterator[_Planned]) -> _Pass:
        # What is read is some batches ahead of what is used: `tee` keeps the plans in between, and no others exist.
        planned, ahead = tee(plans)
        augmentation = None
        if self.augment.enabled:
            ahead, augmented = tee(ahead)
            augmentation = self._augmentation(augmented)
        shares = ((batch.epoch, share) for batch in ahead for share in batch.shares)
        return _Pass(call, planned, self._load(shares, augmentation))

    def _plan(self, batch: Tensor, epoch: int, start: int, parts: Callable[[Tensor], list[Part]]) -> _Planned:
        """batch: the indices (N,) of a global batch."""
        mine, places = parts(batch), list[Tensor]()
        shares = [part.indices for part in mine]
        if self.augment.enabled or self.transforms:
            places = self._places(len(batch), parts)
        if self.transforms:
            shares = [batch[place.to(batch.device)] for place in places]
        return _Planned(epoch, start, len(batch), mine, shares, places)

    def _places(self, count: int, parts: Callable[[Tensor], list[Part]]) -> list[Tensor]:
        """Where in a global batch of `count` samples this rank's parts are, with the samples that are mixed in."""
        return [self.transforms.with_samples_before(part.indices, count) for part in parts(torch.arange(count))]

    def _augmentation(self, batches: Iterable[_Planned]) -> Iterator[Tensor]:
        """The augmentation of each of this rank's parts: drawn for the global batch, cut as the batch is cut."""
        for batch in batches:
            plan = self.augment.plan(batch.samples, generator(self.seed, batch.epoch, batch.start))
            for place in batch.places:
                yield plan[place]

    def eval_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) of at most `batch_size` samples; over all ranks every sample comes once.

        Every rank gets equally many batches, perhaps with an empty last one: ranks may have to compute together.
        """
        yield from self._load((EVALUATION, share) for share in self.eval_shares(batch_size))

    def eval_shares(self, batch_size: int) -> Iterator[Tensor]:
        """The numbers of the samples of each of `eval_batches`."""
        together = self.size * batch_size
        for first in range(0, len(self), together):
            numbers = range(first, min(first + together, len(self)))
            yield self._indices(numbers[self.rank :: self.size])

    def first_sample(self) -> tuple[Any, Any]:
        """(inputs, targets) of sample 0 as a batch of one, as the model and the task would take them."""
        _, inputs, targets = self.read(torch.zeros(1, dtype=torch.int64, device=self.index_device))
        return inputs, targets

    def read(self, indices: Tensor, epoch: int = EVALUATION) -> tuple[Tensor, Any, Any]:
        """(numbers, inputs, targets) of the samples with these numbers (N,), without augmentation, for messages.

        It reads in this process, also while another pass goes on. Samples that cannot be read may be missing.
        """
        if self.reader is None:
            return indices, *next(self._load([(epoch, indices)]))
        found = self.samples.read([(epoch, number) for number in indices.tolist()])
        collated = self.samples.collate(found)
        if isinstance(collated, ConfigError):
            raise collated
        inputs, targets = map(self.converter.to_device, collated)
        return torch.tensor(found.numbers[: found.kept]), *self.converter(inputs, targets)

    def raw_inputs(self, count: int) -> Any:
        """Inputs of the first samples, at most `count`, as the data set and its transforms give them."""
        share = self._indices(range(min(count, len(self))))
        return next(self._raw([(EVALUATION, share)]))[0]

    def _indices(self, numbers: range) -> Tensor:
        return torch.arange(numbers.start, numbers.stop, numbers.step, device=self.index_device)

    def shown_sample(self, number: int) -> Tensor:
        """The inputs of a sample as the data set has them; an empty tensor if they are several."""
        if isinstance(self.dataset, InMemoryDataset):
            return self.dataset.samples[number]
        inputs, _ = self.samples.one(number)
        return inputs[0] if isinstance(inputs, Tensor) else torch.empty(0)

    def _load(
        self, shares: Iterable[tuple[int, Tensor]], plans: Iterator[Tensor] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """The inputs and targets of each (epoch, indices), in order, augmented by its plan."""
        for samples, targets, sizes in self._raw(shares):
            samples, targets = self.converter.to_device(samples), self.converter.to_device(targets)
            if plans is not None:
                plan = self.converter.to_device(torch.cat([next(plans) for _ in sizes]))
                targets = self.augment.move_with(samples, targets, plan)
                samples = self.augment(samples, plan)
            samples, targets = self.converter(samples, targets)
            if len(sizes) == 1:
                yield samples, targets
            else:
                yield from zip(samples.split(sizes), targets.split(sizes), strict=True)

    def _raw(self, shares: Iterable[tuple[int, Tensor]]) -> Iterator[RawGroup]:
        """The raw samples of each (epoch, indices). The workers drop a pass that the next epoch could use."""
        self._pass = None
        if self.reader is None:
            return read_memory(self.dataset, (share for _, share in shares))
        return read_samples(self.reader, shares)
