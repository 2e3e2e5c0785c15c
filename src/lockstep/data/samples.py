"""Reads a data set sample by sample: each with random numbers of its own, and an error that names it. Makes batches.

An IterableDataset is read as if its items had numbers.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from lockstep.data.dataset import (
    TARGET_KEYS,
    Labels,
    copied,
    is_list_of_samples,
    numbers_of,
    parts_of,
    tensors_in,
    values_in,
    whole_of,
    with_parts,
    without_samples,
)
from lockstep.data.partition import fold_in, random_states_kept, seed_all
from lockstep.data.transforms import apply_transform
from lockstep.errors import ConfigError
from lockstep.failures.reporter import heartbeat

log = logging.getLogger(__name__)

EVALUATION = -1  # the epoch of samples that are evaluated: their random numbers are the same each time
TRANSFORMS, ITEMS, COLLATE = 1, 2, 3  # folded into seeds of what transforms, an IterableDataset and a collate_fn draw
READ_TWICE, READ_TWICE_SECONDS = 4, 0.2  # samples, before the training
MOST_UNREADABLE = 100  # one after the other; more of them mean that the data set is broken, not a sample
IN_A_ROW, JUMP = 10, 0.618  # of them, and from one row to the next, as a part of the data set: rows lie far apart
COLLATED = (Tensor, np.ndarray, np.generic, int, float, str, bytes, list)  # values of a batch; lists are of numbers
# A function that makes (inputs, targets) of a list of samples.
COLLATE_NODE = "{_target_:<module>.<function>,_partial_:true}"
COLLATE_ADVICE = f"type dataset.collate_fn='{COLLATE_NODE}' as docs/data.md shows"

Key = tuple[int, ...]
"""(epoch, number of the sample in the data set), in training the samples of the epoch before its global batch, and
where samples are drawn with replacement the place of the draw in the epoch."""


class SampleError(RuntimeError):
    """A sample cannot be read."""


class Read(NamedTuple):
    """What was read of one batch: `kept` samples and their numbers, or one that stands in for none.

    seed: of what a collate_fn draws, the same on all ranks.
    """

    numbers: list[int]
    samples: list[Any]
    kept: int
    seed: int = 0


class Samples:
    """A data set as a DataLoader reads it: map-style, or iterable (see `Stream`).

    Before a sample is read and transformed, torch, numpy and random are seeded with (seed, epoch, number of the
    sample), and the place of the draw where samples are drawn with replacement. So its random numbers are the same in
    whichever rank or worker, and after a resume. Before a `collate_fn` they are seeded with (seed, epoch, place of the
    global batch). `set_epoch` of a data set that has one is called wherever it is read. A sample of a part has the
    number that it has in the whole data set.

    name: for messages.
    transforms: applied one after the other to samples of a training.
    plain_transforms: to those of an evaluation, where none is random.
    on_error: "fail" raises SampleError for a sample that cannot be read; "skip" takes the next readable one in
        training, and leaves it out of an evaluation.
    collate_fn: list of samples -> batch.
    labels: what targets must be; None: they are not checked.
    """

    def __init__(
        self,
        dataset: Any,
        name: str = "data",
        seed: int = 0,
        transforms: Sequence[Callable[..., Any]] = (),
        plain_transforms: Sequence[Callable[..., Any]] | None = None,
        on_error: str = "fail",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        labels: Labels | None = None,
    ) -> None:
        self.dataset, self.name, self.seed, self.transforms = dataset, name, seed, transforms
        self.plain_transforms = transforms if plain_transforms is None else plain_transforms
        self.skips, self.labels = on_error == "skip", labels
        self.collate_fn = collate_fn or collate_samples
        self.stream = Stream(dataset, seed) if isinstance(dataset, IterableDataset) else None
        self.named: set[int] = set()  # unreadable samples that the log has named
        self.numbers = numbers_of(dataset)
        self.set_epoch = getattr(whole_of(dataset), "set_epoch", None) if self.stream is None else None
        self.fetch = getattr(whole_of(dataset), "fetch", None) if self.stream is None else None
        self.epoch: int | None = None  # that the data set was told

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[Key]) -> Read | ConfigError:
        """As `read`. A sentence for the user is returned, since a worker cannot raise it without a traceback."""
        try:
            return self.read(keys)
        except ConfigError as error:
            return error

    def read(self, keys: Sequence[Key]) -> Read:
        """The samples of a batch. Raises SampleError for one that cannot be read, ConfigError if none of many can."""
        with random_states_kept():
            if self.fetch is not None:  # a data set that reads from far away asks for all of them at once
                self.fetch([self._number(index) for _, index, *_ in keys])
            read = [found for epoch, index, *place in keys for found in self._read(epoch, index, *place[1:])]
            kept = len(read)
            if not read:  # a batch of no samples needs one, for its shape
                read = [self._readable(EVALUATION, 0)]
        epoch, _, *place = keys[0] if keys else (EVALUATION, 0)
        seed = fold_in(self.seed, epoch, *place[:1], COLLATE)
        return Read([number for number, _ in read], [sample for _, sample in read], kept, seed)

    def _number(self, index: int) -> int:
        """The number that a sample has in the whole data set, of which this may be a part."""
        return index if self.numbers is None else int(self.numbers[index])

    def _read(self, epoch: int, index: int, *draw: int) -> list[tuple[int, Any]]:
        """[(number, sample)], empty for one that is left out. draw: the rest of its key."""
        if not self.skips:
            return [(self._number(index), self._transformed(epoch, index, *draw))]
        if epoch != EVALUATION:
            return [self._readable(epoch, index, *draw)]
        try:
            return [(self._number(index), self._transformed(epoch, index))]
        except SampleError as error:
            self._note(self._number(index), f"{error}; it is left out")
            return []

    def _readable(self, epoch: int, index: int, *draw: int) -> tuple[int, Any]:
        """(number, sample) of the first one from `index` on that can be read. Raises ConfigError if many cannot."""
        errors = list[SampleError]()
        # A whole part of the data may be gone, such as a shard: after some in a row the next one lies elsewhere.
        jump = int(JUMP * len(self)) if len(self) > MOST_UNREADABLE else 0
        for later in range(min(len(self), MOST_UNREADABLE)):
            candidate = (index + later + later // IN_A_ROW * jump) % len(self)
            try:
                return self._number(candidate), self._transformed(epoch, candidate, *draw)
            except SampleError as error:
                if not self.skips:
                    raise
                self._note(self._number(candidate), f"{error}; the next one takes its place")
                errors.append(error)
        raise ConfigError(
            f"none of {len(errors)} samples of the {self.name} that were tried can be read; {errors[0]}; "
            f"correct that, or type dataset=<another data set>"
        ) from errors[0]

    def _note(self, number: int, sentence: str) -> None:
        """A line in the log, once for each sample."""
        if number not in self.named:
            self.named.add(number)
            log.warning(sentence)

    def _transformed(self, epoch: int, index: int, *draw: int) -> Any:
        number = self._number(index)
        try:
            if self.stream is None:
                if self.set_epoch is not None and epoch != self.epoch:
                    self.set_epoch(max(epoch, 0))  # an evaluation has -1, which is no seed
                    self.epoch = epoch
                seed_all(fold_in(self.seed, epoch, number, TRANSFORMS, *draw))
                sample = self.dataset[index]
            else:
                sample = self.stream.read(epoch, number)
                seed_all(fold_in(self.seed, epoch, number, TRANSFORMS))
            if sample is None and self.skips:
                raise ValueError("__getitem__ returned None")
            transforms = self.plain_transforms if epoch == EVALUATION else self.transforms
            if transforms:  # one that works in place must not change what the data set holds
                sample = copied(sample)
            for transform in transforms if sample is not None else ():
                sample = apply_transform(transform, sample)
        except ConfigError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or "no message"
            raise SampleError(
                f"sample {number} of the {self.name} cannot be read: {type(error).__name__}: {reason}"
            ) from error
        return sample

    def one(self, number: int = 0, epoch: int = EVALUATION) -> tuple[Any, Any]:
        """(inputs, targets) of one sample as a batch. Raises ConfigError if it has a form that is not known."""
        with random_states_kept():
            number, sample = self._readable(epoch, number)
        batch = self.collate(Read([number], [sample], 1))
        if isinstance(batch, ConfigError):
            raise batch
        return batch

    def warn_of_other_samples(self) -> None:
        """Log a warning if a first sample is another one when it is read again, or where `collate_fn` mixes them."""
        if drawn := self.draws_of_collate_fn():
            log.warning("%s", drawn)
        begun = time.monotonic()
        for number in range(min(READ_TWICE, len(self))):
            first, second = ([*tensors_in(self.one(number, epoch=0))] for _ in range(2))
            are_same = len(first) == len(second) and all(map(_are_same, first, second))
            if not are_same:
                log.warning(
                    "sample %d of the %s is another one when it is read again, so the numbers depend on the ranks, the "
                    "workers and each stop: draw from torch, numpy or random, which are seeded for it, and change a "
                    "copy of what the data set keeps",
                    *(number, self.name),
                )
            if not are_same or time.monotonic() - begun > READ_TWICE_SECONDS:
                return

    def _batch(self, read: Read) -> Any:
        if self.collate_fn is not collate_samples:
            with random_states_kept():
                seed_all(read.seed)
                return self.collate_fn(read.samples)
        try:
            return collate_samples(read.samples)
        except Exception:
            require_one_form(read.numbers, read.samples, self.name)
            require_batches_of_one(read.numbers, read.samples, self.name)
            raise

    def collate(self, read: Read | ConfigError) -> tuple[Any, Any] | ConfigError:
        """(inputs, targets) of the kept samples. A sentence for the user is returned, as of `__getitems__`."""
        if isinstance(read, ConfigError):
            return read
        try:
            batch = self._batch(read)
            inputs, targets = split_batch(batch, self.name)
            for what, value in (("inputs", inputs), ("targets", targets)):
                if is_list_of_samples(value, len(read.samples)):
                    raise ConfigError(
                        f"dataset.collate_fn makes a list of {what}, with an item for each sample, and ranks take the "
                        f"rows of tensors; return a tensor of all of them, such as boxes that are padded to one "
                        f"number with a mask beside them, and type dataset.collate_fn='{COLLATE_NODE}'"
                    )
            if next(tensors_in(targets), None) is None:
                first = targets[0] if isinstance(targets, tuple | list) and targets else targets
                raise ConfigError(  # such as text, which default_collate leaves as it is
                    f"sample {read.numbers[0]} of the {self.name} has the target {repr(first)[:40]}, and a number or a "
                    f"tensor is wanted; return one from __getitem__, such as its place in a list of all classes, or "
                    f"{COLLATE_ADVICE}"
                )
            if self.labels is not None:
                self.labels.check(read.numbers, targets)
        except ConfigError as error:
            return error
        return (without_samples(inputs), without_samples(targets)) if read.kept == 0 else (inputs, targets)

    def draws_of_collate_fn(self) -> str:
        """A sentence about a `collate_fn` that draws a number for each sample, or mixes them; empty of another one."""

        def collated(part: Sequence[Any]) -> tuple[list[Tensor], dict[str, float]]:
            """The tensors of a batch, and what is drawn after it."""
            seed_all(self.seed)
            tensors = [*tensors_in(self.collate_fn([copied(sample) for sample in part]))] if part else []
            numbers = float(torch.rand(())), float(np.random.rand()), random.random()
            return tensors, dict(zip(("torch", "numpy.random", "random"), numbers, strict=True))

        if self.collate_fn is collate_samples:
            return ""
        drawn_from, is_by_sample = list[str](), True
        with random_states_kept(), suppress(Exception):  # the first batch will raise it
            samples = [self._readable(0, number % len(self))[1] for number in range(READ_TWICE)]
            (_, before), (whole, after) = collated([]), collated(samples)
            drawn_from = [name for name, number in before.items() if after[name] != number]
            alone = zip(*(collated([sample])[0] for sample in samples), strict=True)
            is_by_sample = not all(map(_are_same, whole, map(torch.cat, alone)))
        if not (drawn_from and is_by_sample):
            return ""
        return (
            f"dataset.collate_fn draws from {' and '.join(drawn_from)} for single samples, or mixes them: all ranks "
            f"and parts of a batch get the same numbers, each for its own samples, and evaluations, too; draw in "
            f"dataset.transforms, and for MixUp type "
            f"dataset.batch_transforms='[{{_target_:lockstep.data.transforms.MixUp,alpha:1.0,classes:<how many>}}]'"
        )

    def draws(self) -> bool:
        """Whether __getitem__ of the data set gives one of the first samples otherwise with other random states."""
        begun = time.monotonic()
        for index in range(min(READ_TWICE, len(self))):
            with random_states_kept():
                read = list[list[Any]]()
                for state in range(2):
                    seed_all(fold_in(self.seed, state))
                    with suppress(Exception):  # an evaluation names what cannot be read
                        read.append([np.asarray(value) for value in values_in(self.dataset[index])])
            if any(not np.array_equal(*pair) for pair in zip(*read, strict=False) if len(read) == 2):
                return True
            if time.monotonic() - begun > READ_TWICE_SECONDS:
                break
        return False


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and values, NaN among them."""
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


