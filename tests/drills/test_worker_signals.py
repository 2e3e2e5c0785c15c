"""Ctrl-C and kills of runs with loader workers, under every launcher."""

import os
import signal
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, ROOT, TORCHRUN, TRAIN, children, own_data, wait_for
from support.run_folders import SLOW, position, stopped_at
from support.worlds import same_bits

pytestmark = pytest.mark.drill

READ_BY_WORKERS = [
    *SLOW, "trainer.epochs=24", *own_data("support.slow.SlowDigits"), "loader.num_workers=2", "trainer.batch_size=8",
    "snapshot.every=1steps",
]  # fmt: skip


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [grandchild for child in found for grandchild in descendants(child)]


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("starter", [["launch=env"], ["launch=torchrun"], TORCHRUN], ids=["env", "launch", "torchrun"])
def test_a_run_that_was_stopped_in_mid_epoch_goes_on_to_the_same_bits(start, tmp_path, starter):
    folder, ours = tmp_path / "run", starter is not TORCHRUN
    agent = [*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN]
    command = [*PYTHON_TRAIN, *starter] if ours else agent
    command += [*READ_BY_WORKERS, f"hydra.run.dir={folder}"]
    run = start(*command, PYTHONPATH=ROOT / "tests")
    wait_for(lambda: position(folder)[0] >= 2, "snapshot")
    processes = descendants(run.process.pid)
    run.send(signal.SIGINT if ours else signal.SIGTERM, "group" if ours else "launcher")  # as a terminal does; kill
    run.finish(75 if ours else None)
    assert position(folder)[0] == stopped_at(folder) < 192  # all steps
    wait_for(lambda: gone(processes), "end of all processes", 20)
    if ours:
        start(*command, PYTHONPATH=ROOT / "tests").finish()
        alone = [*PYTHON_TRAIN, *READ_BY_WORKERS, "loader.num_workers=0", starter[0], "hydra.run.dir=whole"]
        start(*alone, PYTHONPATH=ROOT / "tests").finish()
        assert same_bits(tmp_path / "whole", folder)


@pytest.mark.parametrize("launch", ["fork", "torchrun"])
def test_workers_end_with_their_killed_rank(start, tmp_path, launch):
    command = [*PYTHON_TRAIN, *READ_BY_WORKERS, "trainer.epochs=1000", f"launch={launch}", "hydra.run.dir=run"]
    run = start(*command, PYTHONPATH=ROOT / "tests")
    wait_for(lambda: position(tmp_path / "run")[0] >= 2, "snapshot")
    processes = descendants(run.process.pid)
    (rank, *_) = [pid for pid in processes if len(children(pid)) >= 2 and not any(map(children, children(pid)))]
    workers = children(rank)
    os.kill(workers[0], signal.SIGSTOP)  # a worker that hangs
    os.kill(rank, signal.SIGKILL)
    run.finish(code=None)
    wait_for(lambda: gone(processes), "end of all processes", 20)
    for pid in processes:  # nobody is left who could remove the memory that a worker has named
        for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
            left.unlink(missing_ok=True)
