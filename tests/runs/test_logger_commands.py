"""logger=[...] in whole commands: which files appear, what the console shows, what is imported."""

import shutil
import sys

import pytest

from support.commands import ROOT, TRAIN
from support.configs import composed
from support.event_files import MEASURED, scalars
from support.logged import read_rows
from support.worlds import in_world
from support.worlds import train as train_in_rank

SHORT = ["model=linear", "trainer.epochs=2", "hydra.run.dir=run"]
START = "rank 0 of 1: gloo on cpu, 2 threads, started by python"
sys.path.insert(0, str(ROOT / "bench"))


def points(folder):
    """{(step, tag): value} of the event files, and of metrics.csv."""
    curves = {(step, tag): value for tag, found in scalars(folder).items() for step, value in found}
    return curves, {(step, tag): value for step, tag, value in read_rows(folder)}


def test_three_loggers_each_do_their_work(train, tmp_path):
    command, folder = train("logger=[tensorboard,console,csv]", *SHORT), tmp_path / "run"
    lines, (curves, table) = command.output.splitlines(), points(folder)
    assert lines[:2] == [START, "1293 training, 144 validation and 360 test samples; batches of 64 samples"]
    assert [line.split("   ")[:2] for line in command.epochs] == [["epoch 1/2", "step 21"], ["epoch 2/2", "step 42"]]
    evaluate = f"evaluate:   python {TRAIN} mode=evaluate resume={folder}"
    assert lines[-3:] == [f"run folder: {folder}", evaluate, f"curves:     tensorboard --logdir {folder}"]
    assert curves == pytest.approx(table, rel=1e-6)
    assert [step for step, tag in table if tag == "train/running_loss"] == [10, 20, 30, 40]
    assert [step for step, tag in table if tag == "val/accuracy"] == [21, 42]


def test_without_tensorboard_nothing_of_it_is_imported_or_written(start, tmp_path):
    command = start(sys.executable, "-X", "importtime", TRAIN, "logger=[console]", *SHORT).finish()
    lines = [line for line in command.output.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "torch" in imported
    assert not {name for name in imported if "tensorboard" in name or name == "lockstep.tasks.reports"}
    assert len(command.epochs) == 2
    assert not [*(tmp_path / "run").glob("events.*"), *(tmp_path / "run").glob("metrics.csv")]


def test_a_progress_bar_is_shown_where_a_terminal_watches(train, tmp_path):
    from harness import run_on_terminal

    command = [sys.executable, TRAIN, *SHORT, "trainer.batch_size=16"]
    assert run_on_terminal(command, tmp_path) == 0
    shown = (tmp_path / "console.log").read_text()
    assert "epoch 1/2:  12%|" in shown  # after 10 steps of 16 samples
    assert "/1293 [" in shown
    assert "epoch 2/2   step 162" in shown
    shutil.rmtree(tmp_path / "run")
    assert "%|" not in train(*SHORT).output


def test_the_speed_of_the_first_epoch_leaves_out_the_first_step(tmp_path):
    words = ["dataset=random", "dataset.samples=64", "trainer.batch_size=16", "trainer.epochs=2", "logger=[csv]"]
    words += ["model=mlp", "model._target_=support.slow.SlowAtFirst", f"run_dir={tmp_path}"]
    in_world(1, train_in_rank, composed(*words))
    speeds = [value for _, tag, value in read_rows(tmp_path) if tag == "speed/samples_per_s"]
    assert len(speeds) == 2
    assert min(speeds) > 64 / 3


def test_a_resumed_run_leaves_one_curve(tmp_path):
    def unmeasured():
        return [{key: one for key, one in each.items() if not key[1].startswith(MEASURED)} for each in points(tmp_path)]

    cfg = composed(f"run_dir={tmp_path}", "model=linear", "trainer.epochs=3", "logger=[tensorboard,csv]")
    in_world(1, train_in_rank, cfg)
    whole = unmeasured()
    for path in (tmp_path / "snapshots").glob("step_*[0-9]"):
        if path.name != "step_00000023":
            shutil.rmtree(path)  # as if the run had been killed while it wrote the second snapshot
    in_world(1, train_in_rank, cfg)
    assert unmeasured() == whole
