"""Arguments do not outlive their class: what a typed `_target_` keeps of an option, and what its run is used for."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.runs.record import read_run
from support.commands import PYTHON_TRAIN, Command
from support.configs import composed
from support.refusals import answer

Start = Callable[..., Command]
NET = """
from torch import nn
from lockstep.tasks.tasks import CrossEntropy

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

def anything(**options):
    return nn.Linear(**options)

class Inherits(CrossEntropy):
    pass

class Wide(nn.Sequential):
    def __init__(self, shape, classes, width=3):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))
"""
RADAM = "optimizer._target_=torch.optim.RAdam"
# What is typed, the node, and its arguments then.
KEPT: list[tuple[str, str, dict[str, Any]]] = [
    ("model=mlp model._target_=own.Net", "model", {}),
    ("model=mlp model._target_=own.Wide", "model", {"shape": [1, 8, 8], "classes": 10}),
    ("model=mlp model._target_=own.Wide model.width=5", "model", {"shape": [1, 8, 8], "classes": 10, "width": 5}),
    ("model=linear model._target_=own.Wide +model.width=5", "model", {"shape": [1, 8, 8], "classes": 10, "width": 5}),
    ("model=mlp model._target_=own.Wide model.classes=7", "model", {"shape": [1, 8, 8], "classes": 7}),
    ("model=mlp +model.head=1 model._target_=own.Net ~model.head", "model", {}),
    ("model._target_=own.anything +model.in_features=3", "model", {"in_features": 3}),
    ("dataset.shape=[2] model=mlp model._target_=own.Wide", "model", {"shape": [2], "classes": 10}),
    (RADAM, "optimizer", {}),
    (f"{RADAM} optimizer.lr=0.1", "optimizer", {"lr": 0.1}),
    (
        "optimizer.lr=0.1",
        "optimizer",
        {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0, "fused": None},
    ),
    ("scheduler._target_=lockstep.training.schedules.step +scheduler.gamma=0.5", "scheduler", {"gamma": 0.5}),
]
# What is typed, and what the sentence says.
REFUSED = [
    ("model._target_=own.Net model.shape=[1,8,8]", "own.Net takes no shape; type ~model.shape"),
    (f"{RADAM} optimizer.momentum=0.5", "torch.optim.RAdam takes no momentum, but "),
]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    (tmp_path / "own.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return {"PYTHONPATH": tmp_path}


@pytest.fixture
def option(tmp_path: Path) -> str:
    """A config folder of the user's own, with the model linear_net."""
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "linear_net.yaml").write_text("_target_: own.Net\n")
    return "--config-dir=mine"


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("typed", "key", "arguments"), KEPT, ids=[row[0] for row in KEPT])
def test_what_a_typed_class_keeps_of_the_option(typed: str, key: str, arguments: dict[str, Any]) -> None:
    node = getattr(composed(*typed.split()), key)
    assert {name: value for name, value in node.items() if name != "_target_"} == arguments


@pytest.mark.usefixtures("path")
def test_a_class_with_the_constructor_of_one_of_ours_keeps_the_literals_that_it_names() -> None:
    assert composed("task._target_=own.Inherits", "task.class_weights=[1,2]").task["label_smoothing"] == 0


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("typed", "said"), REFUSED)
def test_a_typed_key_that_nothing_takes_is_refused(typed: str, said: str) -> None:
    assert said in str(answer(*typed.split()))


@pytest.mark.parametrize("launch", ["env", "fork"])
def test_typed_classes_need_no_words_that_remove_keys(start: Start, path: dict[str, Path], launch: str) -> None:
    step = "scheduler.schedule={_target_:torch.optim.lr_scheduler.StepLR,step_size:2}"
    words = ["model=mlp", "model._target_=own.Net", RADAM, "scheduler=torch", step, f"launch={launch}"]
    run = start(*PYTHON_TRAIN, *words, "trainer.max_steps=3", **path).finish()
    said = [line for line in run.output.splitlines() if line.endswith("not those of the option")]
    assert said == [
        "model: own.Net has its own depth, dropout, width, not those of the option",
        "optimizer: torch.optim.RAdam has its own fused, lr, momentum, nesterov, weight_decay, not those of the option",
    ]
    assert "finished: " in run.output


def test_a_sweep_and_a_check_of_a_typed_class(start: Start, path: dict[str, Path]) -> None:
    swept = start(*PYTHON_TRAIN, "-m", "model._target_=own.Net", "seed=1,2", "trainer.max_steps=2", **path).finish()
    assert "sweep: 2 finished" in swept.output
    start(*PYTHON_TRAIN, "mode=check", "model._target_=own.Net", **path).finish()


def test_the_line_that_evaluates_a_run_can_be_typed_as_it_is(start: Start, path: dict[str, Path], option: str) -> None:
    for number, words in enumerate((["model._target_=own.Net"], [option, "model=linear_net"])):
        run = start(*PYTHON_TRAIN, *words, "trainer.max_steps=2", f"hydra.run.dir=run{number}", **path).finish()
        _, typed = next(line for line in run.output.splitlines() if line.startswith("evaluate:")).split(maxsplit=1)
        again = start(sys.executable, *shlex.split(typed)[1:], **path).finish()
        assert "evaluated: test loss" in again.output


def test_a_job_of_a_sweep_can_be_run_again_as_its_record_says(start: Start, path: dict[str, Path], option: str) -> None:
    words = ["-m", option, "model=linear_net", "seed=1,2", "trainer.max_steps=2"]
    run = start(*PYTHON_TRAIN, *words, **path).finish()
    (folder,) = re.findall(r"^sweep: 2 jobs, 1 at once; 0 have finished before; in (.*)$", run.output, re.MULTILINE)
    typed = read_run(run.cwd / folder / "seed=2")["command"]
    assert "finished: " in start(sys.executable, *shlex.split(typed)[1:], **path).finish().output


def test_a_loss_and_a_metric_of_ones_own_have_the_same_numbers_on_two_ranks(start: Start) -> None:
    words = ["dataset=random", "model=mlp", "trainer.max_steps=20"]
    words += ["task.loss={_target_: torch.nn.HuberLoss, delta: 0.1, reduction: none}"]
    words += ["+evaluation.metrics.mse={_target_: torchmetrics.MeanSquaredError}"]
    found = []
    for launch in ("env", "fork"):
        run = start(*PYTHON_TRAIN, *words, f"launch={launch}").finish()
        (line,) = re.findall(r"^finished: val loss ([\d.]+), mae ([\d.]+), mse ([\d.]+)$", run.output, re.MULTILINE)
        found.append([float(value) for value in line])
    assert found[0] == pytest.approx(found[1], abs=2e-4)
    assert 0 < found[0][0] < 0.1 * found[0][1]  # Huber's loss with delta 0.1 is below a tenth of the distance


def test_a_yaml_file_with_keys_that_its_class_does_not_take_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine" / "scheduler").mkdir(parents=True)
    text = "defaults: [cosine]\n_target_: lockstep.training.schedules.step\nstep_epochs: 2\ngamma: 0.1\n"
    (tmp_path / "mine" / "scheduler" / "own.yaml").write_text(text)
    words = [*PYTHON_TRAIN, "--config-dir=mine", "scheduler=own", "trainer.max_steps=2"]
    sentence = start(*words).finish(2).sentence
    assert "lockstep.training.schedules.step takes no shape or warmup_epochs or final_lr_ratio" in sentence
    start(*words, *shlex.split(sentence.rpartition("; type ")[2])).finish()
