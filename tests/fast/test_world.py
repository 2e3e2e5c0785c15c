"""What ranks say to each other, and which options reach the process group."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.distributed.backend import choose_backend, validate_backend
from lockstep.distributed.signals import StopVote
from lockstep.distributed.world import join_world, require_same_config
from lockstep.errors import ConfigError
from support.worlds import in_world

OPTIONS = {"timeout": 17, "socket_ifname": "lo", "debug": "WARN", "p2p_disable": True, "ib_disable": False}
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "0",
}


def _talk(folder: str) -> dict[str, Any]:
    with join_world("auto", **OPTIONS) as world:
        said: dict[str, Any] = {"rank": world.rank, "gathered": world.all_gather_json([world.rank**2, None])}
        said["told"] = world.broadcast_json({"rank": world.rank + 7, "text": "é" * (9 * world.rank)})
        said["sum"] = world.all_reduce_sum(torch.tensor([1.0, world.rank])).tolist()
        said["found"] = _found_after_one_download(world, Path(folder, "downloaded"))
        said["refused"] = _refusal_of_rank_zero(world)
        vote = StopVote(world, flags=2, pause=0)
        said["votes"] = [vote.cast(world.rank == 1, step == 2 and world.rank == 0) for step in range(4)]
        vote.close()
        said["variables"] = {name: os.environ.get(name) for name in VARIABLES}
        said["threads"] = torch.get_num_threads()
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        said["timeout"] = (world.timeout, backend.options._timeout.total_seconds())
        try:
            seed = {"key": "the same", "seed": world.rank // 2}
            require_same_config(world, seed, seed, hint="type the same seed")
        except ConfigError as error:
            said["differs"] = str(error)
    said["left"] = not dist.is_initialized()
    return said


def _found_after_one_download(world: Any, file: Path) -> bool:
    def download() -> None:
        time.sleep(0.3)
        file.open("x").close()  # "x": a second download would fail

    world.once_per_machine(download)
    return file.exists()


def _refusal_of_rank_zero(world: Any) -> str:
    def refuse() -> None:
        raise ConfigError(f"refused on rank {world.rank}")

    try:
        world.once_per_machine(refuse)
    except ConfigError as error:
        return str(error)
    return ""


def test_three_ranks_speak(tmp_path):
    for rank, said in enumerate(in_world(3, _talk, str(tmp_path))):
        assert said == {
            "rank": rank,
            "gathered": [[0, None], [1, None], [4, None]],
            "told": {"rank": 7, "text": ""},
            "sum": [3.0, 3.0],
            "found": True,  # the first rank of the machine downloaded it, alone
            "refused": "refused on rank 0",
            "votes": [(False, False), (True, False), (True, False), (True, True)],  # one step late, alike everywhere
            "variables": VARIABLES,
            "threads": max(1, len(os.sched_getaffinity(0)) // 3),
            "timeout": (17, 17.0),
            "differs": "seed differs between ranks: 0 on rank 0 and 1 on rank 2; type the same seed",
            "left": True,
        }


def _recorded_votes() -> list[str]:
    with join_world("auto", 60) as world:
        vote = StopVote(world, flags=1, pause=0)
        with torch.profiler.profile() as profiler:
            world.all_reduce_sum(torch.ones(1))
            vote.cast(True)
        vote.close()
        return [event.name for event in profiler.events() if event.name.startswith("gloo:")]


def test_a_profiler_may_stop_before_a_vote_is_counted():
    """A recorded collective that ends after torch's profiler has stopped corrupts the heap."""
    assert in_world(2, _recorded_votes) == [["gloo:all_reduce"]] * 2


def _fail_on_rank_1() -> tuple[str, float] | None:
    began = time.monotonic()
    try:
        with join_world("gloo", 60) as world:
            world.barrier()  # gloo has connected all pairs: before that, the launcher ends who waits
            if world.rank == 1:
                raise ValueError("rank 1 gives up")
            world.barrier()
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return None


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    (peer, waited), (failed, _), _ = in_world(3, _fail_on_rank_1)
    assert failed == "ValueError"
    assert peer == "RuntimeError"
    assert waited < 30  # not for the 60 s of the group


def _state_of(rank: int) -> dict[str, Any]:
    return {
        "layer.weight": torch.full((2, rank + 1), 0.1, dtype=torch.float64).t(),
        "layer.mask": torch.tensor([True, False]),
        "layer.half": torch.tensor(1.5 + rank, dtype=torch.bfloat16),
        "layer.empty": torch.zeros(0, 3),
        "step": [rank, (None, 0.5)],
        "others": {
            "seen": {rank, -1},
            "fixed": frozenset({"a"}),
            "text": b"\x00\xff",
            "more": bytearray(b"1"),
            "z": 1 + 2j,
        },
    }


def _gathered_state() -> list[bool]:
    """On rank 0: whether each rank's state arrived as it was sent."""
    with join_world("gloo", 60) as world:
        gathered = world.gather_state(_state_of(world.rank))
        expected = [_state_of(rank) for rank in range(world.size)][: len(gathered)]
        assert [[_exact(value) for value in state.values()] for state in gathered] == [
            [_exact(value) for value in state.values()] for state in expected
        ]
        return [list(state) == list(_state_of(0)) for state in gathered]


def _exact(value: Any) -> Any:
    return (str(value.dtype), value.shape, value.tolist()) if torch.is_tensor(value) else value


def test_state_is_gathered_bit_for_bit_on_rank_0():
    assert in_world(2, _gathered_state) == [[True, True], []]


def _set_variables(ranks_here: str) -> tuple[dict[str, str], list[str]]:
    os.environ["LOCAL_WORLD_SIZE"] = ranks_here
    with join_world("gloo", 60) as world:
        inside = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        world.barrier()  # a rank that leaves would end the other's connection while it is made
    return inside, [name for name in VARIABLES if name in os.environ]


def test_options_that_are_not_set_leave_the_environment_alone():
    """But for the interface, if the whole world is on this machine: gloo then listens at the loopback address."""
    interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert in_world(1, _set_variables, "1") == [(interface, [])]
    assert in_world(2, _set_variables, "1") == [({}, [])] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_without_gpus_auto_is_gloo_and_nccl_is_refused():
    assert choose_backend("auto", 4) == "gloo"
    with pytest.raises(ConfigError, match="this machine shows none; type backend=gloo"):
        choose_backend("nccl")


def test_a_network_interface_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="eth9 is no network interface .*lo.*; type backend.socket_ifname="):
        validate_backend("gloo", 1, "lo,eth9")
