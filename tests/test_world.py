"""What ranks say to each other."""

import os
import time

import pytest

from conftest import in_world
from lockstep.refusal import Refusal


def _talk(folder):
    import torch
    import torch.distributed as dist

    from lockstep import world

    with world.join("auto", 60, socket_ifname="lo") as ranks:
        said = {"rank": ranks.rank, "gathered": ranks.gather(ranks.rank**2), "told": ranks.from_leader(ranks.rank + 7)}
        with ranks.leader_first():
            if ranks.local_rank == 0:
                time.sleep(0.3)
                open(f"{folder}/downloaded", "x").close()  # "x": a second download would fail
            said["found"] = os.path.exists(f"{folder}/downloaded")
        vote = world.Vote(ranks, flags=2, pause=0)
        said["votes"] = [vote.cast(ranks.rank == 1, step == 2 and ranks.rank == 0) for step in range(4)]
        vote.close()
        said["knobs"] = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_DEBUG")}
        said["threads"] = torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // ranks.size)
    said["left"] = not dist.is_initialized()
    return said


def test_three_ranks_speak(tmp_path):
    for rank, said in enumerate(in_world(3, _talk, str(tmp_path))):
        assert said == {
            "rank": rank,
            "gathered": [0, 1, 4],
            "told": 7,
            "found": True,  # the first rank of the machine went first, alone
            "votes": [(False, False), (True, False), (True, False), (True, True)],  # one step late, alike everywhere
            "knobs": {"GLOO_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": None, "NCCL_IB_DISABLE": None, "NCCL_DEBUG": None},
            "threads": True,
            "left": True,
        }


def _recorded_votes():
    import torch

    from lockstep import world

    with world.join("auto", 60) as ranks:
        vote = world.Vote(ranks, flags=1, pause=0)
        with torch.profiler.profile() as profiler:
            ranks.total(torch.ones(1))
            vote.cast(True)
        vote.close()
        return [event.name for event in profiler.events() if event.name.startswith("gloo:")]


def test_a_profiler_may_stop_before_a_vote_is_counted():
    """A recorded collective that outlives torch's profiler corrupts the heap."""
    assert in_world(2, _recorded_votes) == [["gloo:all_reduce"]] * 2


def _fail_on_rank_1():
    from lockstep import world

    began = time.monotonic()
    try:
        with world.join("gloo", 60) as ranks:
            if ranks.rank == 1:
                raise ValueError("rank 1 gives up")
            ranks.barrier()
    except Exception as error:
        return type(error).__name__, time.monotonic() - began


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    (peer, waited), (failed, _), _ = in_world(3, _fail_on_rank_1)
    assert failed == "ValueError"
    assert peer == "RuntimeError"
    assert waited < 10


def test_more_ranks_than_gpus():
    from lockstep import world

    if not world.torch.cuda.is_available():
        pytest.skip("this machine has no GPU, where nccl is refused before they are counted")
    with pytest.raises(Refusal, match="one GPU a rank"):
        world.choose_backend("nccl", world.torch.cuda.device_count() + 1)
