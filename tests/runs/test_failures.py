"""Commands that fail: one sentence, the right exit code, and nothing half-written. And outputs that nobody reads."""

import json
import re

import pytest

from support.commands import STARTERS, TRAIN
from support.pages import environment
from support.sweep_tables import states


@pytest.mark.parametrize("starter", ["launch=fork", "torchrun"])
def test_a_learning_rate_that_is_too_large_ends_with_the_step_of_the_first_bad_loss(start, tmp_path, starter):
    run = start(*STARTERS[starter], "model=mlp", "optimizer.lr=1e10", "hydra.run.dir=run").finish(1)
    sentence = next(line for line in run.output.splitlines() if line.startswith("lockstep: the loss is "))
    (step,) = re.match(
        r"lockstep: the loss is (?:nan|inf) at step (\d+).* trainer.max_grad_norm=1.0$", sentence
    ).groups()
    assert 2 <= int(step) <= 10
    report = run.output.rpartition("lockstep: the loss is ")[2]
    words = r"\n  raised by all ranks, first by rank \d of \d \(.+, pid \d+\), in epoch 1, after step \d"
    assert re.search(words, report)
    assert re.search(r"\nits log, run/logs/rank\d.log, ends with:\n  .* gloo on cpu, . threads?, started by ", report)
    assert f"\nrun folder: {tmp_path}/run\nnewest snapshot: none; steps lost: " in report
    assert "resume: " not in report  # there is no snapshot to go on from
    assert "consequences" not in report
    assert not [*tmp_path.glob("run/snapshots/*"), *tmp_path.glob("run/model.pt")]


OWN = """
import os
import sys
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.data.source import DataSource, Splits, Tensors
from lockstep.data.vision import Digits
from lockstep.models.tutorial import mlp

if "ImportExit" in "".join(sys.argv):
    sys.exit(0)


class FailsInTests(nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(64, classes)

    def forward(self, images):
        return super().forward(images.flatten(1)[:, : 64 if self.training else 63])


@dataclass
class Same(DataSource):  # for training and tests; a sample is its number
    def splits(self):
        numbers = torch.arange(64.0)
        both = Tensors(numbers[:, None], (numbers % 2).long())
        return Splits(both, both)


class SaysSamples(nn.Linear):
    def __init__(self):
        super().__init__(1, 2)
        self.passes = 0

    def forward(self, numbers):
        self.passes += self.training
        if self.passes == 10:  # in the second epoch
            raise ValueError(numbers.flatten().long().tolist())
        return super().forward(numbers / 64)


class ExitNet(nn.Module):
    def __init__(self):
        sys.exit(0)


class ExitData(Digits):
    def prepare(self):
        sys.exit(0)


class LostData(Digits):
    def prepare(self):
        raise ConnectionError("Connection refused: the server of the data")


def fails_once(shape, classes):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("once")
    return mlp(shape, classes, width=16, depth=1, dropout=0.0)
"""


@pytest.fixture(autouse=True)
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)


def test_the_samples_of_a_step_that_fails_are_named_by_their_numbers_in_the_data_set(train, tmp_path):
    words = ["dataset._target_=own.Same", "model._target_=own.SaysSamples", "trainer.batch_size=8"]
    run = train(*words, "hydra.run.dir=run", code=1, PYTHONPATH=tmp_path)
    first = json.loads((tmp_path / "run/failure.json").read_text())["first"]
    assert (first["epoch"], first["message"]) == (2, str(first["samples"]))
    assert len(re.findall("^dataset: ", run.output, re.M)) == 1  # its own arguments are named once


@pytest.mark.parametrize(
    ("typed", "code", "said", "not_said"),
    [
        ("model._target_=own.FailsInTests trainer.epochs=1", 1, "phase evaluation", "its batch held"),
        (
            "dataset._target_=own.LostData launch=fork",
            2,
            ": the server of the data); correct what it names, or type",
            "(another rank|Traceback)",
        ),
        # An exit with 0 before the training.
        ("model._target_=own.ImportExit", 2, "SystemExit: 0); type model._target_=", "finished"),
        ("model._target_=own.ExitNet launch=fork", 1, "exit code 0", "finished"),
        ("dataset._target_=own.ExitData launch=torchrun", 1, "exit code 0", "finished"),
    ],
)
def test_where_it_failed_is_told_and_who_is_not_to_blame_is_not_named(train, tmp_path, typed, code, said, not_said):
    run = train(*typed.split(), code=code, PYTHONPATH=tmp_path)
    assert said in run.output
    assert not re.search(not_said, run.output)
    assert "own.py" in run.output


@pytest.mark.parametrize(
    ("words", "reader", "code"),
    [
        ("trainer.max_steps=12", "| head -1", 0),
        ("trainer.max_steps=12 launch=torchrun launch.max_restarts=1 model._target_=own.fails_once", "| true", 0),
        ("model._target_=no.net", "|& true", 2),
        ("optimizer.lr=1e10 trainer.epochs=1", "|& true", 1),
        ("-m seed=1,2 trainer.max_steps=12 hydra.sweep.dir=run hydra.launcher.n_jobs=2", "| head -1", 0),
    ],
)
def test_a_run_whose_output_is_closed_ends_as_others_do(start, tmp_path, words, reader, code):
    command = f"python {TRAIN} model=mlp {words} hydra.run.dir=run {reader}"
    environ = environment(tmp_path) | {"PYTHONPATH": tmp_path}
    run = start("bash", "-o", "pipefail", "-c", command, **environ).finish(code)
    if "-m" in words:
        assert list(states(tmp_path / "run").values()) == ["finished", "finished"]
    elif code == 0:
        assert "finished: val loss" in (tmp_path / "run/train.log").read_text()
        assert (tmp_path / "run/model.pt").exists()
    if reader == "| head -1":
        assert "Traceback" not in run.output
    if words == "trainer.max_steps=12":  # without a word
        assert [line for line in run.output.splitlines() if line and not line.startswith("rank 0 of ")] == []
