"""A DataLoader whose worker processes start once, end with their rank, and leave no files."""

import atexit
import fcntl
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from lockstep.compat import forget_workers, is_loader_signal_handler, raise_error_of_worker, wait_for_batches
from lockstep.data.samples import Key
from lockstep.distributed.host import end_with_parent
from lockstep.distributed.signals import STOP_SIGNALS
from lockstep.errors import ConfigError

IGNORED_SIGNALS = {*STOP_SIGNALS, signal.SIGHUP}
STANDARD_ERROR = 2
STARTS, START_SECONDS = 3, 10.0  # attempts to start the workers, and the time in which a worker begins
CHECK_SECONDS = 0.2  # between two looks at the workers of a process that waits for a batch
END_SECONDS = 1.0  # a killed worker ends at most so long after its connection


class Source(Protocol):
    """What the workers read, as `Samples`."""

    def __getitems__(self, keys: Sequence[Key], /) -> Any:
        """What was read of one batch."""

    def collate(self, read: Any, /) -> tuple[Any, Any] | ConfigError:
        """(inputs, targets) of it, or a sentence for the user."""


class DatasetReader:
    """Reads batches of samples, in order, with `workers` processes; in this process if there are none.

    The workers start here and stay until `close`, over all epochs and evaluations. On Linux they are forks of this
    process: they share its data set, also one that cannot be pickled, and start within milliseconds. A fork copies the
    locks that other threads hold, so build a reader before training starts, while such threads are idle.
    """

    def __init__(self, samples: Source, workers: int, pin_memory: bool) -> None:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._batches, self._begun = _BatchList(), context.Semaphore(0)
        self._loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]  # it has all that is used of a Dataset
            batch_sampler=self._batches,
            collate_fn=samples.collate,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            worker_init_fn=partial(_prepare_worker, os.getpid(), self._begun),
            multiprocessing_context=context if workers else None,
            generator=torch.Generator(),  # by default it draws from the generator of the initial weights
        )
        self._workers: list[multiprocessing.process.BaseProcess] = []
        if workers:
            # A worker hands over tensors through a socket in its rank's folder for temporary files. Made before the
            # workers fork, it is one folder for all of them, and is removed with the rank, also if they are killed.
            multiprocessing.util.get_temp_dir()
            self._start(workers)
            self._owner = os.getpid()
            # Python waits at its exit for workers that still run, and these ignore the signal that it sends them.
            atexit.register(self.close)

    def _start(self, workers: int) -> None:
        """Start the workers, which wait for the first batch, and start them again if one does not begin.

        Before Python 3.12 a fork can wait for ever for a lock that a thread of torch held when it was made.
        """
        others = multiprocessing.active_children()
        for _ in range(STARTS):
            with _without_sigchld_handler():
                iterator: Any = iter(self._loader)
            wait_for_batches(iterator, self._wait_for_batch)
            self._workers = [child for child in multiprocessing.active_children() if child not in others]
            if all(self._begun.acquire(timeout=START_SECONDS) for _ in range(workers)):
                return
            self._end_workers()
            while self._begun.acquire(block=False):
                pass
        raise RuntimeError(f"a process that loads data did not begin within {START_SECONDS:g} s, {STARTS} times")

    def read(self, batches: Iterable[Sequence[Key]]) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each batch. A pass that was left early does not disturb the next one.

        Samples that cannot be read may be missing, see `Samples`.
        """
        self._batches.batches = batches
        try:
            for loaded in self._loader:
                if isinstance(loaded, ConfigError):
                    raise loaded
                inputs, targets = loaded
                yield inputs, targets
        except (ConnectionError, EOFError) as error:  # of the connection to a worker, or of the data set
            ends = [worker.sentinel for worker in self._workers]
            if not ends or not multiprocessing.connection.wait(ends, END_SECONDS):
                raise
            raise RuntimeError("DataLoader worker exited while it passed on a batch") from error

    def _wait_for_batch(self, get: Callable[[float], Any], timeout: float = CHECK_SECONDS) -> Any:
        """torch's `get` with a shorter timeout. Raises RuntimeError, with the cause, if a worker is dead or dies."""
        raise_error_of_worker()
        try:
            return get(timeout)
        except RuntimeError as error:
            for worker in self._workers:
                code = worker.exitcode
                if code is not None:
                    end = f"is killed by signal: {signal.strsignal(-code)}" if code < 0 else f"exited with code {code}"
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) {end}") from error
            raise

    def close(self) -> None:
        """End the workers at once, a busy one too. They have nothing to save."""
        atexit.unregister(self.close)
        if self._workers and os.getpid() != self._owner:  # a fork of their owner ends
            return
        self._end_workers()

    def _end_workers(self) -> None:
        if self._workers:  # first: torch's handler, where user code has installed it, raises an error for their deaths
            forget_workers(self._loader)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
            # torch names a tensor's memory for some microseconds. A worker that is killed then leaves the name.
            for left in Path("/dev/shm").glob(f"torch_{worker.pid}_*"):
                left.unlink(missing_ok=True)
        self._workers = []


class _BatchList:
    """A batch sampler: torch asks it for its batches at the start of each pass."""

    def __init__(self) -> None:
        self.batches: Iterable[Sequence[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return map(list, self.batches)


@contextmanager
def _without_sigchld_handler() -> Iterator[None]:
    """Take torch's handler of SIGCHLD, which the block installs, out again: `_wait_for_batch` looks at the workers.

    The handler raises its error about a dead worker anywhere.
    """
    before = signal.getsignal(signal.SIGCHLD)
    if is_loader_signal_handler(before):  # of a DataLoader of the user's
        before = signal.SIG_DFL
    yield
    if threading.current_thread() is threading.main_thread():  # others have no handlers
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _prepare_worker(rank: int, begun: Semaphore, number: int) -> None:
    """Runs first in each worker. The worker ends with its rank, and ignores the signals that ask for a stop.

    rank: the process that reads what this worker, worker `number`, has loaded. begun: tells it that the worker begins.
    """
    _separate_descriptors()
    begun.release()
    for ignored in IGNORED_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL, parent=rank)


def _separate_descriptors() -> None:
    """Close the copies of the rank's sockets and named pipes, and open the files that it reads a second time.

    While a copy of a socket is open, other ranks do not notice that the rank has closed its own. A copied file has one
    position for the rank and all its workers: each of them would read on where another one has stopped.
    """
    with suppress(FileNotFoundError), open(os.devnull) as null:  # no /proc on macOS, where nothing is copied
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if number > STANDARD_ERROR:
                    _separate(number, null.fileno())


def _separate(number: int, null: int) -> None:
    """As `_separate_descriptors`, for one. Its number stays in use: an object reads from it, or closes it again."""
    status, link = os.fstat(number), f"/proc/self/fd/{number}"
    mode = status.st_mode
    if stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and not os.readlink(link).startswith("pipe:")):
        os.dup2(null, number)
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    has_name = status.st_nlink > 0  # into one without, a worker writes its stack behind those of others
    if stat.S_ISREG(mode) and has_name and flags & os.O_ACCMODE != os.O_WRONLY:
        own = os.open(link, flags & (os.O_ACCMODE | os.O_APPEND))
        try:
            os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, number, inheritable=os.get_inheritable(number))
        finally:
            os.close(own)
