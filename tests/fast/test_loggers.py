"""What loggers and modes write, what happens when one cannot, what a loaded net takes, and exported nets."""

import io
import logging
import shlex
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch import nn

import lockstep
from lockstep.cli import with_overrides_of_run
from lockstep.config.record import RECORD
from lockstep.data.loader import InputConverter
from lockstep.loggers.base import CSVLogger, Logger, Loggers
from lockstep.loggers.console import ConsoleLogger
from lockstep.loggers.tensorboard import TensorBoardLogger
from lockstep.modes.trained_net import TrainedNet
from lockstep.tasks.tasks import MultiLabel, Regression
from support.commands import ema
from support.configs import composed, with_values
from support.event_files import Backend, scalars
from support.logged import epoch, read_rows, run_info
from support.worlds import in_world, train_all

# Extras, each of which a fork may have deleted with its tests.
with suppress(ImportError):
    from lockstep.models.gpt import gpt
with suppress(ImportError):
    from lockstep.modes.export import net_as


class Recorder(Logger):
    def __init__(self, name, calls, error=None, fails=("log", "close")):
        self.name, self.calls, self.error, self.fails = name, calls, error, fails

    def note(self, what):
        self.calls.append(f"{self.name} {what}")
        if self.error is not None and what.split()[0] in self.fails:
            raise self.error

    start = lambda self, info: self.note("start")  # noqa: E731
    log = lambda self, metrics, step: self.note(f"log {step}")  # noqa: E731
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


def test_a_resumed_run_drops_the_points_after_its_snapshot_and_a_fresh_run_in_an_old_folder_all(tmp_path):
    """What was logged before the kill is there: nothing waits in memory."""
    for lr, step, epochs, left in ((0.1, 0, [1, 2, 3], [2, 4, 6]), (0.1, 2, [2], [2, 4]), (0.3, 0, [1], [2])):
        for logger in (CSVLogger(), TensorBoardLogger(images=1)):
            logger.start(run_info(tmp_path, step, config={"optimizer.lr": lr}))
            for number in epochs:
                logger.log({"train/lr": 0.1}, 2 * number)
        assert [number for number, _, _ in read_rows(tmp_path)] == left
        assert [number for number, _ in scalars(tmp_path)["train/lr"]] == left
        with (tmp_path / "metrics.csv").open("a") as file:
            file.write("3,test/acc")  # a kill has cut it off
        (row,) = Backend(tmp_path).rows().values()
        assert row.hyperparameters["optimizer.lr"] == lr
        time.sleep(1)  # TensorBoard reads files in the order of their names, which have the second


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


PLAIN = InputConverter(torch.float32)


def test_a_net_takes_arrays_and_lists_and_predicts_what_its_task_says():
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    net = TrainedNet(layers, InputConverter(torch.float32, mean=[0.25], std=[0.5]), "bf16", ["a", "b", "c"])
    images = torch.randint(0, 256, (5, 1, 2, 2), dtype=torch.uint8)
    classes = net.predict(images)
    assert net.predict(images.numpy()) == net.predict(list(images)) == net.predict(list(images.numpy())) == classes
    assert isinstance(net(np.zeros((2, 1, 2, 2), dtype=np.uint8)), torch.Tensor)
    values = torch.tensor([[1.5], [-2.0]])
    assert TrainedNet(nn.Identity(), PLAIN, "fp32", task=Regression).predict(values) == values.tolist()
    labels = TrainedNet(nn.Identity(), PLAIN, "fp32", ["a", "b"], task=MultiLabel).predict(torch.eye(2) - 0.5)
    assert labels == [[1, 0], [0, 1]]


def test_an_exported_net_takes_any_number_of_tokens_and_one_sample_is_example_enough():
    net = gpt(shape=[12], classes=7, layers=1, heads=2, width=8, dropout=0.0, tied=False, variant="gpt2")
    tokens, image = torch.randint(0, 7, (5, 12)), torch.randint(0, 256, (1, 1, 2, 2), dtype=torch.uint8)
    cuts = [tokens[:rows, :length] for rows, length in ((1, 12), (3, 5), (2, 1))]
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for made, samples, others in ((net, tokens, cuts), (layers, image, [image.expand(7, 1, 2, 2)])):
        trained = TrainedNet(made, PLAIN, "fp32", [])
        program = torch.export.load(io.BytesIO(net_as(trained, samples, "torch_export"))).module()
        for other in others:
            torch.testing.assert_close(program(other), trained(other))


def test_the_best_weights_have_a_file_of_their_own_if_they_are_not_the_last(tmp_path):
    """An optimizer that makes the loss larger: the best evaluation is the first one."""
    words = ["model=linear", "optimizer=adamw", "optimizer.fused=false", ema(0.9), "logger=[]", "strategy=fsdp"]
    base = composed(*words, "+optimizer.maximize=true", "monitor=val/loss", "trainer.epochs=2", whole=False)
    worse, best = (with_values(base, f"run_dir={tmp_path / name}") for name in ("worse", "best"))
    in_world(2, train_all, [worse, with_values(best, "trainer.pause_after=1")])
    files = {name: sorted(path.name for path in (tmp_path / name).glob("*.pt")) for name in ("worse", "best")}
    assert files == {"worse": ["model.pt", "model_best.pt"], "best": ["model.pt"]}
    places = ("worse/model.pt", "worse/model_best.pt", "best/model.pt")
    last, first, expected = (torch.load(tmp_path / place, weights_only=True) for place in places)
    loaded = lockstep.load(tmp_path / "worse", which="best").net.state_dict()
    assert last.keys() == first.keys() == expected.keys() == loaded.keys()
    for name in first:
        assert torch.equal(first[name], expected[name]), name
        assert torch.equal(first[name], loaded[name]), name
        assert not torch.equal(first[name], last[name]), name
    # A rank that died while it wrote the best snapshot has left that of another step.
    (snapshot,) = (tmp_path / "worse" / "snapshots").glob("best_*")
    snapshot.rename(snapshot.with_name("best_00000099"))
    (tmp_path / "worse" / "model.pt").unlink()
    in_world(2, train_all, [worse])
    assert sorted(path.name for path in (tmp_path / "worse").glob("*.pt")) == ["model.pt"]
