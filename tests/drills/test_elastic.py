"""A world that shrinks and grows while it trains."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN, Command, ranks_of_torchrun, wait_for
from support.ports import free_port
from support.run_folders import SLOW, assert_one_curve, newest_snapshot, position

pytestmark = pytest.mark.drill


def start_agent(start: Callable[..., Command], port: int, is_host: int) -> Command:
    """One of two torchrun agents of --nnodes=1:2, with a rank each."""
    conf = f"is_host={is_host},keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=2"
    world = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=5", "--local-addr=127.0.0.1"]
    world += ["--rdzv-backend=c10d", "--rdzv-id=drill", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
    training = [TRAIN, *SLOW, "scheduler=constant", "trainer.epochs=4000", "hydra.run.dir=run"]
    return start(*TORCHRUN, *world, *training, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)


def wait_for_world(cwd: Path, size: int) -> Path:
    """Wait until the run under `cwd` saves with `size` ranks. Returns its folder."""
    folder = cwd / "run"
    wait_for(lambda: folder.exists() and position(folder)[1] == size, f"world of {size}")
    return folder


@pytest.mark.timeout(600)
def test_an_elastic_world_shrinks_and_grows_without_a_step_backward(start, tmp_path):
    """One of two agents is killed, its successor joins, and a lone process ends the run."""
    port = free_port()
    host, guest = start_agent(start, port, 1), start_agent(start, port, 0)
    folder = wait_for_world(tmp_path, 2)
    for pid in [guest.process.pid, *ranks_of_torchrun(guest.process.pid)]:
        os.kill(pid, signal.SIGKILL)
    wait_for_world(tmp_path, 1)
    guest = start_agent(start, port, 0)
    wait_for_world(tmp_path, 2)
    for agent in (guest, host):  # the host's agent holds the store, and ends last
        agent.process.terminate()
        agent.finish(code=None)
    epochs = newest_snapshot(folder)["progress"]["epoch"] + 1
    last = [*PYTHON_TRAIN, *SLOW, "scheduler=constant", f"trainer.epochs={epochs}", f"hydra.run.dir={folder}"]
    run = start(*last).finish()
    assert re.search(r"resumed from .*step_", run.output)
    assert_one_curve(folder)
