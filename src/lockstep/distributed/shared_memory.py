"""Sums over the ranks of one machine through shared memory, faster there than through sockets."""

import mmap
import os
import select
import shutil
import sys
import tempfile
from collections.abc import Callable
from io import FileIO
from pathlib import Path

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
    ranks than cores, and a rank that exits is noticed at once."""

    def __init__(self, world: World, length: int, dtype: torch.dtype) -> None:
        self.world, length, size = world, min(length, PIECE), world.size
        possible = sys.platform == "linux" and world.device.type == "cpu" and world.local_size >= size
        created, problem = "", "" if possible else "is for CPU ranks on one Linux machine"
        try:
            if world.is_rank_zero and possible:
                created, problem = _create_folder(size, (size + 1) * length * dtype.itemsize)
            name, problem = world.broadcast_json([created, problem])
            is_seen = os.path.exists(name)  # containers of one machine may each have their own /dev/shm
            if problem or not all(world.all_gather_json(is_seen)):
                reason = problem or "needs ranks that share /dev/shm"
                raise ConfigError(f"gradient_sync=shared_memory {reason}; type gradient_sync=all_reduce")
            self._open(Path(name), length, dtype)
        except FileNotFoundError as error:  # so that this rank's error is told as an echo
            raise ConnectionError(f"rank 0 is gone, and has removed {error.filename}") from None
        finally:
            if created:  # only the names go: open files stay until the last rank closes them or exits
                shutil.rmtree(created, ignore_errors=True)

    def _open(self, folder: Path, length: int, dtype: torch.dtype) -> None:
        with (folder / "slots").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self.slots = torch.frombuffer(memory, dtype=dtype).view(-1, length)  # one per rank, and the sum
        rank, flags = self.world.rank, os.O_RDONLY | os.O_NONBLOCK
        peers = [peer for peer in range(self.world.size) if peer != rank]
        self.readers = {peer: FileIO(os.open(folder / f"{peer}-{rank}", flags)) for peer in peers}
        self.world.barrier()  # a pipe can be opened for writing only after it is open for reading
        self.writers = {peer: FileIO(os.open(folder / f"{rank}-{peer}", os.O_WRONLY), "w") for peer in peers}
        self.world.barrier()

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


def _create_folder(ranks: int, size: int) -> tuple[str, str]:
    """(a folder in memory, why it cannot be used): with a file of `size` bytes and a pipe for each pair."""
    folder = ""
    try:
        folder = tempfile.mkdtemp(prefix="lockstep-", dir="/dev/shm")
        for pair in range(ranks * ranks):
            os.mkfifo(f"{folder}/{pair // ranks}-{pair % ranks}")
        with open(f"{folder}/slots", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # without it a full disk would end a rank by SIGBUS
        return folder, ""
    except OSError as error:  # a container may have 64 MB
        return folder, f"finds no room for {size / 2**20:.1f} MB in /dev/shm ({error.strerror or error})"
