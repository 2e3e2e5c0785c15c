"""Launchers in this process: how many ranks they start, what they leave behind, what they refuse."""

import multiprocessing.util
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from lockstep.distributed.host import cpu_count
from lockstep.distributed.world import join_world
from lockstep.errors import EXIT_FAILED, ConfigError, RankFailed, StoppedEarly, TrainingDiverged
from lockstep.launchers.env import EnvLauncher
from lockstep.launchers.local import LocalLauncher, resolve_nproc
from support.commands import wait_for
from support.refusals import answer
from support.worlds import in_world


def listening_sockets() -> set[str]:
    """The inodes of this process's sockets that listen, by /proc."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:  # the descriptor of this very loop
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
                found.add(columns[9])
    return found


def kernel_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _sum_of_ranks() -> tuple[float, str, int]:
    with join_world("gloo", 30) as world:
        total = world.all_reduce_sum(torch.tensor(float(world.rank))).item()
        return total, os.environ["LOCKSTEP_STARTED_BY"], world.local_size


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_launch_leaves_no_port_and_no_thread_behind(start_method):
    assert in_world(1, _left_behind, start_method) == [(True, True, [])]


def _left_behind(start_method: str) -> tuple[bool, bool, list[str]]:
    sockets, of_python = listening_sockets(), threading.active_count()
    launcher = LocalLauncher(start_method, 2)
    assert launcher.launch(_sum_of_ranks) == (1.0, start_method, 2)
    first = kernel_threads()
    assert launcher.launch(_sum_of_ranks) == (1.0, start_method, 2)
    left = [name for name in os.listdir(multiprocessing.util.get_temp_dir()) if name.startswith("ranks-")]
    # The kernel lists a joined thread for a moment.
    wait_for(lambda: kernel_threads() <= first, "end of the threads")
    return listening_sockets() <= sockets, threading.active_count() == of_python, left


def _killed() -> int:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with join_world("gloo", 30) as world:
        world.barrier()
        if attempt < 20 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    return attempt


def test_ranks_are_forked_and_restarted_twenty_times():
    assert in_world(1, _restarted) == [20]


def _restarted() -> int:
    return int(LocalLauncher("fork", 2, max_restarts=20).launch(_killed))


def _end(how: str) -> None:
    if how == "refused":
        raise ConfigError("optimizer.lr=-1 must be more than 0; type optimizer.lr=0.1")
    if how == "stopped":
        raise StoppedEarly("stopped early")
    if how == "diverged":
        raise TrainingDiverged("the loss is nan at step 3; type x")
    os._exit(3)


def test_how_a_rank_ends_is_what_the_launcher_raises():
    with pytest.raises(ConfigError, match="^optimizer.lr=-1 must be more than 0; type optimizer.lr=0.1$"):
        LocalLauncher("fork", 1).launch(_end, "refused")
    with pytest.raises(StoppedEarly):
        LocalLauncher("fork", 1).launch(_end, "stopped")
    with pytest.raises(RankFailed) as failed:
        LocalLauncher("fork", 1).launch(_end, "exit")
    first = failed.value.report["first"]
    assert (first["rank"], first["kind"], first["exit_code"], failed.value.report["exit_code"]) == (
        0,
        "left",
        3,
        EXIT_FAILED,
    )
    with pytest.raises(RankFailed, match="^lockstep: the loss is nan at step 3; type x\n") as diverged:
        LocalLauncher("fork", 1).launch(_end, "diverged")
    assert diverged.value.report["exit_code"] == EXIT_FAILED


def _large() -> str:
    return "x" * 2**20


def test_a_value_may_be_larger_than_a_pipe_holds():
    assert len(LocalLauncher("fork", 2).launch(_large)) == 2**20


def _with_one_core() -> tuple[int, int]:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    return cpu_count(), resolve_nproc("cpu")


def test_nproc_per_node_counts_as_torchrun_does():
    assert resolve_nproc(3) == 3
    assert resolve_nproc("cpu") == cpu_count() == len(os.sched_getaffinity(0))
    assert in_world(1, _with_one_core) == [(1, 1)]
    gpus = torch.cuda.device_count()
    assert resolve_nproc("auto") == (gpus or cpu_count())
    if gpus:
        assert resolve_nproc("gpu") == gpus
    else:
        with pytest.raises(ConfigError, match="finds no GPU here; type launch.nproc_per_node=cpu"):
            resolve_nproc("gpu")
    for number in ("0", "-1", "many"):
        word = f"launch.nproc_per_node={number}"
        assert f"lockstep: {word} should be" in str(answer("launch=torchrun", word))


def test_launchers_say_how_many_ranks_they_start():
    assert LocalLauncher("fork", "cpu").num_ranks() == (cpu_count(), cpu_count())
    assert LocalLauncher("spawn", 3, 0, 2, 1, "127.0.0.1", 29500).num_ranks() == (6, 3)
    assert LocalLauncher("fork", "auto").num_ranks()[0] == resolve_nproc("auto")
    assert EnvLauncher().num_ranks() == (1, 1)


def test_what_launchers_refuse(monkeypatch):
    refused = [
        (LocalLauncher("fork", 2, 0, 2, 0, "127.0.0.1", 29500), "several nodes need launch=spawn"),
        (LocalLauncher("spawn", 2, 3, 2, 0, "127.0.0.1", 29500), "launch.max_restarts=0: torchrun"),
    ]
    for launcher, said in refused:
        with pytest.raises(ConfigError, match=said):
            launcher.validate()
    assert "launch.start_method=thread should be 'fork' or 'spawn'" in str(
        answer("launch=spawn", "launch.start_method=thread")
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="a launcher inside torchrun would start .* type launch=env"):
        LocalLauncher("fork", 2).validate()
