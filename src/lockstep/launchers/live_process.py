"""What a rank that can be replaced needs around it: its process, the ranks' store, and the pages of all ranks."""

import gc
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.distributed import signals
from lockstep.distributed.environment import RankInfo
from lockstep.distributed.host import end_with_parent
from lockstep.distributed.listening import LOOPBACK
from lockstep.distributed.loss_pages import PAGE_BYTES, PAGES
from lockstep.distributed.store import host_store
from lockstep.launchers.base import Worker
from lockstep.launchers.processes import connect_monitor, run_to_exit
from lockstep.launchers.supervisor import rank_environment

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(eq=False)
class LiveProcess:
    """A process that is a rank or waits to become one. is_ready: it has its data."""

    number: int
    process: Any
    connection: "Connection[Any, Any]"
    is_ready: bool = False
    error: str = ""

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        code: int | None = self.process.exitcode
        return code

    def receive(self) -> list[Any]:
        """What it has sent since the last call."""
        messages = []
        with suppress(EOFError, OSError):  # it has ended
            while self.connection.poll():
                messages.append(self.connection.recv())
        return messages


def run_live_rank(
    number: int, launcher: "Connection[Any, Any]", env: dict[str, str], worker: Worker, args: tuple[Any, ...]
) -> NoReturn:
    """What process `number` runs: `worker(*args)`, which waits until the launcher gives this process a rank."""
    import torch.distributed as dist

    from lockstep.distributed.generations import open_notice
    from lockstep.distributed.regroup import Member, membership

    gc.freeze()  # a collection writes to every object, and memory shared with the parent is copied when written to
    signals.leave_last_line_to_launcher()
    end_with_parent()
    os.environ.update(env)
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), wait_for_workers=False)
    is_first = number < int(env["WORLD_SIZE"])
    member = Member(number, is_first, store, open_notice(env[PAGES]), launcher, on_needed=connect_monitor)
    with membership(member):
        run_to_exit(worker, args, None)


def require_room_for_process() -> None:
    """Raise OSError if this user may start no more processes.

    The helper process that ranks are forked from would end if it could not fork, and all ranks with it.
    """
    program = "/bin/true" if os.path.exists("/bin/true") else sys.executable  # some images have only Python
    os.waitpid(os.posix_spawn(program, [program, "-c", ""], {}), 0)


@contextmanager
def open_store(name: str, size: int) -> Iterator[tuple["Store", dict[str, str]]]:
    """The ranks' store, which only this machine reaches, and what all ranks find in their environment."""
    store = host_store(LOOPBACK, 0)
    node = RankInfo(master_addr=LOOPBACK, master_port=store.port)
    yield store, rank_environment(node, size, size, name)


@contextmanager
def open_pages(ranks: int) -> Iterator[tuple[mmap.mmap, str]]:
    """Memory with a page for each rank and one more, and the path by which ranks open it. It has no name on a disk."""
    descriptor = os.memfd_create("lockstep-pages")
    try:
        size = (ranks + 1) * PAGE_BYTES
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as pages:
            yield pages, f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
