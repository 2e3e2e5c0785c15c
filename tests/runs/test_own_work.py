"""Somebody's own work: classes named by `_target_`, what is beside a config, files that change after a run."""

import csv
import importlib
import json
import os
import random
import re
import shlex

import numpy as np
import pytest
import torch

import lockstep
from support.commands import PYTHON_TRAIN, STARTERS
from support.configs import composed
from support.digits import digits
from support.own_data import Points
from support.refusals import answer
from support.worlds import in_world, refusals, weights

NETS = """
import torch
import torch.nn.functional as F
from torch import nn
from lockstep.tasks.base import Task
from lockstep.tasks.tasks import CrossEntropy
from support.own_data import Points

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

class Wide(nn.Sequential):
    def __init__(self, shape, classes, width=3):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))

class Output:
    def __init__(self, logits):
        self.logits = logits

class OfTransformers(Net):
    def forward(self, images):
        return Output(super().forward(images))

class Heads(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, points):
        found = super().forward(points)
        return {"side": found[:, :2], "sum": found[:, 2]}

def anything(**options):
    return nn.Linear(**options)

def points(train=True):
    inputs = torch.rand(60, 5, generator=torch.Generator().manual_seed(int(train)))
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 2.5).long())

class MaskInADict:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.rand(1, 8, 8), {"mask": torch.zeros(8, 8, dtype=torch.int64)}

class TwoTargets(Points):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point, {"side": label, "sum": point.sum()}

class Inherits(CrossEntropy):
    pass

class Means(CrossEntropy):
    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets), "accuracy": outputs.argmax(1) == targets}

class Forgets(CrossEntropy):
    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets, reduction="none")}

class Both(Task):
    better = {"loss": "min", "accuracy": "max"}
    monitor = "accuracy"

    def __call__(self, outputs, targets):
        loss = F.cross_entropy(outputs["side"], targets["side"], reduction="none")
        loss = loss + (outputs["sum"] - targets["sum"]).square()
        return {"loss": loss, "accuracy": outputs["side"].argmax(1) == targets["side"]}

    def predictions(self, outputs):
        return {"side": outputs["side"].argmax(1), "sum": outputs["sum"]}

class AsTheyAre(Both):
    predictions = Task.predictions
"""
SEEDS_AT_IMPORT = """
import random
import numpy as np
import torch
from torch import nn
from lockstep.data.vision import Digits

torch.manual_seed(1)  # as many scripts begin
np.random.seed(1)
random.seed(1)

class Data(Digits):
    def prepare(self):
        torch.rand(1)

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        with torch.no_grad():
            self[1].bias.mul_(np.random.rand() + random.random())
"""
PAIR = "_target_: lockstep.data.Pair\n"
AVERAGED = "{precision: fp64, ema: {_target_: lockstep.training.ema.Average, decay: 0.9}}"
SCHEDULER = "defaults: [cosine]\n_target_: lockstep.training.schedules.step\nstep_epochs: 2\ngamma: 0.1\n"
FILES = {
    "own_nets.py": NETS,
    "seeds.py": SEEDS_AT_IMPORT,
    "conf/model/heads.yaml": "_target_: own_nets.Heads\n",
    "conf/model/net.yaml": "defaults: [mlp]\nwidth: 12\n",
    "conf/task/both.yaml": "_target_: own_nets.Both\n",
    "conf/dataset/two.yaml": "defaults: [pair]\n"
    + "".join(f"{half}: {{_target_: own_nets.TwoTargets}}\n" for half in ("train", "test")),
    "conf/dataset/own.yaml": PAIR
    + "".join(f"{half}: {{_target_: own_nets.points, train: {half == 'train'}}}\n" for half in ("train", "test")),
    "conf/dataset/pixels.yaml": "defaults: [digits]\nmean: [0.3]\nstd: [0.4]\n",
    "conf/scheduler/own.yaml": SCHEDULER,
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    """--config-dir=conf alone finds the modules beside conf."""
    write(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def typed(start, tmp_path):
    """typed(*words, code=0) -> a finished command with the folder of configs."""

    def command(*words, code=0, starter=(*PYTHON_TRAIN,), cwd=tmp_path):
        config_dir = f"--config-dir={os.path.relpath(tmp_path / 'conf', cwd)}"
        return start(*starter, config_dir, "logger=[]", *words, cwd=cwd).finish(code)

    return command


MASKS = ["task=segmentation", "dataset=pair", "dataset.classes=2"]
MASKS += [f"dataset.{half}._target_=own_nets.MaskInADict" for half in ("train", "test")]
FIRST_STEP = [
    (["model._target_=own_nets.OfTransformers"], "and these are Output and [32], int64; type"),
    (MASKS, " and dict; type task="),
    (["task._target_=own_nets.Means"], 'is wanted, [32]: the ranks add them up; type reduction="'),
    (["task._target_=own_nets.Forgets"], "Forgets gives accuracy as NoneType, and a value for each sample"),
]


def test_what_does_not_fit_is_refused_in_the_first_step(tmp_path):
    configs = [composed("logger=[]", f"run_dir={tmp_path}", *words) for words, _ in FIRST_STEP]
    for found in in_world(2, refusals, configs):
        for (words, said), sentence in zip(FIRST_STEP, found, strict=True):
            assert said in sentence, words


@pytest.mark.parametrize("launch", ["env", "spawn"])
def test_what_a_module_draws_or_seeds_before_the_net_is_built_changes_no_weight(typed, tmp_path, launch):
    words = ["model._target_=seeds.Net", "dataset._target_=seeds.Data", "seed=7", "optimizer.lr=1e-30"]
    typed(*words, "trainer.max_steps=1", f"launch={launch}", "hydra.run.dir=run")
    net = importlib.import_module("seeds").Net
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    expected = torch.cat([parameter.detach().flatten() for parameter in net().parameters()])
    assert torch.equal(weights(tmp_path / "run"), expected.double())


@pytest.mark.parametrize("starter", ["python", "launch=spawn"])
def test_a_config_folder_alone_makes_what_is_beside_it_importable(start, typed, tmp_path, starter):
    """In ranks, in the other processes that read data, and again where the run is used."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["dataset=own", "loader.num_workers=1", "model=mlp", "model._target_=own_nets.anything"]
    words += ["+model.in_features=5", "+model.out_features=2", "trainer.max_steps=2", "hydra.run.dir=run"]
    typed(*words, starter=STARTERS[starter], cwd=elsewhere)
    if starter == "python":
        typed("mode=evaluate", "resume=run", cwd=elsewhere)
        refused = start(*PYTHON_TRAIN, "mode=evaluate", "resume=run", cwd=elsewhere).finish(2).sentence
        assert "or --config-dir=<the folder that holds dataset/own.yaml>" in refused


def test_a_trained_run_is_used_as_it_was_trained_whatever_its_files_say_today(typed, tmp_path):
    """Its YAML files are others, and the file of its first weights is gone. Each evaluation of another kind has a file
    of its own, which says what was evaluated."""
    run, local = tmp_path / "run", "conf/local/default.yaml"
    write(tmp_path, {local: f"# @package _global_\ntrainer: {AVERAGED}\ndataset: {{mean: [0.25]}}\n"})
    words = ["dataset=pixels", "model=net", "trainer.epochs=1"]
    typed(*words, "trainer.max_steps=1", "hydra.run.dir=first")
    (tmp_path / "first" / "model.pt").rename(tmp_path / "begin.pt")
    typed(*words, "parameters.init=begin.pt", "hydra.run.dir=run")
    (tmp_path / "begin.pt").unlink()
    data = digits(train=False)
    images = torch.stack([data[index][0] for index in range(20)])
    outputs = lockstep.load(run)(images)
    (tmp_path / local).unlink()
    changed = {"dataset/pixels": "defaults: [digits]\nmean: [0.9]\nstd: [1.4]\n", "model/net": "defaults: [linear]\n"}
    write(tmp_path, {f"conf/{name}.yaml": text for name, text in changed.items()})
    for more in ([], ["dataset.std=[0.5]", "trainer.ema=null"], ["mode.split=val"], []):
        typed("mode=evaluate", "resume=run", *more)
    assert len(list(run.glob("evaluation*.json"))) == 3
    found = [json.loads((run / f"evaluation{number}.json").read_text()) for number in ("", "_2", "_3")]
    kinds = [(one["split"], one["config"]["dataset.mean"], one["config"]["dataset.std"]) for one in found]
    assert kinds == [("test", [0.25], [0.4]), ("test", [0.25], [0.5]), ("val", [0.25], [0.4])]
    tested, otherwise, validated = (one["metrics"]["loss"] for one in found)
    assert tested == pytest.approx(json.loads((run / "run.json").read_text())["test"]["metrics"]["loss"], rel=1e-12)
    assert len({tested, otherwise, validated}) == 3
    typed("mode=export", "resume=run", "mode.file=net.pt2")
    typed("mode=predict", "resume=run", "mode.file=found.csv")
    net = lockstep.load(run)
    assert torch.equal(net(images), outputs)
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(images), outputs, rtol=0, atol=1e-12)
    rows = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert [int(row["prediction"]) for row in rows[:20]] == net.predict(images)


RADAM, WIDE = "optimizer._target_=torch.optim.RAdam", "model._target_=own_nets.Wide"
SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0, "fused": None}
OF_DATA = {"shape": [1, 8, 8], "classes": 10}
KEPT = {  # what is typed: the arguments of the node
    "model=mlp model._target_=own_nets.Net": {},
    f"model=mlp {WIDE}": OF_DATA,
    f"model=mlp {WIDE} model.width=5": OF_DATA | {"width": 5},
    f"model=linear {WIDE} +model.width=5": OF_DATA | {"width": 5},
    f"model=mlp {WIDE} model.classes=7": OF_DATA | {"classes": 7},
    "model=mlp +model.head=1 model._target_=own_nets.Net ~model.head": {},
    "model._target_=own_nets.anything +model.in_features=3": {"in_features": 3},
    f"model=mlp {WIDE} dataset.shape=[2]": OF_DATA | {"shape": [2]},
    f"{RADAM} optimizer.lr=0.1": {"lr": 0.1},
    "optimizer.lr=0.1": SGD,
    "scheduler._target_=lockstep.training.schedules.step +scheduler.gamma=0.5": {"gamma": 0.5},
    # The constructor is that of one of ours.
    "task._target_=own_nets.Inherits task.class_weights=[1,2]": {"class_weights": [1, 2], "label_smoothing": 0},
}


def test_arguments_do_not_outlive_their_class_and_a_key_that_nothing_takes_is_refused(typed):
    for words, arguments in KEPT.items():
        section = re.split("[.=]", words)[0]
        node = getattr(composed(*words.split()), section)
        found = {name: value for name, value in node.items() if name != "_target_"}
        assert (found if section != "task" else {name: found[name] for name in arguments}) == arguments, words
    for words, said in (
        ("model._target_=own_nets.Net model.shape=[1,8,8]", "own_nets.Net takes no shape; type ~model.shape"),
        (f"{RADAM} optimizer.momentum=0.5", "torch.optim.RAdam takes no momentum, but "),
    ):
        assert said in str(answer(*words.split()))
    sentence = typed("scheduler=own", "trainer.max_steps=2", code=2).sentence
    assert "lockstep.training.schedules.step takes no shape or warmup_epochs or final_lr_ratio" in sentence
    typed("scheduler=own", "trainer.max_steps=2", *shlex.split(sentence.rpartition("; type ")[2]))
    step = "scheduler.schedule={_target_:torch.optim.lr_scheduler.StepLR,step_size:2}"
    words = ["model=mlp", "model._target_=own_nets.Net", RADAM, "scheduler=torch", step, "launch=fork"]
    run = typed(*words, "trainer.max_steps=3")
    assert [line for line in run.output.splitlines() if line.endswith("not those of the option")] == [
        "model: own_nets.Net has its own depth, dropout, width, not those of the option",
        "optimizer: torch.optim.RAdam has its own fused, lr, momentum, nesterov, weight_decay, not those of the option",
    ]


def test_metrics_and_predictions_of_two_heads_are_over_the_samples(typed, tmp_path):
    """The outputs and the targets of a batch are dicts."""
    words = ["dataset=two", "dataset.classes=2", "trainer.precision=fp64", "trainer.epochs=2", "trainer.batch_size=5"]
    typed(*words, "model=heads", "task=both", "launch=fork", "hydra.run.dir=run")
    for more in (["mode=evaluate"], ["mode=predict"], ["mode=export", "launch=env"]):
        typed("resume=run", *more)
    typed("resume=run", "mode=predict", "task._target_=own_nets.AsTheyAre", "mode.file=plain.csv")
    exported = torch.export.load(tmp_path / "run" / "last.pt2").module()
    assert list(exported(torch.zeros(3, 4, dtype=torch.float64))) == ["side", "sum"]
    rows = list(csv.DictReader((tmp_path / "run" / "predictions.csv").open()))
    assert list(rows[0]) == ["index", "side", "sum", "truth_side", "truth_sum"]
    assert [float(row["truth_sum"]) for row in rows] == pytest.approx([float(point.sum()) for point, _ in Points()])
    right = sum(row["side"] == row["truth_side"] for row in rows)
    metrics = json.loads((tmp_path / "run" / "evaluation.json").read_text())["metrics"]
    assert metrics["accuracy"] == pytest.approx(right / len(rows))
    header = (tmp_path / "plain.csv").read_text().splitlines()[0]
    assert header == "index,prediction_side_0,prediction_side_1,prediction_sum,truth_side,truth_sum"
