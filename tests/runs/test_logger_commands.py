"""What a run shows: files of loggers, the console, images of evaluations, and the trace of the profiler."""

import json
import sys

import pytest
from PIL import Image

from support.commands import ROOT, TRAIN
from support.configs import composed, with_values
from support.event_files import images, scalars
from support.logged import read_rows
from support.worlds import in_world, same_bits, train_all

SHORT = ["model=linear", "trainer.epochs=2", "hydra.run.dir=run"]
START = "rank 0 of 1: gloo on cpu, 1 thread, started by python"
TRACED = "trainer.profiler={_target_:lockstep.training.profile.Profiler,after:3,steps:2}"
sys.path.insert(0, str(ROOT / "bench"))


def test_three_loggers_each_do_their_work(train, tmp_path):
    command, folder = train("logger=[tensorboard,console,csv]", *SHORT), tmp_path / "run"
    lines, table = command.output.splitlines(), {(step, tag): value for step, tag, value in read_rows(folder)}
    curves = {(step, tag): value for tag, found in scalars(folder).items() for step, value in found}
    assert lines[:2] == [START, "1293 training, 144 validation and 360 test samples; batches of 64 samples"]
    assert [line.split("   ")[:2] for line in command.epochs] == [["epoch 1/2", "step 21"], ["epoch 2/2", "step 42"]]
    evaluate = f"evaluate:   python {TRAIN} mode=evaluate resume={folder}"
    assert lines[-3:] == [f"run folder: {folder}", evaluate, f"curves:     tensorboard --logdir {folder}"]
    assert "%|" not in command.output  # no progress bar where no terminal watches
    assert curves == pytest.approx(table, rel=1e-6)
    assert [step for step, tag in table if tag == "train/running_loss"] == [10, 20, 30, 40]
    assert [step for step, tag in table if tag == "val/accuracy"] == [21, 42]


def test_a_progress_bar_is_shown_where_a_terminal_watches(tmp_path):
    from harness import run_on_terminal

    assert run_on_terminal([sys.executable, TRAIN, *SHORT, "trainer.batch_size=16"], tmp_path) == 0
    shown = (tmp_path / "console.log").read_text()
    assert "epoch 1/2:  12%|" in shown  # after 10 steps of 16 samples
    assert "/1293 [" in shown
    assert "epoch 2/2   step 162" in shown


def test_a_run_draws_its_last_evaluation_and_the_option_says_how_much(tmp_path):
    base, counts = composed("model=linear", "trainer.epochs=2", "logger=[tensorboard]", whole=False), (0, 4, 25)
    words = [(f"run_dir={tmp_path / str(count)}", f"logger.tensorboard.images={count}") for count in counts]
    in_world(2, train_all, [with_values(base, *each) for each in words])
    none, few, all_25 = (images(tmp_path / str(count)) for count in counts)
    assert none == {}
    kinds = ("worst_first", "confusion_matrix")
    assert all_25.keys() == {f"{split}/{what}" for split in ("val", "test") for what in kinds}
    assert all_25["test/worst_first"][1].size[1] > 4 * few["test/worst_first"][1].size[1]
    step, matrix = all_25["test/confusion_matrix"]
    assert (step, isinstance(matrix, Image.Image)) == (42, True)


def test_a_profiled_run_has_a_trace_of_its_steps_and_ends_with_the_same_bits(tmp_path):
    on, off = tmp_path / "on", tmp_path / "off"
    small = ["model=mlp", "trainer.batch_size=240", "trainer.epochs=2", "logger=[]"]
    in_world(2, train_all, [composed(f"run_dir={on}", *small, TRACED), composed(f"run_dir={off}", *small)])
    assert same_bits(on, off)
    traces = sorted((on / "trace").iterdir())
    assert [path.name.split(".")[:2] for path in traces] == [["rank0", "3"], ["rank1", "3"]]
    for path in traces:
        names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
        assert len({name for name in names if name.startswith("ProfilerStep")}) == 2
        assert names.count("aten::cross_entropy_loss") == 2
    assert not (off / "trace").exists()
