"""What loggers write, and what happens when one of them cannot. Event files are read by TensorBoard's own backend."""

import logging
import shlex
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.cli import with_overrides_of_run
from lockstep.config.record import RECORD
from lockstep.errors import path_value
from lockstep.loggers.base import Logger, Loggers
from lockstep.loggers.console import ConsoleLogger
from lockstep.loggers.csv_logger import CSVLogger
from lockstep.loggers.tensorboard import TensorBoardLogger
from lockstep.runs.record import RunRecord, read_run
from support.event_files import Backend, images, scalars
from support.logged import epoch, read_rows, run_info


class Recorder(Logger):
    """Notes its calls in a list that several of them share. Raises `error`, if it has one."""

    def __init__(self, name, calls, error=None):
        self.name, self.calls, self.error = name, calls, error

    def _note(self, what):
        self.calls.append(f"{self.name} {what}")
        if self.error is not None:
            raise self.error

    def log(self, metrics, step):
        self._note(f"log {step}")

    def image(self, tag, image, step):
        self._note(f"image {tag} {step}")

    def close(self):
        self._note("close")


class Late(Recorder):
    def start(self, info):
        self._note("start")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError("a bug")])
def test_a_logger_that_fails_costs_one_warning_and_one_that_cannot_start_is_left_out(caplog, error, tmp_path):
    calls = []
    with Loggers([Recorder("broken", calls, error), Recorder("whole", calls)]) as loggers:
        for step in (1, 2):
            loggers.log({"train/lr": 0.1}, step)
    assert calls == [f"{name} {what}" for what in ("log 1", "log 2", "close") for name in ("broken", "whole")]
    (warning,) = caplog.records
    told = f"Recorder loses a part of this run ({type(error).__name__}: {error}); training goes on"
    assert warning.getMessage() == told
    assert bool(warning.exc_info) == isinstance(error, ZeroDivisionError)  # a full disk needs no traceback
    calls.clear()
    loggers = Loggers([Late("gone", calls, error), Late("there", calls)])
    loggers.start(run_info(tmp_path))
    loggers.log({"train/lr": 0.1}, 1)
    assert calls == ["gone start", "there start", "there log 1"]


def test_images_are_drawn_once_for_all_loggers_at_the_step_of_their_weights(tmp_path):
    def draw(loggers, step):
        loggers.draw("test", lambda: drawn.append(step) or {"test/worst": torch.ones(3, 5, 7)}, step)

    calls, drawn = [], []
    for sweep in (None, "s"):  # a job of a sweep that lasts less than ten seconds draws none
        with Loggers([Recorder("a", calls), TensorBoardLogger(f"{tmp_path}/{sweep}", 1), ConsoleLogger()]) as loggers:
            loggers.start(run_info(tmp_path, sweep=sweep))
            draw(loggers, 10)
            draw(loggers, 20)
            assert drawn == [20] * bool(sweep)  # the epochs are short
            loggers.end(run_info(tmp_path, sweep=sweep), "finished")
    assert (drawn, calls) == ([20], ["a image test/worst 20", "a close", "a close"])
    step, picture = images(tmp_path / "None")["test/worst"]
    assert (step, picture.size, picture.getpixel((0, 0))) == (20, (7, 5), (255, 255, 255))
    loggers.draw_at = 0.0
    draw(loggers, 30)
    draw(loggers, 40)  # so soon that it would take more than 1 % of the time
    assert drawn == [20, 30]


@pytest.mark.parametrize(
    ("error", "state", "code"), [(KeyboardInterrupt(), "stopped", 130), (ValueError("x"), "failed", 1)]
)
def test_run_json_has_how_the_run_ended(tmp_path, error, state, code):
    with suppress(type(error)), Loggers([RunRecord(tmp_path, ("val/accuracy", "max"))]) as loggers:
        loggers.start(run_info(tmp_path))
        loggers.log({"train/lr": 0.1}, 7)
        loggers.test({"step": 7, "metrics": {"loss": 0.5}}, is_logged=False)
        raise error
    run = read_run(tmp_path)
    last = run["starts"][-1]
    assert (last["state"], last["exit_code"], last["to_step"]) == (state, code, 7)
    assert run["test"]["metrics"] == {"loss": 0.5}  # the test set is read once


# The table and the curves.


def log_run(folder, epochs, step=0, state="finished", **changes):
    """What a run of `epochs` of two steps sends to TensorBoard and CSV. state: killed: it does not end."""
    folder.mkdir(exist_ok=True, parents=True)
    if any(folder.iterdir()):
        time.sleep(1)  # TensorBoard reads files in the order of their names, which have the second
    loggers = Loggers([TensorBoardLogger(str(folder), 1), CSVLogger(str(folder))])
    info = run_info(folder, step, **changes)
    loggers.start(info)
    for number in epochs:
        loggers.log({"train/running_loss": 3 / number, "train/lr": 0.1 * number}, 2 * number - 1)
        summary = epoch(number)
        summary.metrics["best"] = {"accuracy": 0.75}
        loggers.epoch(summary)
    if state != "killed":
        loggers.end(info, state)
        loggers.close()


