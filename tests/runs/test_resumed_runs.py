"""Runs that are typed again: their folder, curves, record and snapshots."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.snapshots.files import list_snapshots, step_of
from support.commands import ON_TEST, ema
from support.event_files import scalars
from support.run_folders import best_snapshot, newest_snapshot
from support.worlds import same_bits

pytestmark = pytest.mark.whole


def steps_of_snapshots(folder: Path) -> list[int]:
    return [step_of(path) for path in reversed(list_snapshots(folder / "snapshots"))]


def test_the_same_folder_goes_on_by_itself(train, tmp_path):
    constant = ["scheduler=constant", "model=mlp"]
    train(*constant, "trainer.epochs=3", "hydra.run.dir=whole")
    train(*constant, "trainer.max_steps=30", "hydra.run.dir=same")  # in the middle of the second epoch
    run = train(*constant, "trainer.epochs=3", "hydra.run.dir=same")
    same, whole = tmp_path / "same", tmp_path / "whole"
    assert "resumed from" in run.output
    assert len(run.epochs) == 2
    assert same_bits(whole, same)
    curves, expected = scalars(same), scalars(whole)
    assert [step for step, _ in curves["train/lr"]] == [10, 20, 30, 40, 50, 60]
    # The second epoch's training loss counts the steps before the stop, too.
    assert dict(curves["train/loss"])[46] == dict(expected["train/loss"])[46]
    record = sorted(path.name for path in (same / ".hydra").iterdir())
    assert record == ["config.yaml", "overrides.yaml"]
    assert "max_steps: null" in (same / ".hydra" / "config.yaml").read_text()


def test_a_finished_run_typed_again_says_so_and_stays_as_it_is(train, tmp_path):
    typed = ["model=mlp", "trainer.epochs=2", "hydra.run.dir=run"]
    first = train(*typed)
    files = [*tmp_path.glob("run/.hydra/*"), *tmp_path.glob("run/snapshots/*/*")]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    again = train(*typed, "trainer.max_steps=10")
    assert "nothing to train: the run is at step 46 already; type trainer.max_steps=<more> to go on" in again.output
    assert not again.epochs
    assert first.epochs
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before
    assert set(tmp_path.glob("run/.hydra/*")) < set(files)


def test_average_best_and_patience_survive_a_restart(train, tmp_path):
    judged = ["model=mlp", "scheduler=constant", ema(0.9), "trainer.epochs=40", "evaluation.patience=2"]
    judged += ["snapshot.keep_last=1", "optimizer.lr=0.5", ON_TEST]
    whole = train(*judged, "hydra.run.dir=whole")
    train(*judged, "hydra.run.dir=parts", "trainer.max_steps=30")
    parts = train(*judged, "hydra.run.dir=parts")
    assert parts.epochs[-1].split("step")[1] == whole.epochs[-1].split("step")[1]
    assert len(whole.epochs) < 40
    assert same_bits(tmp_path / "whole", tmp_path / "parts")
    curve = scalars(tmp_path / "whole")["val/accuracy"]
    best = best_snapshot(tmp_path / "parts")["progress"]
    assert best["best"] == pytest.approx(max(value for _, value in curve), abs=1e-6)
    assert best["step"] == curve[-3][0]
    assert len(steps_of_snapshots(tmp_path / "parts")) == 1


def test_how_often_a_run_saves_and_logs_and_how_much_it_keeps(train, tmp_path):
    often = ["model=mlp", "trainer.epochs=2", "snapshot.every=15steps", "snapshot.keep_last=10", "logging.every=7"]
    train(*often, "hydra.run.dir=all")
    assert steps_of_snapshots(tmp_path / "all") == [15, 30, 45, 46]
    assert [step for step, _ in scalars(tmp_path / "all")["train/lr"]] == [7, 14, 21, 28, 35, 42]
    train(*often, "snapshot.keep_last=2", "hydra.run.dir=two")
    assert steps_of_snapshots(tmp_path / "two") == [45, 46]


def test_a_damaged_snapshot_takes_no_place_of_a_good_one(train, tmp_path):
    run = ["model=mlp", "hydra.run.dir=run", "snapshot.keep_last=2"]
    train(*run, "snapshot.every=10steps", "trainer.max_steps=20")
    (tmp_path / "run/snapshots/step_00000020/state.pt").write_bytes(b"damaged")
    resumed = train(*run, "snapshot.every=15steps", "trainer.max_steps=30")
    assert "step_00000020 is damaged" in resumed.output
    assert steps_of_snapshots(tmp_path / "run") == [15, 30]
    assert (tmp_path / "run/snapshots/step_00000020.damaged").is_dir()


def test_a_best_one_of_steps_that_are_trained_again_does_not_count(train, tmp_path):
    run = ["model=mlp", "hydra.run.dir=run", ON_TEST]
    train(*run, "trainer.max_steps=23")
    snapshots = tmp_path / "run" / "snapshots"
    shutil.copytree(list_snapshots(snapshots, "best")[0], snapshots / "best_00000099")
    train(*run, "trainer.epochs=2")
    assert step_of(list_snapshots(snapshots, "best")[0]) == newest_snapshot(tmp_path / "run")["progress"]["best_step"]


def test_what_is_advised_when_all_snapshots_are_damaged_works(train, tmp_path):
    run = ["model=mlp", "hydra.run.dir=run", "trainer.epochs=2", ON_TEST]
    train(*run, "snapshot.every=10steps", "trainer.max_steps=30")
    snapshots = tmp_path / "run" / "snapshots"
    for path in list_snapshots(snapshots):
        (path / "state.pt").write_bytes(b"damaged")
    sentence = train(*run, code=2).sentence
    assert "type another one, such as a best one, and to go on hydra.run.dir=<a new folder>" in sentence
    new = [*run, "hydra.run.dir=new", f"resume={list_snapshots(snapshots, 'best')[0]}"]
    assert f"resumed from {snapshots}/best_000000" in train(*new).output
    assert steps_of_snapshots(tmp_path / "new")[-1] == 46


def test_the_toy_preset_saves_every_ten_epochs_and_learns(train):
    run = train("experiment=toy_regression")
    assert steps_of_snapshots(run.folder) == [320, 640]
    loss = scalars(run.folder)["test/loss"]
    assert loss[-1][1] == pytest.approx(1 / 12, rel=0.15)  # the targets are uniform noise: variance 1/12
    assert loss[-1][1] < loss[0][1]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_costs_snapshots_and_curves_but_not_the_training(train, small_disk):
    wide = ["model=mlp", "model.width=128", "trainer.epochs=2", f"hydra.run.dir={small_disk}"]
    train(*wide, "trainer.max_steps=20")
    used = sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file())
    (small_disk / "ballast").write_bytes(bytes(2**21 - used - 2**17))
    run = train(*wide, "snapshot.every=5steps", code=2)
    assert f"free some space and type the command again with hydra.run.dir={small_disk}" in run.output
    assert "No space left on device" in run.output
    assert "epoch 2/2   step 46" in run.output
    assert newest_snapshot(small_disk)["progress"]["step"] >= 20
