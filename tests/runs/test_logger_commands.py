"""logger=[...] in whole commands: which files appear, what the console shows, what is imported."""

import shutil
import sys

import pytest

from lockstep.loggers.csv_logger import read_rows
from support.commands import ROOT, TRAIN
from support.configs import composed
from support.event_files import MEASURED, scalars
from support.worlds import in_world
from support.worlds import train as train_in_rank

SHORT = ["model=linear", "trainer.epochs=2", "hydra.run.dir=run"]
START = "rank 0 of 1: gloo on cpu, 2 threads, started by python"
sys.path.insert(0, str(ROOT / "bench"))


def rows(folder):
    return read_rows(folder / "metrics.csv")


def test_three_loggers_each_do_their_work(train, tmp_path):
    command = train("logger=[tensorboard,console,csv]", *SHORT)
    lines = command.output.splitlines()
    assert lines[:2] == [START, "1293 training, 144 validation and 360 test samples; batches of 64 samples"]
    assert [line.split("   ")[:2] for line in command.epochs] == [["epoch 1/2", "step 21"], ["epoch 2/2", "step 42"]]
    folder = tmp_path / "run"
    assert lines[-3:] == [
        f"run folder: {folder}",
        f"evaluate:   python {TRAIN} mode=evaluate resume={folder}",
        f"curves:     tensorboard --logdir {folder}",
    ]
    found = scalars(tmp_path / "run")
    table = {(step, tag): pytest.approx(value, rel=1e-6) for step, tag, value in rows(tmp_path / "run")}
    assert {(step, tag): value for tag, points in found.items() for step, value in points} == table
    assert [step for step, _ in found["train/running_loss"]] == [10, 20, 30, 40]
    assert [step for step, _ in found["val/accuracy"]] == [21, 42]


def test_without_tensorboard_nothing_of_it_is_imported_or_written(start, tmp_path):
    command = start(sys.executable, "-X", "importtime", TRAIN, "logger=[console]", *SHORT).finish()
    imported = {
        line.rpartition("|")[2].strip() for line in command.output.splitlines() if line.startswith("import time:")
    }
    assert "torch" in imported
    assert not {name for name in imported if "tensorboard" in name}
    assert "lockstep.tasks.reports" not in imported
    assert len(command.epochs) == 2
    assert not list((tmp_path / "run").glob("events.*"))
    assert not (tmp_path / "run" / "metrics.csv").exists()


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
    slow = ["dataset=random", "dataset.samples=64", "trainer.batch_size=16", "trainer.epochs=2", "logger=[csv]"]
    model = ["model=mlp", "model._target_=support.slow.SlowAtFirst"]
    in_world(1, train_in_rank, composed(*slow, *model, f"run_dir={tmp_path}"))
    first, second = [value for _, tag, value in rows(tmp_path) if tag == "speed/samples_per_s"]
    assert min(first, second) > 64 / 3


def test_a_resumed_run_leaves_one_curve(tmp_path):
    def unmeasured():
        points = [(step, tag, value) for tag, found in scalars(tmp_path).items() for step, value in found]
        return [row for table in (sorted(points), rows(tmp_path)) for row in table if not row[1].startswith(MEASURED)]

    cfg = composed(f"run_dir={tmp_path}", "model=linear", "trainer.epochs=3", "logger=[tensorboard,csv]")
    in_world(1, train_in_rank, cfg)
    whole = unmeasured()
    for path in (tmp_path / "snapshots").glob("step_*[0-9]"):
        if not path.name.startswith("step_00000023"):
            shutil.rmtree(path)  # as if the run had been killed while it wrote the second snapshot
    in_world(1, train_in_rank, cfg)
    assert unmeasured() == whole
