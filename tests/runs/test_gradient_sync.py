"""Ways of averaging gradients: shared memory whose other rank is gone, and what approximations round off."""

import os
import resource

import pytest
import torch

from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

SMALL = ["model=mlp", "model.width=32", "trainer.max_steps=6", "strategy.bucket_cap_mb=0.001", "logger=[]"]


def refusal_beside_a_rank_without_files():
    """Rank 1 may open no more files."""
    from lockstep.distributed.shared_memory import SharedMemorySum

    with join_world("gloo", 60) as world:
        world.barrier()
        if not world.is_rank_zero:
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with pytest.raises(ConfigError) as raised:
            SharedMemorySum(world, 100, torch.double)
    return str(raised.value)


def rank_zero_exits():
    """Rank 0 takes part in one sum and exits; rank 1 tries a second sum."""
    from lockstep.distributed.shared_memory import SharedMemorySum

    with join_world("gloo", 60) as world:
        add_up, vector = SharedMemorySum(world, 1500, torch.double), torch.ones(4, dtype=torch.double)
        add_up(vector)
        if world.is_rank_zero:
            return "left"
        assert vector[0] == 2
        with pytest.raises(ConnectionError) as error:
            add_up(vector)
        return str(error.value)


def test_ranks_that_share_memory_notice_at_once_that_one_is_gone():
    assert in_world(2, rank_zero_exits, limit=40) == ["left", "rank 0 is gone: closed by peer"]


def test_shared_memory_that_one_rank_cannot_have_is_refused_on_all():
    said = "gradient_sync=shared_memory cannot be set up (Too many open files); type gradient_sync=all_reduce"
    assert in_world(2, refusal_beside_a_rank_without_files) == [said, said]


def bytes_handed_over(name, length):
    """Bytes that this rank hands to its sends in one sum."""
    from lockstep.strategies import gradient_sync

    handed = []

    def counted(operation, tensor, peer):
        handed.append(tensor.nbytes if operation is torch.distributed.isend else 0)
        return torch.distributed.P2POp(operation, tensor, peer)

    gradient_sync.P2POp = counted
    with join_world("gloo", 60) as world:
        getattr(gradient_sync, name)().add_up(world.rank, world.size, torch.ones(length))
        world.barrier()
    return sum(handed)


def test_the_bytes_sent_are_the_formulas():
    size, length, whole = 4, 10_000, 40_000
    assert in_world(size, bytes_handed_over, "Ring", length) == [2 * (size - 1) * whole // size] * size
    server = [(size - 1) * whole] + [whole] * (size - 1)
    assert in_world(size, bytes_handed_over, "ParameterServer", length) == server


def test_approximations_differ_by_what_they_round_off(tmp_path):
    runs = {name: [f"gradient_sync={name}"] for name in ("all_reduce", "fp16", "bf16")}
    runs |= {
        name: ["gradient_sync=powersgd", f"gradient_sync.start_step={n}"] for name, n in (("low", 3), ("late", 100))
    }
    words = [*SMALL, "trainer.precision=fp64", "scheduler=constant"]
    in_world(2, train_all, [composed(f"run_dir={tmp_path / name}", *words, *more) for name, more in runs.items()])
    errors = {name: distance(weights(tmp_path / "all_reduce"), weights(tmp_path / name)) for name in runs}
    assert errors["late"] < 1e-12  # plain all-reduce before its first step
    assert 1e-9 < errors["fp16"] < errors["bf16"] < 1e-2  # 11 bits and 8 bits
    assert 1e-4 < errors["low"] < 0.2
