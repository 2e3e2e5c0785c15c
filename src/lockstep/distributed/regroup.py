"""The process group of ranks that are replaced while the others train on (`launch.recover=live`).

The launcher holds the store. There it publishes generations: which process is which rank. All ranks of a generation
meet in the store, exchange addresses, and reconfigure their gloo group in place, which takes milliseconds. torch calls
this experimental and its names begin with an underscore: they are used in this file alone.
"""

import inspect
import logging
import math
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from lockstep.distributed.generations import (
    GROWN,
    MEET_AGAIN,
    OVER,
    WAITS,
    Generation,
    Notice,
    has_finished,
    read_generation,
)
from lockstep.distributed.store import STORE_TIMEOUT
from lockstep.errors import DidNotJoin
from lockstep.monitor import rank as monitor
from lockstep.monitor.death_causes import tells_of_lost_rank
from lockstep.monitor.exception_record import is_local, message_of

log = logging.getLogger(__name__)

PROCESSES = 2**15  # more than a run ever starts. gloo wants a number for each that is below this one.
# For connections between ranks that are known to be there, which takes milliseconds. gloo waits as long for one that
# dies in the meantime. After each failure ranks wait twice as long: the machine may be slow.
FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=0.4), timedelta(seconds=6.4)
PAUSE = 0.002  # seconds between two requests to the store
ASK_AFTER = 0.5  # seconds in which the launcher has mostly noticed a death
NEWS_LIMIT = 10.0  # seconds in which it has surely noticed

GLOO_ERROR = re.compile(r"gloo|not connected", re.IGNORECASE)  # gloo names its source file in most errors


def can_reconfigure() -> bool:
    """Whether this torch can give a gloo group other members in place (2.14 and later)."""
    names = ("_reconfigure", "_get_reconfigure_handle")
    known = inspect.signature(dist.init_process_group).parameters
    return all(hasattr(dist, name) for name in names) and "enable_reconfigure" in known


def is_lost_rank(error: BaseException) -> bool:
    """Whether `error` can come from the death of another rank."""
    if is_local(error) or isinstance(error, DidNotJoin):
        return False
    words = message_of(error)
    return isinstance(error, ConnectionError) or tells_of_lost_rank(words) or GLOO_ERROR.search(words) is not None