def test_a_resumed_run_drops_the_points_after_its_snapshot(tmp_path):
    """What was logged before the kill is there: nothing waits in memory."""
    log_run(tmp_path, [1, 2, 3], state="killed")  # with a snapshot of epoch 1
    with (tmp_path / "metrics.csv").open("a") as file:  # a kill has cut it off
        file.write("2,test/acc")
    log_run(tmp_path, [2, 3], step=2, config={"trainer.epochs": 3})
    found = scalars(tmp_path)
    for tag, expected in {"train/running_loss": [1, 3, 5], "val/loss": [2, 4, 6]}.items():
        assert [step for step, _ in found[tag]] == expected
        assert [step for step, name, _ in read_rows(tmp_path) if name == tag] == expected
    log_run(tmp_path, [1])  # a fresh run in an old folder
    assert {step for step, _, _ in read_rows(tmp_path)} == {1, 2}
    assert [step for step, _ in scalars(tmp_path)["val/loss"]] == [2]


def test_the_hparams_table_has_the_keys_of_all_runs_and_numbers_are_numbers(tmp_path):
    dropped = {"run_dir": "a", "logger.csv.run_dir": "a", "model._target_": "x.y", "trainer.ema": None, "tags": ["a"]}
    config = {"optimizer.lr": 0.1, "trainer.compile": False, "dataset.mean": [0.5, 1]}
    log_run(tmp_path / "a", [1, 2], config=config | dropped, options={"model": "mlp", "launch": "fork", "data": None})
    log_run(tmp_path / "sweep" / "b", [1], state="stopped", config={"optimizer.lr": 1, "model.width": 8})
    backend, numbers, texts = Backend(tmp_path), ("model.width", "world_size"), ("trainer.compile", "dataset.mean")
    columns = {one["name"]: (one["type"].removeprefix("DATA_TYPE_"), one["differs"]) for one in backend.columns()}
    same = dict.fromkeys(numbers, ("FLOAT64", False)) | dict.fromkeys((*texts, "model"), ("STRING", False))
    assert columns == same | {"optimizer.lr": ("FLOAT64", True)}
    first, second = (backend.rows()[name] for name in ("a", "sweep/b"))
    values = {"optimizer.lr": 0.1, "trainer.compile": "false", "dataset.mean": "[0.5,1]", "model": "mlp"}
    assert first.hyperparameters == values | {"world_size": 1}
    assert (first.metrics["val/accuracy"], first.metrics["best/accuracy"]) == (0.25, 0.75)
    assert (first.status, second.status) == ("STATUS_SUCCESS", "STATUS_UNKNOWN")
    assert backend.runs() == ["a", "sweep/b"]
    (shown,) = backend.layout()  # equal layouts are shown once
    charts = {chart["title"]: chart["multiline"]["tag"] for chart in shown["chart"]}
    assert charts["loss"] == ["^(train|val|test)/loss$"]


# The console.


def test_the_console_shows_one_line_an_epoch_and_what_to_type_at_the_end(caplog, tmp_path):
    caplog.set_level(logging.INFO)
    console, info, second = ConsoleLogger(), run_info(tmp_path / "it's a run", world_size=3), epoch(2)
    second.metrics["best"] = {"accuracy": 0.875}
    console.start(info)
    console.epoch(epoch(1))
    console.epoch(second)
    info.run.progress = SimpleNamespace(step=4, best=0.875, best_step=2)
    test = {"step": 2, "metrics": {"loss": 0.5, "accuracy": 0.75}, "samples": 100, "errors": {"loss": 0.01}}
    ended = replace(info, last={"loss": 0.25, "accuracy": 0.96875}, test=test)
    console.end(ended, "finished")
    *said, evaluate, curves = caplog.messages
    assert said == [
        "1293 training, 144 validation and 360 test samples; batches of 64 samples",
        "epoch 1/2   step 2   train loss 1.0000 accuracy 0.5000   val loss 2.0000 accuracy 0.2500   1234 samples/s",
        "epoch 2/2   step 4   train loss 0.5000 accuracy 0.5000   val loss 1.0000 accuracy 0.2500   1234 samples/s",
        "finished: val loss 0.2500, accuracy 0.9688",
        "best:       val/accuracy 0.8750 at step 2",
        "test:       loss 0.5000 (0.4804 to 0.5196), accuracy 0.7500 (0.6570 to 0.8245), with the weights of step 2, "
        "chosen on val",
        f"run folder: {tmp_path}/it's a run",
    ]
    words = ["python", "src/train.py", "mode=evaluate", f"resume={path_value(info.run.config.run_dir)}"]
    assert shlex.split(evaluate.partition(":")[2]) == words
    assert shlex.split(curves.partition(":")[2]) == ["tensorboard", "--logdir", str(tmp_path / "it's a run")]
    caplog.clear()
    console.end(replace(ended, facts=ended.facts | {"sweep": "s"}), "finished")
    assert [line.partition(":")[0] for line in caplog.messages] == ["finished", "best", "test"]
    for name in ("1_optimizer.lr=0.01", "it's", 'a "b" c', "a\\b", "plain/1.5"):  # each can be typed as it is shown
        folder = tmp_path / name
        (folder / RECORD).mkdir(parents=True)
        (folder / RECORD / "overrides.yaml").write_text("[]")
        found = with_overrides_of_run(shlex.split(shlex.join(["mode=evaluate", f"resume={path_value(folder)}"])))
        (place,) = [word for word in found if word.startswith("hydra.run.dir=")]
        assert OverridesParser.create().parse_override(place).value() == str(folder / "evaluate")
