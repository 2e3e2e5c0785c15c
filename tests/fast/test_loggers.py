"""What loggers write, and what happens when one of them cannot. Event files are read by TensorBoard's own backend."""

import csv
import logging
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from support.logged import epoch, run_info


class Recorder(Logger):
    """Notes its calls in a list that several of them share. Raises `error` if it has one."""

    def __init__(self, name: str, calls: list[str], error: Exception | None = None) -> None:
        self.name, self.calls, self.error = name, calls, error

    def _note(self, what: str) -> None:
        self.calls.append(f"{self.name} {what}")
        if self.error is not None:
            raise self.error

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._note(f"log {step}")

    def image(self, tag: str, image: torch.Tensor, step: int) -> None:
        self._note(f"image {tag} {step}")

    def close(self) -> None:
        self._note("close")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError("a bug")])
def test_a_logger_that_fails_costs_one_warning(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    calls: list[str] = []
    with Loggers([Recorder("broken", calls, error), Recorder("whole", calls)]) as loggers:
        for step in (1, 2):
            loggers.log({"train/lr": 0.1}, step)
    assert calls == [f"{name} {what}" for what in ("log 1", "log 2", "close") for name in ("broken", "whole")]
    (warning,) = caplog.records
    assert (
        warning.getMessage() == f"Recorder loses a part of this run ({type(error).__name__}: {error}); training goes on"
    )
    assert bool(warning.exc_info) == isinstance(error, ZeroDivisionError)  # a full disk needs no traceback


def test_a_logger_that_cannot_start_is_left_out(tmp_path: Path) -> None:
    class Late(Recorder):
        def start(self, info: Any) -> None:
            self._note("start")

    calls: list[str] = []
    loggers = Loggers([Late("gone", calls, ConnectionError("no service")), Late("there", calls)])
    loggers.start(run_info(tmp_path))
    loggers.log({"train/lr": 0.1}, 1)
    assert calls == ["gone start", "there start", "there log 1"]


def test_images_are_drawn_once_for_all_loggers_at_the_step_of_their_weights(tmp_path: Path) -> None:
    def draw(loggers: Loggers, step: int) -> None:
        loggers.draw("test", lambda: drawn.append(step) or {"test/worst": torch.ones(3, 5, 7)}, step)  # type: ignore[func-returns-value]

    calls, drawn = list[str](), list[int]()
    for sweep in (None, "s"):  # a job of a sweep that lasts less than ten seconds draws none
        with Loggers([Recorder("a", calls), TensorBoardLogger(f"{tmp_path}/{sweep}", 1), ConsoleLogger()]) as loggers:
            loggers.start(run_info(tmp_path, sweep=sweep))
            draw(loggers, 10)
            draw(loggers, 20)
            assert drawn == [20] * bool(sweep)  # the epochs are short
            loggers.end(run_info(tmp_path, sweep=sweep), "finished")
    assert drawn == [20]
    assert calls == ["a image test/worst 20", "a close", "a close"]
    step, picture = images(tmp_path / "None")["test/worst"]
    assert (step, picture.size, picture.getpixel((0, 0))) == (20, (7, 5), (255, 255, 255))
    loggers.draw_at = 0.0
    draw(loggers, 30)
    draw(loggers, 40)  # so soon that it would take more than 1 % of the time
    assert drawn == [20, 30]


def test_run_json_has_how_the_run_ended(tmp_path: Path) -> None:
    for error, state, code in ((KeyboardInterrupt(), "stopped", 130), (ValueError("x"), "failed", 1)):
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


def rows(folder: Path) -> list[tuple[int, str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [(int(row["step"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]


def log_run(folder: Path, epochs: Sequence[int], step: int = 0, state: str = "finished", **changes: Any) -> None:
    """What a run of `epochs` of two steps sends to TensorBoard and CSV. state: killed: it does not end."""
    folder.mkdir(exist_ok=True, parents=True)
    if any(folder.iterdir()):
        time.sleep(1)  # TensorBoard reads files in the order of their names, which have the second
    loggers, info = (
        Loggers([TensorBoardLogger(str(folder), 1), CSVLogger(str(folder))]),
        run_info(folder, step, **changes),
    )
    loggers.start(info)
    for number in epochs:
        loggers.log({"train/running_loss": 3 / number, "train/lr": 0.1 * number}, 2 * number - 1)
        summary = epoch(number)
        summary.metrics["best"] = {"accuracy": 0.75}
        loggers.epoch(summary)
    if state != "killed":
        loggers.end(info, state)
        loggers.close()


def test_a_resumed_run_drops_the_points_after_its_snapshot(tmp_path: Path) -> None:
    """What was logged before the kill is there: nothing waits in memory."""
    log_run(tmp_path, [1, 2, 3], state="killed")  # with a snapshot of epoch 1
    with (tmp_path / "metrics.csv").open("a") as file:  # a kill has cut it off
        file.write("2,test/acc")
    log_run(tmp_path, [2, 3], step=2, config={"trainer.epochs": 3})
    found = scalars(tmp_path)
    for tag, expected in {"train/running_loss": [1, 3, 5], "val/loss": [2, 4, 6]}.items():
        assert [step for step, _ in found[tag]] == expected
        assert [step for step, name, _ in rows(tmp_path) if name == tag] == expected
    log_run(tmp_path, [1])  # a fresh run in an old folder
    assert {step for step, _, _ in rows(tmp_path)} == {1, 2}
    assert [step for step, _ in scalars(tmp_path)["val/loss"]] == [2]


def test_the_hparams_table_has_the_keys_of_all_runs_and_numbers_are_numbers(tmp_path: Path) -> None:
    dropped = {"run_dir": "a", "logger.csv.run_dir": "a", "model._target_": "x.y", "trainer.ema": None, "tags": ["a"]}
    config = {"optimizer.lr": 0.1, "trainer.compile": False, "dataset.mean": [0.5, 1]}
    log_run(tmp_path / "a", [1, 2], config=config | dropped, options={"model": "mlp", "launch": "fork", "data": None})
    log_run(tmp_path / "sweep" / "b", [1], state="stopped", config={"optimizer.lr": 1, "model.width": 8})
    backend = Backend(tmp_path)
    columns = {one["name"]: (one["type"].removeprefix("DATA_TYPE_"), one["differs"]) for one in backend.columns()}
    assert columns == {
        "optimizer.lr": ("FLOAT64", True),
        "trainer.compile": ("STRING", False),
        "dataset.mean": ("STRING", False),
        "model": ("STRING", False),
        "model.width": ("FLOAT64", False),
        "world_size": ("FLOAT64", False),
    }
    found = backend.rows()
    values = {"optimizer.lr": 0.1, "trainer.compile": "false", "dataset.mean": "[0.5,1]", "model": "mlp"}
    assert found["a"].hyperparameters == values | {"world_size": 1}
    assert (found["a"].metrics["val/accuracy"], found["a"].metrics["best/accuracy"]) == (0.25, 0.75)
    assert (found["a"].status, found["sweep/b"].status) == ("STATUS_SUCCESS", "STATUS_UNKNOWN")
    assert backend.runs() == ["a", "sweep/b"]
    (shown,) = backend.layout()  # equal layouts are shown once
    charts = {chart["title"]: chart["multiline"]["tag"] for chart in shown["chart"]}
    assert charts["loss"] == ["^(train|val|test)/loss$"]


# The console.


def test_the_console_shows_one_line_an_epoch_and_three_at_the_end(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    console, info = ConsoleLogger(), run_info(tmp_path / "it's a run", world_size=3)
    console.start(info)
    console.epoch(epoch(1))
    second = epoch(2)
    second.metrics["best"] = {"accuracy": 0.875}
    console.epoch(second)
    info.run.progress = SimpleNamespace(step=4, best=0.875, best_step=2)
    test = {"step": 2, "metrics": {"loss": 0.5, "accuracy": 0.75}, "samples": 100, "errors": {"loss": 0.01}}
    ended = replace(info, last={"loss": 0.25, "accuracy": 0.96875}, test=test)
    console.end(ended, "finished")
    said = caplog.messages[:]
    assert said == [
        "1293 training, 144 validation and 360 test samples; batches of 64 samples",
        "epoch 1/2   step 2   train loss 1.0000 accuracy 0.5000   val loss 2.0000 accuracy 0.2500   1234 samples/s",
        "epoch 2/2   step 4   train loss 0.5000 accuracy 0.5000   val loss 1.0000 accuracy 0.2500   1234 samples/s",
        "finished: val loss 0.2500, accuracy 0.9688",
        "best:       val/accuracy 0.8750 at step 2",
        "test:       loss 0.5000 (0.4804 to 0.5196), accuracy 0.7500 (0.6570 to 0.8245), with the weights of step 2, "
        "chosen on val",
        f"run folder: {tmp_path}/it's a run",
        *said[-2:],
    ]
    evaluate = ["python", "src/train.py", "mode=evaluate", f"resume={path_value(info.run.config.run_dir)}"]
    assert shlex.split(said[-2].partition(":")[2]) == evaluate
    assert shlex.split(said[-1].partition(":")[2]) == ["tensorboard", "--logdir", str(tmp_path / "it's a run")]
    caplog.clear()
    console.end(replace(ended, facts=ended.facts | {"sweep": "s"}), "finished")
    assert [line.partition(":")[0] for line in caplog.messages] == ["finished", "best", "test"]


@pytest.mark.parametrize("folder", ["1_optimizer.lr=0.01", "it's", 'a "b" c', "a\\b", "plain/1.5"])
def test_the_evaluation_that_is_advised_can_be_typed(tmp_path: Path, folder: str) -> None:
    """A sweep's folders have = in their names."""
    (tmp_path / folder / RECORD).mkdir(parents=True)
    (tmp_path / folder / RECORD / "overrides.yaml").write_text("[]")
    line = shlex.join(["mode=evaluate", f"resume={path_value(tmp_path / folder)}"])
    found = with_overrides_of_run(shlex.split(line))
    (log_folder,) = [word for word in found if word.startswith("hydra.run.dir=")]
    assert OverridesParser.create().parse_override(log_folder).value() == str(tmp_path / folder / "evaluate")
