"""Disks that are full, read-only or slow, and full shared memory. Needs root, which mounts them."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from support.commands import PYTHON_TRAIN, STARTERS, wait_for
from support.event_files import scalars
from support.run_folders import SLOW, has_logged, newest_snapshot, position, read_log, stopped_at
from support.worlds import same_bits

pytestmark = [pytest.mark.drill, pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")]

FORK = STARTERS["launch=fork"]
SLOW_DISK = "+logger.slow._target_=support.slow_disk.SlowDisk"


@pytest.fixture
def mount(tmp_path):
    """mount(name, size) -> a file system in memory, at a new folder."""
    mounted = []

    def mount_memory(name, size):
        (tmp_path / name).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path / name)], check=True)
        mounted.append(tmp_path / name)
        return tmp_path / name

    yield mount_memory
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk):
    with suppress(OSError), (disk / "ballast").open("wb", 0) as ballast:
        while True:
            ballast.write(bytes(2**10))


@pytest.mark.parametrize("launch", ["env", "fork"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_rank_starts(start, mount, tmp_path, launch):
    small, locked, theirs = mount("small", "32k") / "run", mount("locked", "8m") / "run", tmp_path / "theirs"
    locked.mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(locked.parent)], check=True)
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    # root without what makes it more than another user; another user could not read a virtual environment of root's
    as_any_user = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
    rows = [(small, "No space left on device", []), (locked, "Read-only file system", [])]
    for folder, said, prefix in [*rows, (theirs, "Permission denied", as_any_user)]:
        run = start(*prefix, *PYTHON_TRAIN, "model=mlp", f"launch={launch}", f"hydra.run.dir={folder}").finish(2)
        assert f"{folder} cannot be written ({said}); type hydra.run.dir=<a folder" in run.sentence
        assert "free some space" not in run.sentence
        assert "rank 0 of" not in run.output
        assert "Traceback" not in run.output


def test_a_full_dev_shm_changes_no_bit_and_stays_as_it_is(start, tmp_path):
    """In a mount namespace of its own."""
    full = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full;"
    words = [*FORK, "model=mlp", "model.width=512", "trainer.max_steps=12", "gradient_sync=shared_memory"]
    in_full = ["unshare", "--mount", "bash", "-c"]
    run = start(*in_full, f"{full} {' '.join(words)} hydra.run.dir={tmp_path}/full && ls -A /dev/shm").finish()
    assert run.output.splitlines()[-1] == "full"
    start(*words, "hydra.run.dir=room").finish()
    assert same_bits(tmp_path / "room", tmp_path / "full")


def test_a_disk_that_is_full_at_the_stop_ends_with_76(start_faulty, mount):
    run_dir = mount("disk", "24m") / "run"
    run = start_faulty(*FORK, *SLOW, "snapshot.every=100steps", f"hydra.run.dir={run_dir}")
    wait_for(lambda: position(run_dir)[0], "a snapshot")  # no other is written or deleted while the disk fills
    good = position(run_dir)[0]
    fill(run_dir.parent)
    run.send(signal.SIGTERM)
    run.finish(76)
    assert "No space left on device" in run.output
    assert position(run_dir)[0] == good
    assert f"{run_dir}/snapshots/step_{good:08d}" in run.output


def test_a_disk_without_room_for_the_best_weights_of_another_run_is_refused(start, mount, tmp_path):
    words = [*PYTHON_TRAIN, "model=mlp", "model.width=1024", "optimizer.lr=1e-12", "trainer.epochs=2"]
    start(*words, "monitor=val/accuracy", "hydra.run.dir=run").finish()
    run_dir = mount("disk", "300k") / "run"
    run = start(*words, "monitor=val/accuracy", "resume=run", f"hydra.run.dir={run_dir}").finish(2)
    assert f"cannot be copied to {run_dir}/snapshots: " in run.sentence
    assert "No space left on device" in run.sentence
    assert run.sentence.endswith("free some space and type the command again")


def test_a_full_disk_costs_one_warning_of_each_logger_and_no_step(start_faulty, mount):
    run_dir = mount("disk", "12m") / "run"
    words = ["model=linear", "trainer.epochs=100000", "snapshot.every=100000epochs", "logging.every=1"]
    run = start_faulty(*FORK, *words, f"hydra.run.dir={run_dir}")
    wait_for(lambda: has_logged(run_dir, "epoch 3/"), "training")
    fill(run_dir.parent)
    time.sleep(5)  # in which epochs end, and loggers write
    (run_dir.parent / "ballast").unlink()
    run.send(signal.SIGTERM)
    run.finish(75)
    assert run.output.count("TensorBoardLogger loses a part of this run (OSError: [Errno 28] No space") == 1
    steps = [step for step, _ in scalars(run_dir)["train/running_loss"]]
    assert steps == [*range(1, len(steps) + 1)]
    assert stopped_at(run_dir) > steps[-1]


def test_a_stop_inside_torch_save_leaves_whole_snapshots(start, start_faulty, tmp_path):
    command = [*FORK, *SLOW, "trainer.epochs=4", "snapshot.every=20steps"]
    start(*command, "hydra.run.dir=whole").finish()
    run = start_faulty(*command, SLOW_DISK, "hydra.run.dir=run")
    wait_for(lambda: (tmp_path / "in-save").exists(), "torch.save")
    run.send(signal.SIGTERM)
    run.finish(75)
    assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tmp"))
    start(*command, "hydra.run.dir=run").finish()
    assert same_bits(tmp_path / "whole", tmp_path / "run")


def test_a_disk_slower_than_backend_timeout_is_waited_for(start, tmp_path):
    """In training with more snapshots than may wait, at a stop, at a resume, and at the end."""
    slow = [SLOW_DISK, "+logger.slow.saves=7", "+logger.slow.loads=7", "backend.timeout=6"]
    command = [*FORK, *SLOW, *slow, "snapshot.every=10steps", "hydra.run.dir=run"]
    run = start(*command)
    wait_for(lambda: len(list((tmp_path / "run").glob("snapshots/step_*[0-9]"))) > 1, "the second snapshot")
    run.send(signal.SIGTERM)
    run.finish(75)
    assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")
    assert "finished:" in start(*command, f"trainer.max_steps={stopped_at(tmp_path / 'run') + 5}").finish().output


def test_a_run_folder_that_is_deleted_costs_one_warning_and_no_step(start_faulty, tmp_path):
    command, folder = [*FORK, *SLOW, "trainer.epochs=200", "hydra.run.dir=run"], tmp_path / "run"
    run = start_faulty(*command)
    wait_for(lambda: position(folder)[0], "a snapshot")
    while folder.exists() and (folder / ".lock").exists():  # the run may write a snapshot meanwhile
        shutil.rmtree(folder, ignore_errors=True)
    wait_for(lambda: position(folder)[0], "a snapshot after it")
    run.send(signal.SIGTERM)
    run.finish(75)
    assert run.output.count(" was deleted: the logs, curves and config of this run are lost; press Ctrl-C") == 1
    stopped = newest_snapshot(folder)["progress"]["step"]
    run = start_faulty(*command, f"trainer.max_steps={stopped + 5}").finish()
    assert f"step_{stopped:08d}" in read_log(folder)
    assert (folder / ".hydra/config.yaml").exists()


def test_a_mirror_without_room_costs_one_warning_and_keeps_no_part_of_a_snapshot(start, mount):
    place = mount("place", "300k") / "run"
    mirror = f'snapshot.mirror={{_target_:lockstep.snapshots.mirror.Mirror,to:"file://{place}"}}'
    run = start(*PYTHON_TRAIN, *SLOW, mirror, "trainer.epochs=1").finish()
    assert run.output.count("No space left on device") == run.output.count("the next ones are tried") == 1
    assert list(place.iterdir()) == []
