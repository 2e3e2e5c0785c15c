"""Sums over the ranks of one machine through shared memory, faster there than through sockets."""

import mmap
import os
import select
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import FileIO

import torch
from torch import Tensor

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat

PIECE = 2**20  # values summed at once: enough that waiting costs little, few enough to stay in a cache
LONGEST_WAIT = 2**31 - 1  # milliseconds, of poll

SumInPlace = Callable[[Tensor], object]
"""Takes a vector (n,), which becomes the sum over all ranks. The returned value is not used."""


class SharedMemorySum:
    """Sums vectors over the ranks of `world`, those longer than `length` in pieces. Raises ConfigError on all ranks if
    they are not CPU ranks of one machine that see each other's files. Each rank copies its vector into its own slot,
    sums one part of all slots, and copies the whole sum back. Each part is summed once, in the order of `tree_sum`, so
    all ranks hold the same bits. Ranks wait for each other by a byte through a pipe: no rank spins if there are more
    ranks than cores, and a rank that exits is noticed at once. Memory and pipes have no names, and ranks open each
    other's in /proc: nothing stays of a rank that is killed, and a small /dev/shm is no limit."""

    def __init__(self, world: World, length: int, dtype: torch.dtype) -> None:
        self.world, length, size = world, min(length, PIECE), world.size
        self.readers, self.writers = dict[int, FileIO](), dict[int, FileIO]()
        with ExitStack() as held:  # until all ranks have opened them
            inode, paths, problem = 0, list[str](), "is for CPU ranks on one Linux machine"
            if sys.platform == "linux" and world.device.type == "cpu" and world.local_size >= size:
                inode, paths, problem = self._create((size + 1) * length * dtype.itemsize, held)
            told = world.all_gather_json([problem, inode, paths])
            problem = next((said for said, *_ in told if said), "")
            with suppress(OSError):  # of containers that each have a /proc; or the other rank is gone, as a sum tells
                if not problem and os.stat(told[0][2][0]).st_ino == told[0][1]:
                    with open(told[0][2][0], "r+b") as file:
                        memory = mmap.mmap(file.fileno(), 0)
                    self.slots = torch.frombuffer(memory, dtype=dtype).view(-1, length)  # one per rank, and the sum
                    for peer in self.readers:
                        self.writers[peer] = FileIO(os.open(told[peer][2][world.rank], os.O_WRONLY), "w")
            is_open = len(self.writers) == size - 1
            if problem or not all(world.all_gather_json(is_open)):
                reason = problem or "needs ranks that see each other in /proc"
                raise ConfigError(f"gradient_sync=shared_memory {reason}; type gradient_sync=all_reduce")

    def _create(self, size: int, held: ExitStack) -> tuple[int, list[str], str]:
        """Memory of `size` bytes, of which that of rank 0 is used, and a pipe from each other rank. Returns the inode
        of the memory, the files for each rank, this one's is the memory, and what is wrong."""
        try:
            files = dict[int, FileIO]()
            for of in range(self.world.size):
                if of == self.world.rank:
                    files[of] = held.enter_context(FileIO(os.memfd_create("lockstep"), "r+"))
                    os.posix_fallocate(files[of].fileno(), 0, size if of == 0 else 1)  # else SIGBUS without memory
                else:
                    reader, writer = os.pipe()
                    held.callback(os.close, writer)
                    files[of] = self.readers[of] = FileIO(reader)
        except OSError as error:  # such as too many open files
            return 0, [], f"cannot be set up ({error.strerror})"
        inode = os.fstat(files[self.world.rank].fileno()).st_ino
        return inode, [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files.values()], ""

    def __call__(self, vector: Tensor) -> None:
        """Sum `vector` (n,) in place. Raises TimeoutError for a rank that does not come, ConnectionError for one that
        has exited."""
        rank, size = self.world.rank, self.world.size
        heartbeat.sums(len(vector))
        for piece in torch.split(vector, self.slots.shape[1]):
            slots, total = self.slots[:size, : len(piece)], self.slots[size, : len(piece)]
            slots[rank].copy_(piece)
            self._wait_for_all()
            total.tensor_split(size)[rank].copy_(tree_sum(list(slots.tensor_split(size, dim=1)[rank])))
            self._wait_for_all()
            piece.copy_(total)
        heartbeat.sums(0)

    def _wait_for_all(self) -> None:
        """Wait until every rank is here. A byte in a pipe also orders memory: its reader sees all earlier writes."""
        for peer, pipe in self.writers.items():
            try:
                pipe.write(b".")
            except BrokenPipeError:
                raise ConnectionError(f"rank {peer} is gone: closed by peer") from None
        for peer, pipe in self.readers.items():
            arrival = select.poll()
            arrival.register(pipe, select.POLLIN)
            if not arrival.poll(min(1000 * self.world.timeout, LONGEST_WAIT)):
                raise TimeoutError(f"Timed out waiting {self.world.timeout:g} s for rank {peer}")
            if not pipe.read(1):
                raise ConnectionError(f"rank {peer} is gone: closed by peer")


def tree_sum(vectors: list[Tensor]) -> Tensor:
    """The sum of vectors (n,), which it overwrites: neighbours in pairs, then pairs of pairs, always in this order."""
    while len(vectors) > 1:
        alone = vectors[-1:] if len(vectors) % 2 else []
        vectors = [one.add_(other) for one, other in zip(vectors[::2], vectors[1::2], strict=False)] + alone
    return vectors[0]
