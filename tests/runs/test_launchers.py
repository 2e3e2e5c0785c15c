"""Launchers in this process: how many ranks they start, what they leave behind."""

import multiprocessing.util
import os
import signal
import threading

import pytest
import torch

from lockstep.distributed.host import cpu_count
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.launchers.base import EnvLauncher
from lockstep.launchers.local import LocalLauncher, resolve_nproc
from support.commands import wait_for
from support.sockets import listening_addresses
from support.worlds import in_world


def _sum_of_ranks():
    with join_world("gloo", 30) as world:
        total = world.all_reduce_sum(torch.tensor(float(world.rank))).item()
        return total, os.environ["LOCKSTEP_STARTED_BY"], world.local_size, "x" * 2**20  # more than a pipe holds


def _killed():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with join_world("gloo", 30) as world:
        world.barrier()
        if attempt < 10 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    return attempt


def _left_behind():
    of_python = threading.active_count()
    for start_method in ("spawn", "fork"):
        assert LocalLauncher(start_method, 2).launch(_sum_of_ranks) == (1.0, start_method, 2, "x" * 2**20)
    assert LocalLauncher("fork", 2, max_restarts=10).launch(_killed) == 10
    left = [name for name in os.listdir(multiprocessing.util.get_temp_dir()) if name.startswith("ranks-")]
    wait_for(lambda: threading.active_count() == of_python, "end of the threads")
    return listening_addresses([os.getpid()]), left


def test_launches_and_restarts_leave_no_port_and_no_thread_behind():
    assert in_world(1, _left_behind) == [(set(), [])]


def _with_one_core():
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
