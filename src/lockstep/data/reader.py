"""Reads samples one by one, in workers or in the rank: each has its own random numbers, and its errors name it."""

import atexit
import fcntl
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lockstep.data.partition import fold_in, random_states_kept, seed_all
from lockstep.data.source import TARGET_KEYS, tensors_in, unwrapped
from lockstep.distributed.host import end_with_parent
from lockstep.distributed.signals import STOP_SIGNALS
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat

log = logging.getLogger(__name__)

EVALUATION = -1  # the epoch of samples that are evaluated: their random numbers are the same each time
SAMPLE, COLLATE = 1, 3  # folded into the seeds of what samples and a collate_fn draw
EXIT_SECONDS = 2.0  # from a lost connection to a worker until its end is seen
OPEN = "/proc/self/fd"  # the files that a process has open; not on macOS
TRIED = 10  # samples from an unreadable one on, with on_error=skip

Check = Callable[[Any, Any], None]
"""(targets of a batch, numbers of its samples) -> None. Raises ConfigError for a target that the task does not take."""


class Request(NamedTuple):
    """The samples of one part: one small message to a worker.

    epoch: EVALUATION for one. start: samples of the epoch before the global batch.
    numbers: (n,) in the data set. draws: (n,) places in the epoch, where samples are drawn with replacement.
    """

    epoch: int
    start: int
    numbers: np.ndarray[Any, Any]
    draws: np.ndarray[Any, Any] | None = None


class Told(NamedTuple):
    """What a worker says in place of a batch: the sentence of a ConfigError, which needs no traceback."""

    sentence: str


class SampleReader(Dataset[Any]):
    """A map-style data set as torch's DataLoader reads it.

    Before a sample is read and transformed, torch, numpy and random are seeded with (seed, epoch, number of the sample
    in the whole data set), and the place of the draw where it is drawn with replacement: so its random numbers are the
    same in whichever rank or worker, and after a resume.

    name: for messages, such as "training data". transforms: each gets the whole sample, as those of torchvision's v2.
    collate_fn: list of samples -> (inputs, targets). skips: whether, in training, the next readable one of ten takes
    the place of a sample that cannot be read.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        seed: int,
        transforms: Sequence[Callable[[Any], Any]] = (),
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        skips: bool = False,
        check: Check | None = None,
    ) -> None:
        is_stream = isinstance(dataset, IterableDataset) and type(dataset).__getitem__ is Dataset.__getitem__
        self.dataset: Any = Stream(dataset) if is_stream else dataset
        self.name, self.seed, self.transforms, self.collate_fn = name, seed, transforms, collate_fn
        self.skips, self.check = skips, check
        whole, self.indices = unwrapped(dataset)
        self.set_epoch = getattr(whole, "set_epoch", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: Request) -> Any:
        """The batch, collated: (inputs, targets), or what is wrong with it."""
        try:
            with random_states_kept():
                return self.read(request)
        except ConfigError as error:
            return Told(str(error))

    def read(self, request: Request) -> tuple[Any, Any]:
        """(inputs, targets). A part of no samples gets one for its shape, which the loader leaves out."""
        if self.set_epoch is not None:
            self.set_epoch(max(request.epoch, 0))
        numbers = request.numbers.tolist() or [0]
        draws = [[] for _ in numbers] if request.draws is None else [[place] for place in request.draws.tolist() or [0]]
        samples = [self._readable(request.epoch, *pair) for pair in zip(numbers, draws, strict=True)]
        seed_all(fold_in(self.seed, request.epoch, request.start, COLLATE))
        try:
            inputs, targets = pair_of(self.collate_fn(samples))
        except Exception as error:
            if "shared memory" in str(error):  # of a worker: no fault of the samples
                raise
            said = f"samples {numbers[:4]} of the {self.name} make no batch of inputs and targets"
            advice = "give all samples the same form, or type loader.collate_fn='{_target_:<module>.<function>}'"
            raise ConfigError(f"{said} ({_line(error)}); {advice}") from error
        if len(request.numbers):
            self.check_targets(targets, numbers)
        return inputs, targets

    def check_targets(self, targets: Any, numbers: Sequence[int]) -> None:
        """numbers: of their samples in this data set. Raises ConfigError for targets that the task does not take."""
        if self.check is None:
            return
        if next(tensors_in(targets), None) is None:
            what = f"the targets of the {self.name} are no numbers, but {str(targets)[:40]}"
            raise ConfigError(f"{what}; return a number or a tensor from __getitem__")
        try:
            self.check(targets, numbers if self.indices is None else self.indices[numbers])
        except ConfigError as error:
            raise ConfigError(f"in the {self.name}, {error}") from error

    def number(self, index: int) -> int:
        """That a sample has in the whole data set, of which this may be a part."""
        return index if self.indices is None else int(self.indices[index])

    def _readable(self, epoch: int, index: int, draw: list[int]) -> Any:
        tried = range(index, index + TRIED) if self.skips and epoch != EVALUATION else (index,)
        for candidate in tried:
            try:
                return self.sample(epoch, candidate % len(self), *draw)
            except ConfigError:
                raise
            except Exception as error:
                problem = error
        what = f"sample {self.number(index)} of the {self.name} cannot be read ({_line(problem)})"
        if len(tried) > 1:
            raise ConfigError(f"{what}, nor can the {TRIED - 1} after it; type loader.on_error=fail") from problem
        raise RuntimeError(f"{what}; to take the next one in its place, type loader.on_error=skip") from problem

    def sample(self, epoch: int, index: int, *draw: int) -> Any:
        """A transformed sample."""
        seed_all(fold_in(self.seed, epoch, self.number(index), SAMPLE, *draw))
        sample = self.dataset[index]
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def pair_of(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets) of a collated batch: a pair, or a dict with one of TARGET_KEYS, whose other values, or other
    one, are the inputs. Raises ValueError or TypeError for anything else."""
    if not isinstance(batch, Mapping):
        inputs, targets = batch
        return inputs, targets
    (key,) = [key for key in TARGET_KEYS if key in batch]
    others = {name: value for name, value in batch.items() if name != key}
    return next(iter(others.values())) if len(others) == 1 else others, batch[key]


