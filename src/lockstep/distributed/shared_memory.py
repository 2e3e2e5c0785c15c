"""Sums over the ranks of one machine through shared memory, faster there than through sockets."""

import mmap
import os
import select
import sys
from collections.abc import Callable
from contextlib import ExitStack
from io import FileIO

import torch
from torch import Tensor

from lockstep.distributed.world import World
from lockstep.errors import ConfigError

PIECE = 2**20  # values summed at once: enough that waiting costs little, few enough to stay in a cache
NOT_HERE = "gradient_sync=shared_memory is for CPU ranks on one Linux machine; type gradient_sync=all_reduce"
CANNOT = "gradient_sync=shared_memory cannot be set up (REASON); type gradient_sync=all_reduce"  # too many open files

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
        self.world, length, rank, size = world, min(length, PIECE), world.rank, world.size
        self.readers, self.writers = dict[int, FileIO](), dict[int, FileIO]()
        if sys.platform != "linux" or world.device.type != "cpu" or world.local_size < size:
            raise ConfigError(NOT_HERE)
        with ExitStack() as held:  # until all ranks have opened them
            with world.refusals_on_all(cannot=CANNOT):
                own = held.enter_context(FileIO(os.memfd_create("lockstep"), "r+"))  # that of rank 0 is used
                count = (size + 1) * length if rank == 0 else 1
                os.posix_fallocate(own.fileno(), 0, count * dtype.itemsize)  # else SIGBUS without memory
                for peer in {*range(size)} - {rank}:
                    reader, writer = os.pipe()
                    held.callback(os.close, writer)
                    self.readers[peer] = FileIO(reader)
                files = [self.readers.get(of, own) for of in range(size)]
            told = world.all_gather_json([f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files])
            with world.refusals_on_all(cannot=CANNOT):
                with open(told[0][0], "r+b") as file:
                    memory = mmap.mmap(file.fileno(), 0)
                self.slots = torch.frombuffer(memory, dtype=dtype).view(-1, length)  # one per rank, and the sum
                for peer in self.readers:
                    self.writers[peer] = FileIO(os.open(told[peer][rank], os.O_WRONLY), "w")

    def __call__(self, vector: Tensor) -> None:
        """Sum `vector` (n,) in place. Raises TimeoutError for a rank that does not come, ConnectionError for one that
        has exited."""
        rank, size = self.world.rank, self.world.size
        for piece in torch.split(vector, self.slots.shape[1]):
            slots, total = self.slots[:size, : len(piece)], self.slots[size, : len(piece)]
            slots[rank].copy_(piece)
            self._wait_for_all()
            total.tensor_split(size)[rank].copy_(tree_sum(list(slots.tensor_split(size, dim=1)[rank])))
            self._wait_for_all()
            piece.copy_(total)

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
            if not arrival.poll(1000 * self.world.timeout):
                raise TimeoutError(f"Timed out waiting {self.world.timeout:g} s for rank {peer}")
            if not pipe.read(1):
                raise ConnectionError(f"rank {peer} is gone: closed by peer")


def tree_sum(vectors: list[Tensor]) -> Tensor:
    """The sum of vectors (n,), which it overwrites: neighbours in pairs, then pairs of pairs, always in this order."""
    while len(vectors) > 1:
        alone = vectors[-1:] if len(vectors) % 2 else []
        vectors = [one.add_(other) for one, other in zip(vectors[::2], vectors[1::2], strict=False)] + alone
    return vectors[0]