class Member:
    """This process among those that a live launcher started: number `process`. It has a rank once it is needed.

    is_first: it is of the first generation. store, notice: the launcher's. launcher: a connection to it. on_needed:
    called once this process has a rank.
    """

    def __init__(
        self,
        process: int,
        is_first: bool,
        store: dist.Store,
        notice: Notice,
        launcher: "Connection[Any, Any]",
        on_needed: Callable[[], None],
    ) -> None:
        self.process, self.is_first, self.store, self.notice = process, is_first, store, notice
        self.launcher, self.on_needed = launcher, on_needed
        self.generation = Generation()
        self.has_joined = False  # any group
        self.wait = FIRST_WAIT  # for connections
        self.connections: dict[int, int] = {}  # to other ranks: {file descriptor: inode}

    def report(self, error: str | None) -> None:
        """Tell the launcher that this process is ready to become a rank, or what is wrong."""
        with suppress(OSError):
            self.launcher.send(error)

    def wait_until_needed(self) -> None:
        """Wait until the launcher gives this process a rank. Ends the process if the run ends before."""
        try:
            self.launcher.recv()
        except (EOFError, OSError):
            os._exit(0)
        self.take_rank()
        self.on_needed()

    def take_rank(self) -> None:
        """From now on this process is what the newest generation says. Its environment says which rank that is."""
        self.generation = read_generation(self.store, self.notice.read()[0])
        rank, size = self.generation.processes.index(self.process), len(self.generation.processes)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        monitor.set_rank(rank, size)

    @property
    def is_outdated(self) -> bool:
        """Whether the launcher has published a newer generation than this process's."""
        return self.notice.read()[0] > self.generation.number

    @property
    def is_over(self) -> bool:
        """Whether the launcher ends the run, and publishes no more generations."""
        return self.notice.read()[1] == OVER

    def open_group(self, timeout: timedelta) -> None:
        """What `join` can do before this process has a rank: nothing connects yet."""
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("live/group", self.store),
            rank=self.process % PROCESSES,  # must differ between all processes that ever join
            world_size=PROCESSES,
            timeout=timeout,
            enable_reconfigure=True,
        )

    def join(self, timeout: timedelta) -> None:
        """Form the group of this process's generation.

        Raises DidNotJoin if its ranks do not come within `timeout`, and ConnectionError if one of them dies.
        """
        if not dist.is_initialized():
            self.open_group(timeout)
        newcomer = self.generation.reason == GROWN and not self.has_joined
        # The others end their step, or their evaluation, before they meet the new rank.
        longest = math.inf if newcomer else timeout.total_seconds()
        addresses = self._exchange("address", dist._get_reconfigure_handle(), longest)
        before = _sockets()
        # gloo takes this time to connect, and the store's own to wait for the other ranks' keys.
        self.store.set_timeout(self.wait)
        try:
            dist._reconfigure(uuid=self.generation.number, handles=addresses, timeout=self.wait).wait()
        except RuntimeError as error:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
            raise ConnectionError(f"the ranks could not be connected: {error}") from None
        finally:
            self.store.set_timeout(STORE_TIMEOUT)
            self.connections = dict(_sockets().items() - before.items())
        # A rank that was stopped can connect to others that have given up: it must not wait for them in a collective.
        self._exchange("met", "", timeout.total_seconds())
        self.has_joined, self.wait = True, FIRST_WAIT

    def _exchange(self, what: str, value: str, timeout: float) -> list[str]:
        """The values of all ranks of this generation, in their order."""
        prefix = f"live/{self.generation.number}/{what}"
        self.store.set(f"{prefix}/{self.process}", value)
        keys = [f"{prefix}/{process}" for process in self.generation.processes]
        deadline = time.monotonic() + timeout
        while not self.store.check(keys):
            if self.is_outdated or self.is_over:
                raise ConnectionError("a rank died, or a new one came, before the ranks were connected")
            if time.monotonic() > deadline:
                missing = next(rank for rank, key in enumerate(keys) if not self.store.check([key]))
                raise DidNotJoin(f"rank {missing} did not join the others within {timeout:g} s")
            time.sleep(PAUSE)
        return [self.store.get(key).decode() for key in keys]

    def leave(self) -> None:
        """Close the connections to all ranks. Those that wait for this one get an error at once."""
        # gloo keeps a connection open as long as a collective of any of its threads waits for it, perhaps for ever.
        for descriptor, inode in self.connections.items():
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:  # else gloo has closed it, and the number is another file's
                    connection = socket.socket(fileno=os.dup(descriptor))
                    with connection:
                        connection.shutdown(socket.SHUT_RDWR)
        self.connections = {}

    def await_news(self) -> bool:
        """Wait until the launcher has published a newer generation. False if none comes, or if the run is over.

        If no rank died, the ranks have lost their connections only: the launcher is asked to let them meet again.
        """
        begin = time.monotonic()
        deadline, has_asked = begin + NEWS_LIMIT, False
        while not self.is_outdated:
            if not has_asked and time.monotonic() > begin + ASK_AFTER:
                has_asked = True
                with suppress(OSError):
                    self.launcher.send((MEET_AGAIN, self.generation.number))
            state = self.notice.read()[1]
            if state == WAITS:  # for a new rank. It publishes in any case
                deadline = time.monotonic() + NEWS_LIMIT
            if state == OVER or time.monotonic() > deadline:
                return False
            time.sleep(PAUSE)
        return True

    def finish(self, value: Any) -> bool:
        """Hand rank 0's `value` to the launcher, and wait until all ranks are done. False if one died before.

        In that case a newer generation exists, whose ranks do the end again.
        """
        rank, number = self.generation.processes.index(self.process), self.generation.number
        if rank == 0:
            self.launcher.send(value)
        self.store.set(f"live/{number}/done/{rank}", "")
        while not has_finished(self.store, self.generation):
            if self.is_outdated:
                return False
            time.sleep(PAUSE)
        return True


_member: Member | None = None


def member() -> Member | None:
    """This process as a member, None if its launcher does not replace ranks."""
    return _member


@contextmanager
def membership(member: Member) -> Iterator[Member]:
    """Inside the block this process is `member`."""
    global _member
    _member = member
    try:
        yield member
    finally:
        _member = None


def _sockets() -> dict[int, int]:
    """{file descriptor: inode} of this process's sockets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor with which the folder is read
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
