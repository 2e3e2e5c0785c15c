"""`_target_` typed on the command line: what the option said for another class is left out, and the run can be used."""

import re
import shlex
import sys

import pytest

from support.commands import PYTHON_TRAIN

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""
RADAM, STEP = "optimizer._target_=torch.optim.RAdam", "scheduler._target_=torch.optim.lr_scheduler.StepLR"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "own.py").write_text(NET)
    return {"PYTHONPATH": tmp_path}


@pytest.mark.parametrize("launch", ["env", "fork"])
def test_typed_classes_need_no_words_that_remove_keys(start, path, launch):
    words = ["model._target_=own.Net", RADAM, STEP, "+scheduler.step_size=2", f"launch={launch}", "trainer.max_steps=3"]
    run = start(*PYTHON_TRAIN, *words, **path).finish()
    assert "model: own.Net takes no classes or shape; left out\n" in run.output
    assert "optimizer: torch.optim.RAdam takes no fused, momentum or nesterov; left out\n" in run.output
    assert len(re.findall("left out$", run.output, re.MULTILINE)) == 3
    assert "finished: " in run.output


def test_a_sweep_and_a_check_of_a_typed_class(start, path):
    swept = start(*PYTHON_TRAIN, "-m", "model._target_=own.Net", "seed=1,2", "trainer.max_steps=2", **path).finish()
    assert "sweep: 2 finished" in swept.output
    checked = start(*PYTHON_TRAIN, "mode=check", "model._target_=own.Net", **path).finish()
    assert "own.Net takes no classes or shape" in checked.output


def test_a_typed_key_that_nothing_takes_is_refused(start, path):
    run = start(*PYTHON_TRAIN, "model._target_=own.Net", "model.shape=[1,8,8]", **path).finish(2)
    assert (
        run.sentence
        == "lockstep: own.Net takes no shape; leave model.shape out, or type model=<an option in conf/model>"
    )


def test_the_line_that_evaluates_a_run_can_be_typed_as_it_is(start, path, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "linear_net.yaml").write_text("_target_: own.Net\n")
    for number, words in enumerate((["model._target_=own.Net"], ["--config-dir=mine", "model=linear_net"])):
        run = start(*PYTHON_TRAIN, *words, "trainer.max_steps=2", f"hydra.run.dir=run{number}", **path).finish()
        _, typed = next(line for line in run.output.splitlines() if line.startswith("evaluate:")).split(maxsplit=1)
        again = start(sys.executable, *shlex.split(typed)[1:], **path).finish()
        assert "evaluated: test loss" in again.output


def test_the_best_job_of_a_sweep_can_be_run_again_as_the_summary_says(start, path, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "linear_net.yaml").write_text("_target_: own.Net\n")
    words = ["-m", "--config-dir=mine", "model=linear_net", "seed=1,2", "trainer.max_steps=2"]
    run = start(*PYTHON_TRAIN, *words, **path).finish()
    (typed,) = re.findall(r"^run it again: (.*)$", run.output, re.MULTILINE)
    start(sys.executable, *shlex.split(typed)[1:], **path).finish()


def test_a_loss_and_a_metric_of_ones_own_have_the_same_numbers_on_two_ranks(start):
    words = [
        "dataset=random",
        "model=mlp",
        "trainer.max_steps=20",
        "task.loss={_target_: torch.nn.HuberLoss, delta: 0.1}",
    ]
    words += ["+task.measures.mae={_target_: torch.nn.L1Loss}", "+task.metrics.mae=min"]
    found = []
    for launch in ("env", "fork"):
        run = start(*PYTHON_TRAIN, *words, f"launch={launch}").finish()
        (line,) = re.findall(r"^finished: val loss ([\d.]+), mae ([\d.]+)$", run.output, re.MULTILINE)
        found.append([float(value) for value in line])
    assert found[0] == pytest.approx(found[1], abs=2e-4)
    assert 0 < found[0][0] < 0.1 * found[0][1]  # Huber's loss with delta 0.1 is below a tenth of the distance


def test_a_yaml_file_that_builds_on_an_option_and_names_another_class_needs_no_arguments_of_it(start, tmp_path):
    for group, text in {
        "scheduler": "defaults: [torch]\nschedule: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: 5}\n",
        "optimizer": "defaults: [sgd]\n_target_: torch.optim.RAdam\n",
    }.items():
        (tmp_path / "mine" / group).mkdir(parents=True)
        (tmp_path / "mine" / group / "own.yaml").write_text(text)
    words = ["--config-dir=mine", "scheduler=own", "optimizer=own", "trainer.max_steps=2"]
    run = start(*PYTHON_TRAIN, *words).finish()
    assert "scheduler.schedule: torch.optim.lr_scheduler.CosineAnnealingLR takes no gamma; left out\n" in run.output
    assert "optimizer: torch.optim.RAdam takes no fused, momentum or nesterov; left out\n" in run.output
    run = start(*PYTHON_TRAIN, *words, "scheduler.schedule.gamma=0.5").finish(2)
    assert "CosineAnnealingLR takes no gamma; leave scheduler.schedule.gamma out" in run.sentence


def test_python_without_unsafe_paths_finds_the_project(start):
    run = start(sys.executable, "-P", *PYTHON_TRAIN[1:], "launch=fork", "trainer.max_steps=2").finish()
    assert "finished: " in run.output
