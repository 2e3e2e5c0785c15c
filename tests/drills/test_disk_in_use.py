"""A run that is asked to stop inside torch.save, and curves on a disk that is full for a while."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.commands import STARTERS, wait_for
from support.event_files import scalars
from support.run_folders import SLOW, has_logged, newest_snapshot, stopped_at
from support.worlds import same_bits

pytestmark = pytest.mark.drill

TESTS = Path(__file__).parents[1]
SLOW_SAVES = [*SLOW, "trainer.epochs=4", "snapshot.every=20steps"]


@pytest.mark.parametrize("starter", ["launch=fork", "torchrun"])
def test_a_stop_inside_torch_save_leaves_whole_snapshots(start, start_faulty, tmp_path, starter):
    command = [*STARTERS["launch=fork"], *SLOW_SAVES]
    start(*command, "hydra.run.dir=whole").finish()
    slow = "+logger.slow._target_=support.slow_disk.SlowSaves"
    run = start_faulty(*STARTERS[starter], *SLOW_SAVES, slow, "hydra.run.dir=run", PYTHONPATH=TESTS)
    wait_for(lambda: (tmp_path / "in-save").exists(), "torch.save")
    run.send(signal.SIGTERM)
    run.finish(75 if starter == "launch=fork" else None)
    assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tmp"))
    start(*command, "hydra.run.dir=run").finish()
    assert same_bits(tmp_path / "whole", tmp_path / "run")


def test_a_disk_slower_than_backend_timeout_is_waited_for(start, tmp_path):
    """In training with more snapshots than may wait, at a stop, at a resume, and at the end."""
    command = [*STARTERS["launch=fork"], *SLOW, "snapshot.every=10steps", "backend.timeout=6", "hydra.run.dir=run"]
    slow = ["+logger.slow._target_=support.slow_disk.SlowSaves", "+logger.slow.seconds=7"]
    run = start(*command, *slow, PYTHONPATH=TESTS)
    wait_for(lambda: len(list((tmp_path / "run").glob("snapshots/step_*[0-9]"))) > 1, "the second snapshot")
    run.send(signal.SIGTERM)
    run.finish(75)
    assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")
    slow += ["+logger.loads._target_=support.slow_disk.SlowLoads", "+logger.loads.seconds=7"]
    run = start(*command, *slow, f"trainer.max_steps={stopped_at(tmp_path / 'run') + 5}", PYTHONPATH=TESTS)
    assert "finished:" in run.finish(0).output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")
def test_a_full_disk_costs_one_warning_of_each_logger_and_no_step(start_faulty, small_disk):
    run_dir, ballast = small_disk / "run", small_disk / "ballast"
    words = ["model=linear", "trainer.epochs=100000", "snapshot.every=100000epochs", "logging.every=1"]
    run = start_faulty(*STARTERS["launch=fork"], *words, f"hydra.run.dir={run_dir}")
    wait_for(lambda: has_logged(run_dir, "epoch 3/"), "training")
    with suppress(OSError), ballast.open("wb", 0) as file:
        while True:
            file.write(bytes(2**10))
    run.broken_at = time.time()
    time.sleep(5)  # in which epochs end, and loggers write
    ballast.unlink()
    run.send(signal.SIGTERM)
    run.finish(75)
    assert run.output.count("TensorBoardLogger loses a part of this run (OSError: [Errno 28] No space") == 1
    steps = [step for step, _ in scalars(run_dir)["train/running_loss"]]
    assert steps == [*range(1, len(steps) + 1)]
    assert stopped_at(run_dir) > steps[-1]
