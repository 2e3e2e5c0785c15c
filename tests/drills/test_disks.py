"""Disks that are full, read-only or slow, and full shared memory. Needs root, which mounts them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, STARTERS, wait_for
from support.event_files import scalars
from support.run_folders import SLOW, has_logged, newest_snapshot, position, stopped_at
from support.worlds import distance, same_bits, weights

pytestmark = [pytest.mark.drill, pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")]

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path, short_folder: Path) -> Iterator[Mount]:  # short_folder is removed after the unmounting
    """mount(folder, size) -> a file system in memory, mounted at a new folder, or one below tmp_path by its name."""
    mounted = []

    def mount_memory(name: str | Path, size: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        mounted.append(folder)
        return folder

    yield mount_memory
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("launch", ["env", "fork", "torchrun"])
def test_a_full_or_read_only_disk_is_refused_before_any_rank_starts(train, mount, launch):
    small, locked = mount("small", "32k"), mount("locked", "8m")
    (locked / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(locked)], check=True)
    full = train("model=mlp", f"launch={launch}", f"hydra.run.dir={small}/run", code=2)
    assert (
        f"the run folder {small}/run cannot be written (No space left on device); type hydra.run.dir=" in full.sentence
    )
    read_only = train("model=mlp", f"launch={launch}", f"hydra.run.dir={locked}/run", code=2)
    assert f"{locked}/run cannot be written (Read-only file system); type hydra.run.dir=" in read_only.sentence
    assert "free some space" not in read_only.sentence
    for run in (full, read_only):
        assert "rank 0 of" not in run.output
        assert "Traceback" not in run.output


def test_a_folder_of_somebody_else_is_refused_with_the_right_advice(start, tmp_path):
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 65534, 65534)
    # root without what makes it more than another user; another user could not read a virtual environment of root's
    as_any_user = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *PYTHON_TRAIN]
    run = start(*as_any_user, "model=mlp", f"hydra.run.dir={tmp_path}/run").finish(2)
    assert f"{tmp_path}/run cannot be written (Permission denied); type hydra.run.dir=<a folder" in run.sentence


@pytest.mark.parametrize("launch", ["torchrun", "fork"])
def test_without_room_for_shared_memory_gradients_are_averaged_by_all_reduce(start, train, tmp_path, launch):
    """In a mount namespace of its own /dev/shm is full."""
    full = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full;"
    words = " ".join([*PYTHON_TRAIN, "model=mlp model.width=512 trainer.max_steps=12", f"launch={launch}"])
    in_full = ["unshare", "--mount", "bash", "-c"]
    run = start(*in_full, f"{full} {words} hydra.run.dir={tmp_path}/full && ls -A /dev/shm").finish()
    train("model=mlp", "model.width=512", "trainer.max_steps=12", "launch=fork", "hydra.run.dir=room")
    assert run.output.splitlines()[-1] == "full"
    assert distance(weights(tmp_path / "room"), weights(tmp_path / "full")) < 1e-4
    asked = start(*in_full, f"{full} {words} gradient_sync=shared_memory").finish(2)
    assert "finds no room for" in asked.sentence
    assert asked.sentence.endswith("type gradient_sync=all_reduce")


def test_a_disk_that_is_full_at_the_stop_ends_with_76(start_faulty, mount):
    run_dir = mount("disk", "8m") / "run"
    words = ["launch=fork", "model=mlp", "trainer.epochs=1000", "snapshot.every=1epochs", f"hydra.run.dir={run_dir}"]
    run = start_faulty(*PYTHON_TRAIN, *words)
    wait_for(lambda: has_logged(run_dir, "epoch 2/"), "training")
    good = position(run_dir)[0]
    with suppress(OSError), (run_dir.parent / "ballast").open("wb", 0) as ballast:
        while True:
            ballast.write(bytes(2**10))
    run.send(signal.SIGTERM)
    run.finish(76)
    assert "No space left on device" in run.output
    assert 0 < good <= position(run_dir)[0]
    assert f"{run_dir}/snapshots/step_{position(run_dir)[0]:08d}" in run.output


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


def test_a_full_disk_costs_one_warning_of_each_logger_and_no_step(start_faulty, mount):
    disk = mount("disk", "12m")
    run_dir, ballast = disk / "run", disk / "ballast"
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
