"""Commands that fail: one sentence, the right exit code, and nothing half-written."""

import re

import pytest

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ([*PYTHON_TRAIN, "launch=fork"], 1),
        ([*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN], 1),  # torchrun's own exit code
    ],
    ids=["launch=fork", "torchrun"],
)
def test_a_learning_rate_that_is_too_large_ends_with_the_step_of_the_first_bad_loss(start, tmp_path, command, code):
    run = start(*command, "model=mlp", "optimizer.lr=1e10", "hydra.run.dir=run").finish(code)
    sentence = next(line for line in run.output.splitlines() if line.startswith("lockstep: the loss is "))
    words = sentence.split()
    assert words[4] in ("nan", "inf")
    assert words[5:7] == ["at", "step"]
    assert 2 <= int(words[7].rstrip(",;")) <= 10
    assert sentence.endswith("trainer.max_grad_norm=1.0")
    report = run.output.rpartition("lockstep: the loss is ")[2]
    assert re.search(
        r"\n  raised by all ranks, first by rank \d of \d \(.+, pid \d+\), in epoch 1, after step \d", report
    )
    assert re.search(r"\nits log, run/logs/rank\d.log, ends with:\n  .* gloo on cpu, . threads?, started by ", report)
    assert f"\nrun folder: {tmp_path}/run\nnewest snapshot: none; steps lost: " in report
    assert "resume: " not in report  # there is no snapshot to go on from
    assert "consequences" not in report
    assert not list(tmp_path.glob("run/snapshots/*"))
    assert not (tmp_path / "run/model.pt").exists()


FAILING_NET = """
from torch import nn

class FailsInTests(nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(64, classes)

    def forward(self, images):
        return super().forward(images.flatten(1)[:, : 64 if self.training else 63])
"""


def test_a_failing_evaluation_names_no_training_samples(train, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_NET)
    net = ["model._target_=failing.FailsInTests", "trainer.epochs=1"]
    run = train(*net, code=1, PYTHONPATH=tmp_path)
    assert "phase evaluation" in run.output
    assert "its batch held" not in run.output


def test_a_launcher_of_hydra_that_is_not_installed_is_refused(train):
    run = train("-m", "hydra/launcher=joblib", "optimizer.lr=0.1,0.01", code=2)
    assert "hydra/launcher=joblib is no option" in run.sentence


PREPARE = """
from lockstep.data.vision import Digits

class Data(Digits):
    def prepare(self):
        raise ConnectionError("Connection refused: the server of the data")
"""


def test_a_preparation_that_fails_before_the_ranks_start_is_one_sentence_and_blames_no_rank(train, tmp_path):
    (tmp_path / "fetching.py").write_text(PREPARE)
    words = ["launch=fork", "dataset._target_=fetching.Data"]
    run = train(*words, code=2, PYTHONPATH=tmp_path)
    said = "fetching.py:6: ConnectionError: Connection refused: the server of the data); type data_dir="
    assert said in run.sentence
    assert "another rank" not in run.output
    assert "Traceback" not in run.output


MODULE = """
import sys
from torch import nn

from lockstep.data.vision import Digits

{import_time}

class Net(nn.Module):
    def __init__(self):
        sys.exit(0)

class Data(Digits):
    def prepare(self):
        sys.exit(0)
"""
NET = "model._target_=ends.Net"
DATA = "dataset._target_=ends.Data"


@pytest.mark.parametrize(
    ("typed", "at_import", "launch"),
    [(NET, True, "env"), (NET, False, "fork"), (DATA, False, "env"), (DATA, False, "torchrun")],
)
def test_an_exit_with_0_before_the_training_is_a_failure(start, tmp_path, typed, at_import, launch):
    (tmp_path / "ends.py").write_text(MODULE.format(import_time="sys.exit(0)" if at_import else ""))
    run = start(*PYTHON_TRAIN, typed, f"launch={launch}", PYTHONPATH=tmp_path).finish(1)
    assert "exit code 0" in run.output
    assert "ends.py" in run.output