def split_batch(batch: Any, name: str) -> tuple[Any, Any]:
    """(inputs, targets) of a collated batch: a pair, or a dict with one of TARGET_KEYS.

    A dict's other values are the inputs: the value itself if there is one, else a dict. Raises ConfigError.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if not isinstance(batch, Mapping):
        found = f"{len(batch)} values" if isinstance(batch, tuple | list) else f"one {type(batch).__name__}"
        raise ConfigError(
            f"a sample of the {name} has {found}, and (inputs, target) is wanted, where inputs may be a tuple or a "
            f"dict; return such a pair from __getitem__, or {COLLATE_ADVICE}"
        )
    keys = [key for key in TARGET_KEYS if key in batch]
    if len(keys) != 1:
        raise ConfigError(
            f"a sample of the {name} is a dict of {', '.join(map(str, batch))}, and one key "
            f"named {', '.join(TARGET_KEYS[:-1])} or {TARGET_KEYS[-1]} is wanted; rename the target's key, "
            f"or {COLLATE_ADVICE}"
        )
    inputs = {key: value for key, value in batch.items() if key != keys[0]}
    return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), batch[keys[0]]


def collate_samples(samples: list[Any]) -> Any:
    """The batch of samples of one form. A list of numbers becomes a tensor, a tuple stays a tuple of values.

    Raises what default_collate raises for values that it cannot put together.
    """
    if _has_dataclass(samples[0]):
        samples = list(map(_with_dicts, samples))
    batch, first = default_collate(samples), samples[0]
    if isinstance(first, Mapping):
        return {key: _stacked(batch[key], first[key]) for key in batch}
    if isinstance(first, tuple | list):
        return [_stacked(values, value) for values, value in zip(batch, first, strict=True)]
    return batch


def _has_dataclass(sample: Any) -> bool:
    return is_dataclass(sample) or any(map(_has_dataclass, (parts_of(sample) or {}).values()))


def _with_dicts(sample: Any) -> Any:
    """A sample with dicts in the place of dataclasses, which default_collate does not know."""
    parts = parts_of(sample)
    if parts is None:
        return sample
    parts = {name: _with_dicts(part) for name, part in parts.items()}
    return parts if is_dataclass(sample) else with_parts(sample, parts)


def _stacked(values: Any, first: Any) -> Any:
    """`values` of a batch with each list of numbers as one tensor, as in data of a Hugging Face tokenizer.

    default_collate makes a list with a tensor (N,) for each place of the list. first: the value of the first sample.
    """
    if isinstance(first, Mapping):
        return {key: _stacked(values[key], first[key]) for key in values}
    if not isinstance(first, tuple | list) or not isinstance(values, list | tuple):
        return values
    stacked = [_stacked(value, item) for value, item in zip(values, first, strict=True)]
    shapes = {value.shape if isinstance(value, Tensor) else None for value in stacked}
    are_numbers = isinstance(first, list) and all(isinstance(item, int | float | list) for item in first)
    return torch.stack(stacked, dim=1) if are_numbers and len(shapes) == 1 and None not in shapes else stacked


def require_one_form(numbers: Sequence[int], samples: Sequence[Any], name: str) -> None:
    """Raise ConfigError if one of the samples, which cannot be a batch, is None, has another shape or type, or has a
    value that is no part of a batch.

    numbers: of the samples in the data set, which is called `name`.
    """
    first = _values(samples[0])
    for number, sample in zip(numbers, samples, strict=True):
        if sample is None:
            raise ConfigError(
                f"sample {number} of the {name} is None; return (inputs, target) from __getitem__, or type "
                f"dataset.on_error=skip to leave such samples out"
            )
        values = _values(sample)
        forms = [(place, _form(one), _form(other)) for (place, one), (_, other) in zip(first, values, strict=False)]
        differing = [(place, one, other) for place, one, other in forms if one != other]
        if len(first) != len(values):
            differing.append(("", f"{len(first)} values", f"{len(values)} values"))
        for place, one, other in differing[:1]:
            raise ConfigError(
                f"sample {numbers[0]} of the {name} has{place} {one} and sample {number} has {other}, and a batch "
                f"must have one shape; {COLLATE_ADVICE}"
            )
    for place, value in [(place, value) for place, value in first if not isinstance(value, COLLATED)][:1]:
        advice = f"return one from __getitem__, or {COLLATE_ADVICE}"
        if hasattr(value, "getbands"):  # an image of Pillow
            key = "test_transforms" if name == "test data" else "transforms"
            advice = f"type dataset.{key}='[{{_target_:torchvision.transforms.v2.ToImage}}]'"
        raise ConfigError(
            f"sample {numbers[0]} of the {name} has{place} an object of {type(value).__name__}, and a tensor, an array "
            f"or a number is wanted; {advice}"
        )


def require_batches_of_one(numbers: Sequence[int], samples: Sequence[Any], name: str) -> None:
    """Raise ConfigError for a sample that is no batch by itself, such as an array that torch cannot take.

    numbers, name: as for `require_one_form`.
    """
    for number, sample in zip(numbers, samples, strict=True):
        try:
            collate_samples([sample])
        except Exception as error:
            reason = str(error).partition(". ")[0].partition("\n")[0]
            raise ConfigError(
                f"sample {number} of the {name} cannot be put into a batch: {type(error).__name__}: {reason}; return "
                f"tensors, or numpy.ascontiguousarray(x, dtype=numpy.float32) of arrays, from __getitem__"
            ) from error


def _form(value: Any) -> str:
    """The shape or type of a value, in words."""
    if isinstance(value, list):
        return f"{len(value)} numbers"
    return f"the shape {list(value.shape)}" if isinstance(value, Tensor | np.ndarray) else type(value).__name__


def _values(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """(place, value) of each value in a sample. A list of numbers is one."""
    parts = parts_of(value)
    if parts is None or (isinstance(value, list) and all(isinstance(item, int | float) for item in value)):
        return [(place, value)]
    names = ((f" as {name}" if isinstance(name, str) else place, part) for name, part in parts.items())
    return [found for name, part in names for found in _values(part, name)]


class Stream:
    """Item n of `dataset` by its number n, of numbers that rise. A smaller number starts it again.

    Every rank reads all items and keeps its own, so a run is the same at any number of ranks. Torch, numpy and random
    are seeded before each item. What this needs: `__len__`, the items of an epoch; the same items in the same order on
    every rank and each time; and `set_epoch(epoch)`, if there is one, for another order. Items are not shuffled here.

    After `share` a rank trains on items of its own, whatever their numbers. An evaluation reads all items.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.items: Iterator[Any] = iter(())
        self.epoch, self.position = 0, -1  # of the last item that was read
        self.part: tuple[int, int] | None = None  # (rank, size), until the data set has been told
        self.is_shared = False

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked by require_stream

    def share(self, rank: int, size: int) -> None:
        """Let each rank read its part alone, if the data set has a method `share(rank, size)` which chooses one."""
        self.is_shared = hasattr(self.dataset, "share")
        self.part = (rank, size) if self.is_shared else None

    def read(self, epoch: int, number: int) -> Any:
        """Raises ConfigError if there are fewer items."""
        if self.is_shared and epoch >= 0:
            return self._next(epoch, number)
        if epoch != self.epoch or number <= self.position or self.position < 0:
            self._start(epoch)
        item = None
        while self.position < number:
            seed_all(fold_in(self.seed, epoch, self.position + 1, ITEMS))
            try:
                item = next(self.items)
            except StopIteration:
                raise ConfigError(
                    f"{type(self.dataset).__name__} has {self.position + 1} items, and its __len__ says {len(self)}; "
                    f"type return {self.position + 1} there, or let it give the rest"
                ) from None
            self.position += 1
            heartbeat()  # a resumed run reads what it had used before, which may take a while
        return item

    def _next(self, epoch: int, number: int) -> Any:
        if self.part is not None:  # not before: a mode that only evaluates the training data needs all of it
            self.dataset.share(*self.part)  # type: ignore[attr-defined]  # of the user's
            self.items, self.part = iter(()), None
            log.warning(
                "the training data, %s, is shared by its method share: each rank reads items of its own, one after the "
                "other, and begins again at their end. So other ranks train on other batches, an epoch may have an "
                "item twice or not at all, and a run that goes on begins again, too",
                type(self.dataset).__name__,
            )
        for _ in range(2):
            seed_all(fold_in(self.seed, epoch, number, ITEMS))
            for item in self.items:
                return item
            self._start(epoch)
        raise ConfigError(
            f"{type(self.dataset).__name__} has no items for one of the ranks; type launch.nproc_per_node=<fewer>, or "
            f"give it more shards"
        )

    def _start(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(max(epoch, 0))  # an evaluation has -1, which is no seed
        seed_all(fold_in(self.seed, epoch, ITEMS))
        self.items, self.epoch, self.position = iter(self.dataset), epoch, -1


def require_stream(dataset: object, name: str, workers: int, mixes: bool, on_error: str) -> None:
    """Raise ConfigError for an IterableDataset that cannot be read by numbers that rise. Others are no concern here."""
    if not isinstance(dataset, IterableDataset):
        return
    kind = f"the {name} is an IterableDataset, {type(dataset).__name__}"
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"{kind}, without __len__; add one that returns the number of items of an epoch")
    if workers:
        raise ConfigError(f"{kind}, which each rank reads in its own process; type dataset.workers=0")
    if mixes:
        raise ConfigError(f"{kind}, of which no earlier item can be mixed in; type dataset.batch_transforms=[]")
    if on_error == "skip":
        raise ConfigError(f"{kind}, which ends with its first error; type dataset.on_error=fail")
