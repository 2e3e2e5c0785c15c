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
RUN = ["model=mlp", "hydra.run.dir=run"]


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
    assert sorted(path.name for path in (same / ".hydra").iterdir()) == ["config.yaml", "overrides.yaml"]
    assert "max_steps: null" in (same / ".hydra" / "config.yaml").read_text()


def test_average_best_and_patience_survive_a_restart(train, tmp_path):
    judged = ["model=mlp", "scheduler=constant", ema(0.9), "trainer.epochs=40", "evaluation.patience=2"]
    judged += ["snapshot.keep_last=1", "optimizer.lr=0.5", ON_TEST]
    whole = train(*judged, "hydra.run.dir=whole")
    train(*judged, "hydra.run.dir=parts", "trainer.max_steps=30")
    parts = train(*judged, "hydra.run.dir=parts")
    assert parts.epochs[-1].split("step")[1] == whole.epochs[-1].split("step")[1]
    assert len(whole.epochs) < 40
    assert same_bits(tmp_path / "whole", tmp_path / "parts")
    curve, best = scalars(tmp_path / "whole")["val/accuracy"], best_snapshot(tmp_path / "parts")["progress"]
    assert best["best"] == pytest.approx(max(value for _, value in curve), abs=1e-6)
    assert best["step"] == curve[-3][0]
    assert len(steps_of_snapshots(tmp_path / "parts")) == 1


def test_how_often_a_run_saves_and_how_much_it_keeps_beside_damaged_ones(train, tmp_path):
    snapshots = tmp_path / "run" / "snapshots"
    words = [*RUN, ON_TEST, "trainer.epochs=2", "logging.every=7"]
    train(*words, "snapshot.every=10steps", "snapshot.keep_last=9", "trainer.max_steps=30")
    assert steps_of_snapshots(tmp_path / "run") == [10, 20, 30]
    shutil.copytree(list_snapshots(snapshots, "best")[0], snapshots / "best_00000099")  # of steps trained again
    for path in list_snapshots(snapshots)[:2]:
        (path / "state.pt").write_bytes(b"damaged")
    resumed = train(*words, "snapshot.every=15steps", "snapshot.keep_last=3")
    assert "step_00000020 is damaged" in resumed.output
    assert steps_of_snapshots(tmp_path / "run") == [30, 45, 46]
    assert (snapshots / "step_00000020.damaged").is_dir()
    assert step_of(list_snapshots(snapshots, "best")[0]) == newest_snapshot(tmp_path / "run")["progress"]["best_step"]
    assert [step for step, _ in scalars(tmp_path / "run")["train/lr"]] == [7, 14, 21, 28, 35, 42]
    for path in list_snapshots(snapshots):
        (path / "state.pt").write_bytes(b"damaged")
    sentence = train(*words, code=2).sentence
    assert "type another one, such as a best one, and to go on hydra.run.dir=<a new folder>" in sentence
    more = ["trainer.epochs=3", "hydra.run.dir=new", f"resume={list_snapshots(snapshots, 'best')[0]}"]
    assert f"resumed from {snapshots}/best_000000" in train(*words, *more).output
    assert steps_of_snapshots(tmp_path / "new")[-1] == 69


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
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
