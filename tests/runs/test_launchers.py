"""Launchers in this process: how many ranks they start, what they leave behind, what they refuse."""

import multiprocessing.util
import os
import signal
import threading

import pytest
import torch

from lockstep.distributed.host import cpu_count
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.launchers.env import EnvLauncher
from lockstep.launchers.local import LocalLauncher, resolve_nproc
from support.commands import wait_for
from support.refusals import answer
from support.sockets import listening_addresses
from support.worlds import in_world


def _sum_of_ranks() -> tuple[float, str, int, str]:
    with join_world("gloo", 30) as world:
        total = world.all_reduce_sum(torch.tensor(float(world.rank))).item()
        return total, os.environ["LOCKSTEP_STARTED_BY"], world.local_size, "x" * 2**20  # more than a pipe holds


def _killed() -> int:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with join_world("gloo", 30) as world:
        world.barrier()
        if attempt < 10 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    return attempt


def _left_behind(start_method: str) -> tuple[set[str], list[str]]:
    of_python = threading.active_count()
    for _ in range(2):
        assert LocalLauncher(start_method, 2).launch(_sum_of_ranks) == (1.0, start_method, 2, "x" * 2**20)
    if start_method == "fork":
        assert LocalLauncher("fork", 2, max_restarts=10).launch(_killed) == 10
    left = [name for name in os.listdir(multiprocessing.util.get_temp_dir()) if name.startswith("ranks-")]
    wait_for(lambda: threading.active_count() == of_python, "end of the threads")
    return listening_addresses([os.getpid()]), left


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_launches_and_restarts_leave_no_port_and_no_thread_behind(start_method):
    assert in_world(1, _left_behind, start_method) == [(set(), [])]


def _with_one_core() -> tuple[int, int]:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    return cpu_count(), resolve_nproc("cpu")


def test_nproc_per_node_counts_as_torchrun_does():
    assert in_world(1, _with_one_core) == [(1, 1)]
    gpus = torch.cuda.device_count()
    assert (resolve_nproc(3), resolve_nproc("auto")) == (3, gpus or cpu_count())
    if not gpus:
        with pytest.raises(ConfigError, match="finds no GPU here; type launch.nproc_per_node=cpu"):
            resolve_nproc("gpu")
    assert LocalLauncher("fork", "cpu").num_ranks() == (cpu_count(), cpu_count())
    assert LocalLauncher("spawn", 3, 0, 2, 1, "127.0.0.1", 29500).num_ranks() == (6, 3)
    assert EnvLauncher().num_ranks() == (1, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launch=torchrun launch.nproc_per_node=0", "launch.nproc_per_node=0 should be"),
        ("launch=torchrun launch.nproc_per_node=many", "launch.nproc_per_node=many should be"),
        ("launch=spawn launch.start_method=thread", "launch.start_method=thread should be 'fork' or 'spawn'"),
        ("launch=spawn launch.nnodes=2 launch.start_method=fork", "several nodes need launch=spawn"),
        ("launch=spawn launch.nnodes=2 launch.max_restarts=3", "launch.max_restarts=0: torchrun"),
        ("launch=spawn launch.nnodes=2 launch.node_rank=2", "does not fit launch.nnodes=2; type launch.node_rank=0 to"),
    ],
)
def test_what_launchers_refuse(words: str, said: str) -> None:
    assert said in str(answer(*words.split(), "hydra.run.dir=run"))
