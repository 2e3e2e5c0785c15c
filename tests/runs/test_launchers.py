"""Launchers in this process: how many ranks they start, what they leave behind, what they refuse."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.distributed.host import LAUNCHER, cpu_count
from lockstep.distributed.rendezvous import listening_socket
from lockstep.distributed.world import join_world
from lockstep.errors import EXIT_FAILED, ConfigError, RankFailed, StoppedEarly, TrainingDiverged
from lockstep.launchers.env import EnvLauncher
from lockstep.launchers.local import SpawnLauncher, Supervisor, TorchrunLauncher, resolve_nproc
from support.commands import ROOT, wait_for
from support.refusals import answer
from support.worlds import PRELOAD, in_world


def spawn(nproc: int | str = 2, start_method: str = "forkserver", **options: Any) -> SpawnLauncher:
    defaults: dict[str, Any] = {"nnodes": 1, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 0}
    return SpawnLauncher(start_method, nproc, **(defaults | options))


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


def test_jobs_of_launch_spawn_leave_no_port_and_no_thread_behind():
    import multiprocessing

    multiprocessing.set_forkserver_preload(PRELOAD)
    sockets = listening_sockets()

    def launch() -> None:
        assert spawn().launch(_sum_of_ranks) == (1.0, "spawn", 2)
        assert listening_sockets() <= sockets

    launch()
    first, of_python = kernel_threads(), threading.active_count()
    for _ in range(2):
        launch()
        # The kernel lists a joined thread for a moment, perhaps in the first count, too. Two that leak are too many.
        wait_for(lambda: kernel_threads() <= first, "end of the store's thread")
        assert threading.active_count() == of_python


def torchrun(start_method: str, nproc: int | str = 2) -> TorchrunLauncher:
    return TorchrunLauncher(start_method, nproc, 0)


def test_no_other_program_gets_the_port_while_the_ranks_start(monkeypatch):
    def run(supervisor: Supervisor, worker: Any) -> None:
        with pytest.raises(OSError, match="Address already in use"):
            listening_socket("127.0.0.1", int(supervisor.env["MASTER_PORT"]))
        raise OSError("no process can be started")

    monkeypatch.setattr(Supervisor, "run", run)
    sockets = listening_sockets()
    for launcher in (spawn(), torchrun("forkserver")):
        with pytest.raises(OSError, match="no process can be started"):
            launcher.launch(_sum_of_ranks)
        assert listening_sockets() <= sockets


def _port_that_ranks_keep(start_method: str) -> tuple[set[str], set[str]]:
    launchers = spawn(start_method=start_method), torchrun(start_method)
    return launchers[0].launch(listening_sockets), launchers[1].launch(listening_sockets)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_ranks_do_not_keep_the_port_of_their_launcher(start_method):
    assert in_world(1, _port_that_ranks_keep, start_method) == [(set(), set())]


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
        spawn(1).launch(_end, "refused")
    with pytest.raises(StoppedEarly):
        spawn(1).launch(_end, "stopped")
    with pytest.raises(RankFailed) as failed:
        spawn(1).launch(_end, "exit")
    first = failed.value.report["first"]
    assert (first["rank"], first["kind"], first["exit_code"], failed.value.report["exit_code"]) == (
        0,
        "left",
        3,
        EXIT_FAILED,
    )
    with pytest.raises(RankFailed, match="^lockstep: the loss is nan at step 3; type x\n") as diverged:
        spawn(1).launch(_end, "diverged")
    assert diverged.value.report["exit_code"] == EXIT_FAILED


def _large() -> str:
    return "x" * 2**20


def test_a_value_may_be_larger_than_a_pipe_holds():
    assert len(spawn(2).launch(_large)) == 2**20


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
        with pytest.raises(ConfigError, match="shows none; type launch.nproc_per_node=cpu"):
            resolve_nproc("gpu")
    for number in ("0", "-1", "many"):
        word = f"launch.nproc_per_node={number}"
        assert f"lockstep: {word} should be" in str(answer("launch=torchrun", word))


def test_launchers_say_how_many_ranks_they_start():
    assert spawn("cpu").num_ranks() == (cpu_count(), cpu_count())
    assert spawn(3, nnodes=2, node_rank=1, master_port=29500).num_ranks() == (6, 3)
    assert torchrun("spawn", "auto").num_ranks()[0] == resolve_nproc("auto")
    assert EnvLauncher().num_ranks() == (1, 1)


def test_what_launchers_refuse(monkeypatch):
    refused = [
        (spawn(2, "fork", nnodes=2, node_rank=0, master_port=29500), "type launch=spawn"),
        (spawn(2, nnodes=2), "type launch.master_port=29500 on each"),
    ]
    for launcher, said in refused:
        with pytest.raises(ConfigError, match=said):
            launcher.validate()
    assert "launch.start_method=thread should be 'spawn', " in str(answer("launch=spawn", "launch.start_method=thread"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for launcher in (spawn(), torchrun("spawn")):
        with pytest.raises(ConfigError, match="inside torchrun would start every rank several times; type launch=env"):
            launcher.validate()


@pytest.mark.parametrize(("launcher_lives", "code"), [(True, 0), (False, -signal.SIGKILL)])
def test_a_fork_server_ends_if_its_launcher_has_ended_before_it_ran(launcher_lives, code):
    ended = subprocess.Popen(["true"])
    ended.wait()
    env = {LAUNCHER: str(os.getpid() if launcher_lives else ended.pid), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", "import lockstep.launchers.rank_imports"]
    assert subprocess.run(command, env=os.environ | env).returncode == code
