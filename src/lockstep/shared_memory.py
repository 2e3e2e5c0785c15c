"""Sums over the ranks of one machine through memory that all of them see, where sockets cost more than the adding up."""

import os
import select
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from lockstep.refusal import Refusal

PIECE = 2**20  # values added up at once: enough that waiting is little, few enough to stay in a cache


class SharedSum:
    """Sums vectors, of up to `length` values as a rule, over the ranks of `world`, which must be CPUs of one machine.

    Every rank lays its vector into a slot of its own, adds up one part of all slots, and takes the whole sum: each part is
    added up once, so all ranks hold the same bits. Ranks wait for each other by a byte through a pipe: nobody spins
    where there are more ranks than cores, and a rank that ends is noticed at once. Raises Refusal, on all ranks, for GPUs
    and for ranks that do not see one another's files.
    """

    def __init__(self, world, length, dtype):
        self.world, peers, length = world, [rank for rank in range(world.size) if rank != world.rank], min(length, PIECE)
        values = (world.size + 1) * length
        possible = sys.platform == "linux" and world.device.type == "cpu" and world.local_size >= world.size
        folder = Path(world.from_leader(_furnish(world.size, values * dtype.itemsize) if world.leads and possible else ""))
        if not possible or not all(world.gather(folder.exists())):  # containers of one machine may each have a /dev/shm
            if world.leads and possible:
                shutil.rmtree(folder)
            raise Refusal("gradient_sync=shared_memory is for CPU ranks on one Linux machine; type gradient_sync=all_reduce")
        self.slots = torch.from_file(str(folder / "slots"), shared=True, size=values, dtype=dtype).view(-1, length)
        self.heard = {os.open(folder / f"{peer}-{world.rank}", os.O_RDONLY | os.O_NONBLOCK): peer for peer in peers}
        world.barrier()  # a pipe can be opened for writing once somebody reads it
        self.told = {os.open(folder / f"{world.rank}-{peer}", os.O_WRONLY): peer for peer in peers}
        world.barrier()
        if world.leads:
            shutil.rmtree(folder)  # names only: what is open stays until the last rank is gone, however it goes

    def __call__(self, vector, rank, size):
        """Sum `vector` (n,) over the ranks in place. Raises TimeoutError or ConnectionError for a rank that does not come."""
        for piece in vector.split(self.slots.shape[1]):
            slots, total = self.slots[:size, : len(piece)], self.slots[size, : len(piece)]
            slots[rank].copy_(piece)
            self._meet()
            torch.sum(slots.tensor_split(size, dim=1)[rank], dim=0, out=total.tensor_split(size)[rank])
            self._meet()
            piece.copy_(total)

    def _meet(self):
        """Wait until every rank is here. A byte in a pipe also orders memory: what was written before it is seen after it."""
        for pipe, peer in self.told.items():
            try:
                os.write(pipe, b".")
            except BrokenPipeError:
                raise ConnectionError(f"rank {peer} is gone: closed by peer") from None
        for pipe, peer in self.heard.items():
            arrival = select.poll()
            arrival.register(pipe, select.POLLIN)
            if not arrival.poll(1000 * self.world.timeout):
                raise TimeoutError(f"Timed out waiting {self.world.timeout:g} s for rank {peer}")
            if not os.read(pipe, 1):
                raise ConnectionError(f"rank {peer} is gone: closed by peer")


def _furnish(size, length):
    """A folder with a file of `length` bytes and a pipe for each pair of ranks; in memory, if there is room."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize > length  # a container may have 64 MB
    folder = tempfile.mkdtemp(prefix="lockstep-", dir=memory if roomy else None)
    for writer in range(size):
        for reader in range(size):
            os.mkfifo(f"{folder}/{writer}-{reader}")
    with open(f"{folder}/slots", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, length)  # a file that turned out too small would end a rank by SIGBUS
    return folder
