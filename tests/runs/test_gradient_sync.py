"""Ways of averaging gradients: their sums and the bytes they send."""

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.distributed.world import World, join_world
from support.worlds import in_world

LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 11, 64, 1000, 4097]
SUMS = ["ring_sum", "server_sum", "shared_memory"]


def sum_by(name: str, world: World) -> Any:
    from lockstep.distributed.shared_memory import SharedMemorySum
    from lockstep.strategies.gradient_sync import ring_sum, server_sum

    if name == "shared_memory":
        return SharedMemorySum(world, 1500, torch.double)  # the longest vector is summed in three pieces
    add_up = {"ring_sum": ring_sum, "server_sum": server_sum}[name]
    return lambda vector: add_up(vector, world.rank, world.size)


def sums() -> dict[str, list[tuple[str, float]]]:
    """For each way and each length: the sum's bits, and its distance from an all-reduce's."""
    found: dict[str, list[tuple[str, float]]] = {name: [] for name in SUMS}
    with join_world("gloo", 3_000_000) as world:  # more milliseconds than poll takes
        for name in SUMS:
            add_up = sum_by(name, world)
            for length in LENGTHS:
                generator = torch.Generator().manual_seed(100 * length + world.rank)
                vector = torch.randn(length, dtype=torch.double, generator=generator)
                expected = world.all_reduce_sum(vector.clone())
                add_up(vector)
                bits = hashlib.sha256(vector.numpy().tobytes()).hexdigest()
                found[name].append((bits, (vector - expected).norm().item()))
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_sum_is_the_all_reduce_of_any_vector_with_the_same_bits_on_every_rank(size: int) -> None:
    first, *others = in_world(size, sums)
    assert all(other == first for other in others)
    assert max(distance for found in first.values() for _, distance in found) <= 1e-12


def error_of_the_slow_rank() -> str:
    """Rank 0 fails before rank 1 has opened the shared files, and removes them."""
    from lockstep.distributed.shared_memory import SharedMemorySum

    class FailsOrIsSlow(SharedMemorySum):
        def _open(self, folder: Path, *options: Any) -> None:
            if self.world.is_rank_zero:
                raise RuntimeError("rank 0 fails")
            while folder.exists():
                time.sleep(0.01)
            super()._open(folder, *options)

    with join_world("gloo", 60) as world, pytest.raises((RuntimeError, ConnectionError)) as raised:
        FailsOrIsSlow(world, 100, torch.double)
    return f"{raised.type.__name__}: {raised.value}"


def test_a_rank_that_is_slow_to_open_the_shared_files_is_told_that_rank_0_is_gone() -> None:
    fails, slow = in_world(2, error_of_the_slow_rank)
    assert fails == "RuntimeError: rank 0 fails"
    assert slow.startswith("ConnectionError: rank 0 is gone")


def bytes_handed_over(name: str, length: int) -> int:
    """Bytes that this rank hands to its sends in one sum."""
    from lockstep.strategies import gradient_sync

    handed = []

    def counted(operation: Any, tensor: torch.Tensor, peer: int) -> Any:
        handed.append(tensor.nbytes if operation is torch.distributed.isend else 0)
        return torch.distributed.P2POp(operation, tensor, peer)

    gradient_sync.P2POp = counted  # type: ignore[assignment,misc]
    with join_world("gloo", 60) as world:
        sum_by(name, world)(torch.ones(length))
        world.barrier()
    return sum(handed)


@pytest.mark.parametrize(("size", "length"), [(2, 1000), (4, 10_000)])
def test_the_bytes_sent_are_the_formulas(size: int, length: int) -> None:
    whole = 4 * length
    assert in_world(size, bytes_handed_over, "ring_sum", length) == [2 * (size - 1) * whole // size] * size
    assert in_world(size, bytes_handed_over, "server_sum", length) == [(size - 1) * whole] + [whole] * (size - 1)


def rank_zero_exits() -> tuple[float, str] | None:
    """Rank 0 takes part in one sum and exits; rank 1 tries a second sum."""
    with join_world("gloo", 60) as world:
        add_up, vector = sum_by("shared_memory", world), torch.ones(4, dtype=torch.double)
        add_up(vector)
        if world.is_rank_zero:
            return None
        total = float(vector[0])
        with pytest.raises(ConnectionError) as error:
            add_up(vector)
        return total, str(error.value)


def test_ranks_that_share_memory_notice_at_once_that_one_is_gone() -> None:
    _, answer = in_world(2, rank_zero_exits, limit=40)
    assert answer == (2.0, "rank 0 is gone: closed by peer")
