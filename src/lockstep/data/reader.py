"""Reads samples one by one, in workers or in the rank: each has its own random numbers, and its errors name it."""

import atexit
import fcntl
import multiprocessing
import multiprocessing.util
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.data.partition import Array, Part, fold_in, random_states_kept, seed_all
from lockstep.data.source import TARGET_KEYS, unwrapped
from lockstep.distributed.host import end_with_parent
from lockstep.distributed.signals import STOP_SIGNALS
from lockstep.errors import ConfigError, first_line

EVALUATION = -1  # the epoch of samples that are evaluated: their random numbers are the same each time
SAMPLE, COLLATE = 1, 3  # folded into the seeds of what samples and a collate_fn draw
EXIT_SECONDS = 2.0  # from a lost connection to a worker until its end is seen
OPEN = "/proc/self/fd"  # the files that a process has open; not on macOS

Check = Callable[[Any, Any], None]  # of the targets of a batch with the numbers of its samples, as of `Task`


class Request(NamedTuple):
    """What one forward pass of a rank reads: one small message to a worker. epoch: EVALUATION for one. start: samples
    of the epoch before the global batch. places, numbers: (n,) where the samples stand in the epoch, and their numbers
    in the data set; the first ones may be before those of `part`."""

    epoch: int
    start: int
    part: Part
    places: Array
    numbers: Array


def request_of(numbers: Sequence[int], epoch: int = EVALUATION) -> Request:
    """For samples of these numbers alone."""
    chosen = np.asarray(numbers)
    return Request(epoch, 0, Part(0, 0, len(chosen)), chosen, chosen)


@dataclass(eq=False)
class SampleReader(Dataset[Any]):
    """A map-style data set as torch's DataLoader reads it.

    Before a sample is read and transformed, torch, numpy and random are seeded with (seed, epoch, its place in the
    epoch): so its random numbers are the same in whichever rank or worker, and after a resume.

    name: for messages, such as "training data". transforms: each gets the whole sample, as those of torchvision's v2.
    collate_fn: list of samples -> (inputs, targets).
    """

    dataset: Any
    name: str
    seed: int
    transforms: Sequence[Callable[[Any], Any]] = ()
    collate_fn: Callable[[list[Any]], Any] = default_collate
    check: Check | None = None

    def __post_init__(self) -> None:
        self.indices = unwrapped(self.dataset)[1]

    def __len__(self) -> int:
        return len(self.dataset)

    def whole(self, numbers: Any) -> Any:
        """The numbers, or number, that these samples have in the whole data set, of which this may be a part."""
        return numbers if self.indices is None else self.indices[numbers]

    def __getitems__(self, request: Request) -> list[Any]:
        """[(inputs, targets)] of the batch, or [the ConfigError], which needs no traceback of a worker."""
        try:
            return [self.read(request)]
        except ConfigError as error:
            return [error]

    def read(self, request: Request) -> tuple[Any, Any]:
        """(inputs, targets). A part of no samples gets one for its shape, which the loader leaves out."""
        epoch, places, numbers = request.epoch, request.places.tolist() or [0], request.numbers.tolist() or [0]
        with random_states_kept():
            samples = [self._sample(epoch, *pair) for pair in zip(places, numbers, strict=True)]
            seed_all(fold_in(self.seed, epoch, request.start, COLLATE))
            try:
                inputs, targets = pair_of(self.collate_fn(samples))
            except Exception as error:
                if "shared memory" in str(error):  # of a worker: no fault of the samples
                    raise
                odd = next((place for place, one in enumerate(samples) if not self._fit(samples[0], one)), -1)
                pair = sorted({int(self.whole(numbers[place])) for place in (0, odd)})
                said = f"samples {pair} of the {self.name} make no batch of inputs and targets"
                advice = "give all samples one form, (inputs, target) or a dict with the key target or label, and one "
                advice += "shape, or type loader.collate_fn='{_target_:<module>.<function>}'"
                raise ConfigError(f"{said} ({first_line(error)}); {advice}") from error
        if len(request.numbers):
            self.check_targets(targets, numbers)
        return inputs, targets

    def _fit(self, sample: Any, other: Any) -> bool:
        with suppress(Exception):
            pair_of(self.collate_fn([sample, other]))
            return True
        return False

    def check_targets(self, targets: Any, numbers: Sequence[int]) -> None:
        """numbers: of their samples in this data set. Raises ConfigError for targets that the task does not take."""
        if self.check is not None:
            try:
                self.check(targets, self.whole(numbers))
            except ConfigError as error:
                raise ConfigError(f"in the {self.name}, {error}") from error

    def _sample(self, epoch: int, place: int, number: int) -> Any:
        seed_all(fold_in(self.seed, epoch, place, SAMPLE))
        applied: Any = None
        try:
            sample = self.dataset[number]
            for applied in self.transforms:
                sample = applied(sample)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            name = getattr(applied, "__name__", type(applied).__name__)
            by = f" by {name}, which gets (inputs, target), as v2's transforms do" if applied else ""
            raise RuntimeError(f"sample {self.whole(number)} of the {self.name} cannot be read{by} ({why})") from error
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


def batches(reader: SampleReader, requests: Iterable[Request], workers: int, pin_memory: bool) -> Iterator[Any]:
    """(inputs, targets) of each request, in order, by `workers` processes that read ahead; in this process without any.
    On Linux the workers are forks: they share the data set, also one that cannot be pickled."""
    if workers:
        multiprocessing.util.get_temp_dir()  # workers use it, too: one of its own would outlive a worker that is killed
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_sampler=requests,  # type: ignore[arg-type]  # a request takes the place of a list of numbers
        collate_fn=itemgetter(0),
        num_workers=workers,
        pin_memory=pin_memory,
        worker_init_fn=_prepare_worker,
        multiprocessing_context="fork" if workers and hasattr(os, "fork") else None,
        generator=torch.Generator(),  # by default it draws from the generator of the initial weights
    )
    before = multiprocessing.active_children()
    read = iter(loader)
    started = [child for child in multiprocessing.active_children() if child not in before]

    @atexit.register  # Python would wait for ever for workers that ignore its SIGTERM
    def end() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error
        for worker in started:
            worker.kill()

    with suppress(GeneratorExit):
        try:
            for found in read:
                if isinstance(found, ConfigError):
                    raise found
                yield found
        except (OSError, EOFError) as error:  # of a socket or a pipe to a worker
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error later, wherever that is
            if connection.wait([worker.sentinel for worker in started], EXIT_SECONDS):
                raise RuntimeError(f"a DataLoader worker exited ({type(error).__name__})") from error
            raise
    atexit.unregister(end)  # not after an error, whose traceback may hold the workers


def _prepare_worker(_: int) -> None:
    """A worker leaves signals to its rank, which ends it, and ends with it. Files that are read, such as those of HDF5,
    it opens a second time: a fork's copy shares the position with all other copies, which would read on from there."""
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    for name in os.listdir(OPEN) if os.path.isdir(OPEN) else ():
        file, link = int(name), f"{OPEN}/{name}"
        with suppress(OSError):  # it is closed by now
            is_read = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if file > 2 and is_read and os.path.isfile(link):
                own = os.open(link, os.O_RDONLY)
                os.lseek(own, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, file, inheritable=False)
                os.close(own)
