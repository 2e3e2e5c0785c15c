"""strategy=async_parameter_server: the server or a worker is killed, then asked to stop, and the run goes on."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.commands import PYTHON_TRAIN, ranks_under, wait_for
from support.run_folders import newest_snapshot

pytestmark = pytest.mark.drill
SLOW = ["strategy=async_parameter_server", "strategy.sync_every=20", "model=mlp", "model.width=1024",
        "trainer.batch_size=16", "trainer.epochs=100", "hydra.run.dir=run"]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 2])
def test_a_world_that_is_killed_or_asked_to_stop_goes_on(start: Any, tmp_path: Path, rank: int) -> None:
    command = [*PYTHON_TRAIN, "launch=torchrun", "launch.nproc_per_node=3", "launch.max_restarts=1", *SLOW]
    run, log = start(*command), tmp_path / "run" / "train.log"
    wait_for(lambda: list(tmp_path.glob("run/snapshots/step_*[0-9]")), "snapshot")
    os.kill(ranks_under(run.process.pid)[rank], signal.SIGKILL)
    wait_for(lambda: "resumed from" in log.read_text(), "restart")
    time.sleep(1)
    os.kill(ranks_under(run.process.pid)[rank], signal.SIGTERM)
    run.finish(None)
    assert "stopped early at step " in log.read_text()
    step = newest_snapshot(tmp_path / "run")["progress"]["step"]
    start(*command, f"trainer.max_steps={step + 10}").finish()
