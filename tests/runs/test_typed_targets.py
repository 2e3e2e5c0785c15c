"""Arguments do not outlive their class: what a typed `_target_` keeps of an option, and what its run is used for."""

import re
import shlex
import sys

import pytest

from lockstep.runs.record import read_run
from support.commands import PYTHON_TRAIN
from support.configs import composed
from support.refusals import answer

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
SCHEDULER = "defaults: [cosine]\n_target_: lockstep.training.schedules.step\nstep_epochs: 2\ngamma: 0.1\n"
RADAM, WIDE = "optimizer._target_=torch.optim.RAdam", "model._target_=own.Wide"
SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0, "fused": None}
OF_DATA = {"shape": [1, 8, 8], "classes": 10}
KEPT = {  # what is typed: the arguments of the node
    "model=mlp model._target_=own.Net": {},
    f"model=mlp {WIDE}": OF_DATA,
    f"model=mlp {WIDE} model.width=5": OF_DATA | {"width": 5},
    f"model=linear {WIDE} +model.width=5": OF_DATA | {"width": 5},
    f"model=mlp {WIDE} model.classes=7": OF_DATA | {"classes": 7},
    "model=mlp +model.head=1 model._target_=own.Net ~model.head": {},
    "model._target_=own.anything +model.in_features=3": {"in_features": 3},
    f"model=mlp {WIDE} dataset.shape=[2]": OF_DATA | {"shape": [2]},
    RADAM: {},
    f"{RADAM} optimizer.lr=0.1": {"lr": 0.1},
    "optimizer.lr=0.1": SGD,
    "scheduler._target_=lockstep.training.schedules.step +scheduler.gamma=0.5": {"gamma": 0.5},
    # The constructor is that of one of ours.
    "task._target_=own.Inherits task.class_weights=[1,2]": {"class_weights": [1, 2], "label_smoothing": 0},
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Own classes, and a config folder with the model linear_net and the scheduler own."""
    files = {"own.py": NET, "mine/model/linear_net.yaml": "_target_: own.Net\n", "mine/scheduler/own.yaml": SCHEDULER}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return {"PYTHONPATH": tmp_path}


@pytest.mark.usefixtures("path")
def test_what_a_typed_class_keeps_of_the_option_and_a_key_that_nothing_takes_is_refused():
    for typed, arguments in KEPT.items():
        section = re.split("[.=]", typed)[0]
        node = getattr(composed(*typed.split()), section)
        found = {name: value for name, value in node.items() if name != "_target_"}
        assert (found if section != "task" else {name: found[name] for name in arguments}) == arguments, typed
    for typed, said in (
        ("model._target_=own.Net model.shape=[1,8,8]", "own.Net takes no shape; type ~model.shape"),
        (f"{RADAM} optimizer.momentum=0.5", "torch.optim.RAdam takes no momentum, but "),
    ):
        assert said in str(answer(*typed.split()))


def test_typed_classes_need_no_words_that_remove_keys(start, path):
    step = "scheduler.schedule={_target_:torch.optim.lr_scheduler.StepLR,step_size:2}"
    words = ["model=mlp", "model._target_=own.Net", RADAM, "scheduler=torch", step, "launch=fork"]
    run = start(*PYTHON_TRAIN, *words, "trainer.max_steps=3", **path).finish()
    said = [line for line in run.output.splitlines() if line.endswith("not those of the option")]
    assert said == [
        "model: own.Net has its own depth, dropout, width, not those of the option",
        "optimizer: torch.optim.RAdam has its own fused, lr, momentum, nesterov, weight_decay, not those of the option",
    ]
    assert "finished: " in run.output


@pytest.mark.parametrize("words", [["model._target_=own.Net"], ["--config-dir=mine", "model=linear_net"]])
def test_lines_to_type_of_a_run_and_a_sweep_work_as_they_are(start, path, words):
    swept = start(*PYTHON_TRAIN, "-m", *words, "seed=1,2", "trainer.max_steps=2", **path).finish()
    assert "sweep: 2 finished" in swept.output
    (folder,) = re.findall(r"^sweep: 2 jobs, 1 at once; 0 have finished before; in (.*)$", swept.output, re.MULTILINE)
    typed = read_run(swept.cwd / folder / "seed=2")["command"]
    output = start(sys.executable, *shlex.split(typed)[1:], **path).finish().output
    _, typed = next(line for line in output.splitlines() if line.startswith("evaluate:")).split(maxsplit=1)
    assert "evaluated: test loss" in start(sys.executable, *shlex.split(typed)[1:], **path).finish().output


def test_a_loss_and_a_metric_of_ones_own_have_the_same_numbers_on_two_ranks(start):
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


def test_a_yaml_file_with_keys_that_its_class_does_not_take_is_refused(start, path):
    words = [*PYTHON_TRAIN, "--config-dir=mine", "scheduler=own", "trainer.max_steps=2"]
    sentence = start(*words, **path).finish(2).sentence
    assert "lockstep.training.schedules.step takes no shape or warmup_epochs or final_lr_ratio" in sentence
    start(*words, *shlex.split(sentence.rpartition("; type ")[2]), **path).finish()