class Stream:
    """An IterableDataset that gives the same items on every rank, read as if they had numbers: in its own order.

    A rank reads all items and keeps its own. Raises ConfigError if it has no length, or ends before it; that it gives
    more is a warning.
    """

    def __init__(self, dataset: Any) -> None:
        try:
            self.length = len(dataset)
        except TypeError:
            what = f"{type(dataset).__name__} is an IterableDataset without a length"
            raise ConfigError(
                f"{what}, and an epoch has one; give it __len__, or a data set with __getitem__"
            ) from None
        self.dataset, self.next = dataset, 0
        self.items: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index < self.next or self.next == 0:
            self.next, self.items = 0, iter(self.dataset)
        for number, item in enumerate(self.items, start=self.next):
            self.next = number + 1
            heartbeat.beat()  # to read what is used already takes a while
            if number == index:
                if self.next == self.length and next(self.items, self) is not self:
                    what = f"{type(self.dataset).__name__} gives more than the {self.length} samples of its __len__"
                    log.warning(f"{what}, and those are never read; correct its __len__")
                return item
        what = f"{type(self.dataset).__name__} ends after {self.next} of {self.length} samples"
        raise ConfigError(f"{what}; correct its __len__, which counts the samples that it gives")


def batches(reader: SampleReader, requests: Iterable[Request], workers: int, pin_memory: bool) -> Iterator[Any]:
    """(inputs, targets) of each request, in order, by `workers` processes that read ahead; in this process without any.

    On Linux the workers are forks: they share the data set, also one that cannot be pickled.
    """
    if workers:
        multiprocessing.util.get_temp_dir()  # workers use it, too: one of its own would outlive a worker that is killed
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_sampler=requests,  # type: ignore[arg-type]  # a request takes the place of a list of numbers
        collate_fn=_as_read,
        num_workers=workers,
        pin_memory=pin_memory,
        worker_init_fn=_prepare_worker,
        multiprocessing_context="fork" if workers and hasattr(os, "fork") else None,
        generator=torch.Generator(),  # by default it draws from the generator of the initial weights
    )
    before = multiprocessing.active_children()
    read = iter(loader)
    started = [child for child in multiprocessing.active_children() if child not in before]
    end = partial(_end, started)
    atexit.register(end)  # Python would wait for ever for workers that ignore its SIGTERM
    with suppress(GeneratorExit):
        try:
            for found in read:
                if isinstance(found, Told):
                    raise ConfigError(found.sentence)
                yield found
        except (OSError, EOFError) as error:  # of a socket or a pipe to a worker
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error later, wherever that is
            if connection.wait([worker.sentinel for worker in started], EXIT_SECONDS):
                raise RuntimeError(f"a DataLoader worker exited ({type(error).__name__})") from error
            raise
    atexit.unregister(end)  # not after an error, whose traceback may hold the workers


def _end(workers: Iterable[Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error
    for worker in workers:
        worker.kill()


def _as_read(found: Any) -> Any:
    return found


def _prepare_worker(_: int) -> None:
    """A worker leaves signals to its rank, which ends it, and ends with it."""
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    _open_again()


def _open_again() -> None:
    """Open the files that are read, such as those of HDF5, a second time. A fork's copy shares the position with all
    other copies, and a worker would read on where another one has stopped."""
    for name in os.listdir(OPEN) if os.path.isdir(OPEN) else ():
        number, link = int(name), f"{OPEN}/{name}"
        with suppress(OSError):  # it is closed by now
            is_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if number > 2 and is_read and os.path.isfile(link):
                own = os.open(link, os.O_RDONLY)
                os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, number, inheritable=False)
                os.close(own)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
