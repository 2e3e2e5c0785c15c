"""Reads a data set sample by sample: each with random numbers of its own, and an error that names it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from lockstep.data.collate import COLLATE_ADVICE, collate_samples, require_one_form
from lockstep.data.labels import Labels
from lockstep.data.nested import copied, map_tensors, tensors_in
from lockstep.data.partition import fold_in
from lockstep.data.random_numbers import random_states_kept, seed_all
from lockstep.data.sample_transforms import apply_transform
from lockstep.data.stream import Stream
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

EVALUATION = -1  # the epoch of samples that are evaluated: their random numbers are the same each time
TRANSFORMS = 1  # folded into the seed: nothing else draws from these streams
TARGET_KEYS = ("target", "targets", "label", "labels")  # of samples that are dicts
MOST_UNREADABLE = 100  # in a row; more of them mean that the data set is broken, not a sample

Key = tuple[int, int]
"""(epoch, number of the sample in the data set)."""


class SampleError(RuntimeError):
    """A sample cannot be read."""


class Read(NamedTuple):
    """What was read of one batch: `kept` samples and their numbers, or one that stands in for none."""

    numbers: list[int]
    samples: list[Any]
    kept: int


class Samples:
    """A data set as a DataLoader reads it: map-style, or iterable (see `Stream`).

    Before a sample is read and transformed, torch, numpy and random are seeded with (seed, epoch, number of the
    sample). So its random numbers are the same in whichever rank or worker, and after a resume.

    name: for messages. transforms: applied one after the other. on_error: "fail" raises SampleError for a sample that
    cannot be read; "skip" takes the next readable one in training, and leaves it out of an evaluation. collate_fn:
    list of samples -> batch. labels: what targets must be; None: they are not checked.
    """

    def __init__(
        self,
        dataset: Any,
        name: str = "data",
        seed: int = 0,
        transforms: Sequence[Callable[..., Any]] = (),
        on_error: str = "fail",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        labels: Labels | None = None,
    ) -> None:
        self.dataset, self.name, self.seed, self.transforms = dataset, name, seed, transforms
        self.skips, self.labels = on_error == "skip", labels
        self.collate_fn = collate_fn or collate_samples
        self.stream = Stream(dataset, seed) if isinstance(dataset, IterableDataset) else None
        self.named: set[int] = set()  # unreadable samples that the log has named

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: list[Key]) -> Read | ConfigError:
        """As `read`. A sentence for the user is returned, since a worker cannot raise it without a traceback."""
        try:
            return self.read(keys)
        except ConfigError as error:
            return error

    def read(self, keys: list[Key]) -> Read:
        """The samples of a batch. Raises SampleError for one that cannot be read, ConfigError if none of many can."""
        with random_states_kept():
            read = [(number, sample) for key in keys for number, sample in self._read(*key)]
            kept = len(read)
            if not read:  # a batch of no samples needs one, for its shape
                read = [self._readable(EVALUATION, 0)]
        return Read([number for number, _ in read], [sample for _, sample in read], kept)

    def _read(self, epoch: int, number: int) -> list[tuple[int, Any]]:
        """[(number, sample)], empty for one that is left out."""
        if not self.skips:
            return [(number, self._transformed(epoch, number))]
        if epoch != EVALUATION:
            return [self._readable(epoch, number)]
        try:
            return [(number, self._transformed(epoch, number))]
        except SampleError as error:
            self._note(number, f"{error}; it is left out")
            return []

    def _readable(self, epoch: int, number: int) -> tuple[int, Any]:
        """The first sample from `number` on that can be read. Raises ConfigError if many in a row cannot."""
        errors = list[SampleError]()
        for later in range(number, number + min(len(self), MOST_UNREADABLE)):
            candidate = later % len(self)
            try:
                return candidate, self._transformed(epoch, candidate)
            except SampleError as error:
                if not self.skips:
                    raise
                self._note(candidate, f"{error}; the next one takes its place")
                errors.append(error)
        raise ConfigError(
            f"none of {len(errors)} samples of the {self.name} in a row can be read; {errors[0]}; "
            f"correct that, or type dataset=<another data set>"
        ) from errors[0]

    def _note(self, number: int, sentence: str) -> None:
        if number not in self.named:
            self.named.add(number)
            log.warning(sentence)

    def _transformed(self, epoch: int, number: int) -> Any:
        try:
            if self.stream is None:
                seed_all(fold_in(self.seed, epoch, number, TRANSFORMS))
                sample = self.dataset[number]
            else:
                sample = self.stream.read(epoch, number)
                seed_all(fold_in(self.seed, epoch, number, TRANSFORMS))
            if sample is None and self.skips:
                raise ValueError("__getitem__ returned None")
            if self.transforms:  # one that works in place must not change what the data set holds
                sample = copied(sample)
            for transform in self.transforms if sample is not None else ():
                sample = apply_transform(transform, sample)
        except ConfigError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or "no message"
            raise SampleError(
                f"sample {number} of the {self.name} cannot be read: {type(error).__name__}: {reason}"
            ) from error
        return sample

    def one(self, number: int = 0) -> tuple[Any, Any]:
        """(inputs, targets) of one sample as a batch. Raises ConfigError if it has a form that is not known."""
        with random_states_kept():
            number, sample = self._readable(EVALUATION, number)
        found = self.collate(Read([number], [sample], 1))
        if isinstance(found, ConfigError):
            raise found
        return found

    def collate(self, read: Read | ConfigError) -> tuple[Any, Any] | ConfigError:
        """(inputs, targets) of the kept samples. A sentence for the user is returned, as of `__getitems__`."""
        if isinstance(read, ConfigError):
            return read
        try:
            inputs, targets = split_batch(self._batch(read), self.name)
            if next(tensors_in(targets), None) is None:
                raise ConfigError(wrong_target(read.numbers[0], targets, self.name))
            if self.labels is not None:
                self.labels.check(read.numbers, targets)
        except ConfigError as error:
            return error
        if read.kept == 0:
            inputs, targets = (map_tensors(lambda tensor: tensor[:0], value) for value in (inputs, targets))
        return inputs, targets

    def _batch(self, read: Read) -> Any:
        """What collate_fn makes of the samples. Raises ConfigError for samples that are None, or of different forms."""
        try:
            return self.collate_fn(read.samples)
        except Exception:
            if self.collate_fn is collate_samples:
                require_one_form(read.numbers, read.samples, self.name)
            raise


def wrong_target(number: int, targets: Any, name: str) -> str:
    """The sentence for targets without a tensor, such as text, which default_collate leaves as it is."""
    first = repr(targets[0] if isinstance(targets, tuple | list) and targets else targets)[:40]
    return (
        f"sample {number} of the {name} has the target {first}, and a number or a tensor is wanted; return one from "
        f"__getitem__, such as its place in a list of all classes, or {COLLATE_ADVICE}"
    )


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
