"""What loggers write, and what happens when one of them cannot. Event files are read by TensorBoard's own backend."""

import logging
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.cli import with_overrides_of_run
from lockstep.config.record import RECORD
from lockstep.loggers.base import Logger, Loggers
from lockstep.loggers.console import ConsoleLogger
from lockstep.loggers.csv_logger import CSVLogger
from lockstep.loggers.tensorboard import TensorBoardLogger
from support.event_files import Backend, images
from support.logged import epoch, read_rows, run_info


class Recorder(Logger):
    """Notes its calls in a list that several of them share. Raises `error`, if it has one, from these methods."""

    def __init__(self, name, calls, error=None, fails=("log", "close")):
        self.name, self.calls, self.error, self.fails = name, calls, error, fails

    def note(self, what):
        self.calls.append(f"{self.name} {what}")
        if self.error is not None and what.split()[0] in self.fails:
            raise self.error

    start = lambda self, info: self.note("start")  # noqa: E731
    log = lambda self, metrics, step: self.note(f"log {step}")  # noqa: E731
    image = lambda self, tag, image, step: self.note(f"image {tag} {step}")  # noqa: E731
    close = lambda self: self.note("close")  # noqa: E731


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
    loggers = Loggers([Recorder("gone", calls, error, ["start"]), Recorder("there", calls)])
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
    assert (drawn, calls) == ([20], ["a start", "a image test/worst 20", "a close", "a start", "a close"])
    step, picture = images(tmp_path / "None")["test/worst"]
    assert (step, picture.size, picture.getpixel((0, 0))) == (20, (7, 5), (255, 255, 255))
    loggers.draw_at = 0.0
    draw(loggers, 30)
    draw(loggers, 40)  # so soon that it would take more than 1 % of the time
    assert drawn == [20, 30]


def test_a_line_that_a_kill_has_cut_off_is_dropped_and_a_fresh_run_in_an_old_folder_begins_anew(tmp_path):
    """What was logged before the kill is there: nothing waits in memory."""
    for step, epochs in ((0, [1, 2, 3]), (2, [2]), (0, [1])):
        logger = CSVLogger(str(tmp_path))
        logger.start(run_info(tmp_path, step))
        for number in epochs:
            logger.log({"train/lr": 0.1}, 2 * number)
        found = [number for number, _, _ in read_rows(tmp_path)]
        assert found == {(0, 3): [2, 4, 6], (2, 1): [2, 4], (0, 1): [2]}[step, len(epochs)]
        with (tmp_path / "metrics.csv").open("a") as file:
            file.write("3,test/acc")


def test_the_hparams_table_has_the_keys_of_all_runs_and_numbers_are_numbers(tmp_path):
    dropped = {"run_dir": "a", "logger.csv.run_dir": "a", "model._target_": "x.y", "trainer.ema": None, "tags": ["a"]}
    config, others = {"optimizer.lr": 0.1, "trainer.compile": False, "dataset.mean": [0.5, 1]}, {"optimizer.lr": 1}
    first = {"config": config | dropped, "options": {"model": "mlp", "launch": "fork", "data": None}}
    rows = {"a": ("finished", first), "sweep/b": ("stopped", {"config": others | {"model.width": 8}})}
    for name, (state, facts) in rows.items():
        logger, summary, info = TensorBoardLogger(f"{tmp_path}/{name}", 1), epoch(1), run_info(tmp_path, **facts)
        summary.metrics["best"] = {"accuracy": 0.75}
        logger.start(info)
        logger.epoch(summary)
        logger.end(info, state)
        logger.close()
    backend, numbers, texts = Backend(tmp_path), ("model.width", "world_size"), ("trainer.compile", "dataset.mean")
    columns = {one["name"]: (one["type"].removeprefix("DATA_TYPE_"), one["differs"]) for one in backend.columns()}
    same = dict.fromkeys(numbers, ("FLOAT64", False)) | dict.fromkeys((*texts, "model"), ("STRING", False))
    assert columns == same | {"optimizer.lr": ("FLOAT64", True)}
    one, other = (backend.rows()[name] for name in rows)
    values = {"optimizer.lr": 0.1, "trainer.compile": "false", "dataset.mean": "[0.5,1]", "model": "mlp"}
    assert one.hyperparameters == values | {"world_size": 1}
    assert (one.metrics["val/accuracy"], one.metrics["best/accuracy"]) == (0.25, 0.75)
    assert (one.status, other.status) == ("STATUS_SUCCESS", "STATUS_UNKNOWN")
    (shown,) = backend.layout()  # equal layouts are shown once
    charts = {chart["title"]: chart["multiline"]["tag"] for chart in shown["chart"]}
    assert charts["loss"] == ["^(train|val|test)/loss$"]


def test_the_console_shows_one_line_an_epoch_and_what_can_be_typed_as_it_is_at_the_end(caplog, tmp_path):
    caplog.set_level(logging.INFO)
    console, info, second = ConsoleLogger(), run_info(tmp_path, world_size=3), epoch(2)
    second.metrics["best"] = {"accuracy": 0.875}
    console.start(info)
    console.epoch(second)
    info.run.progress = SimpleNamespace(step=4, best=0.875, best_step=2)
    test = {"step": 2, "metrics": {"loss": 0.5, "accuracy": 0.75}, "samples": 100, "errors": {"loss": 0.01}}
    ended = replace(info, last={"loss": 0.25, "accuracy": 0.96875}, test=test)
    console.end(replace(ended, facts=ended.facts | {"sweep": "s"}), "finished")
    assert caplog.messages == [
        "1293 training, 144 validation and 360 test samples; batches of 64 samples",
        "epoch 2/2   step 4   train loss 0.5000 accuracy 0.5000   val loss 1.0000 accuracy 0.2500   1234 samples/s",
        "finished: val loss 0.2500, accuracy 0.9688",
        "best:       val/accuracy 0.8750 at step 2",
        "test:       loss 0.5000 (0.4804 to 0.5196), accuracy 0.7500 (0.6570 to 0.8245), with the weights of step 2, "
        "chosen on val",
    ]
    for name in ("1_optimizer.lr=0.01", "it's", 'a "b" c', "a\\b", "plain/1.5"):
        folder = tmp_path / name
        (folder / RECORD).mkdir(parents=True)
        (folder / RECORD / "overrides.yaml").write_text("[]")
        info.run.config.run_dir = str(folder)
        caplog.clear()
        console.end(ended, "finished")
        evaluate, curves = (shlex.split(line.partition(":")[2]) for line in caplog.messages[-2:])
        assert curves == ["tensorboard", "--logdir", str(folder)]
        (place,) = [word for word in with_overrides_of_run(evaluate[2:]) if word.startswith("hydra.run.dir=")]
        assert OverridesParser.create().parse_override(place).value() == str(folder / "evaluate")
