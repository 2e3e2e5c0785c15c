"""Classes of the user's own, named by `_target_`: what the checks accept, refuse and show; torch's own schedules."""

import importlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.check import explain
from lockstep.config.nodes import instantiate
from lockstep.errors import ConfigError
from support.commands import PYTHON_TRAIN, Command
from support.configs import composed
from support.refusals import accepted, answer
from support.worlds import in_world, train, weights

OWN_MODULE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, shape, classes, activation, weights=None):
        layers = {"gelu": nn.GELU, "relu": nn.ReLU}
        super().__init__(nn.Flatten(), nn.Linear(64, 8), layers[activation](), nn.Linear(8, classes))

class Output:
    def __init__(self, logits):
        self.logits = logits

class OfTransformers(Net):
    def forward(self, images):
        return Output(super().forward(images))

class Pair(Net):
    def forward(self, images):
        return super().forward(images), images

class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, left, right):
        return self.layer(left + right)

class LeftAndRight:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"left": torch.rand(2), "right": torch.rand(2)}, number % 2

class MaskInADict:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.rand(1, 8, 8), {"mask": torch.zeros(8, 8, dtype=torch.int64)}

NUMBER = 3
"""
OWN_TASK = """
import torch.nn.functional as F
from lockstep.tasks.tasks import CrossEntropy

class Means(CrossEntropy):
    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets), "accuracy": outputs.argmax(1) == targets}

class LossAlone(CrossEntropy):
    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

class Forgets(CrossEntropy):
    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets, reduction="none")}

class Fails(CrossEntropy):
    def __init__(self, **options):
        raise ValueError("there is no table of weights")

def forgets_to_return(optimizer):
    pass
"""
STEPS = 9


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(OWN_MODULE)
    (tmp_path / "own_tasks.py").write_text(OWN_TASK)
    (tmp_path / "own_failing.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "own_dividing.py").write_text("SCALE = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("model._target_=own_nets.Net", "own_nets.Net needs activation; type +model.activation=<value>"),
        (
            "model._target_=own_nets.Net +model.activation=gelu +model.weight=x",
            "no weight, but weights; type ~model.weight +model.weights=x",
        ),
        (
            "model._target_=own_nets.Nett",
            "No module named 'own_nets.Nett'; 'own_nets' is not a package); type model._target_=own_nets.Net",
        ),
        ("model._target_=own_nets.NUMBER", "it is neither a class nor a function); type model._target_="),
        (
            "model._target_=kornia.models.VisionTransformer",
            "No module named 'kornia'); type PYTHONPATH=<the folder of kornia.py> before the command, or pip install",
        ),
        (
            "model._target_=nowhere.Net",
            "No module named 'nowhere'); type PYTHONPATH=<the folder of nowhere.py> before the command, or",
        ),
        ("model._target_=own_failing.Net", "before the command, or pip install a_package_that_nobody_has"),
        ("model._target_=own_dividing.Net", "(ZeroDivisionError: division by zero); type model._target_="),
        (
            "model._target_=torch.nn.Linear",
            "Linear needs in_features and out_features; type +model.in_features=<value>",
        ),
        (
            "optimizer._target_=torch.optim.RMSprop +optimizer.a=1 +optimizer.b=2",
            "takes no a or b, but lr, alpha, eps, ",
        ),
        ("+optimizer.maximise=true", "torch.optim.SGD takes no maximise, but dampening, maximize, "),
        ("loader.transforms=[{_target_:support.own_data.double}]", "support.own_data.double needs "),
        ("loader.test_transforms=[{_target_:torchvision.transforms.v2.Resize}]", "v2.Resize needs size; type "),
        (
            "scheduler=torch scheduler.schedule={_target_:torch.optim.lr_scheduler.CosineAnnealingLR}",
            "CosineAnnealingLR needs T_max; type +scheduler.schedule.T_max=<value>",
        ),
        ("model=mlp ~model.width", "mlp needs width; type +model.width=<value>"),
    ],
)
def test_a_class_that_does_not_fit_its_node_is_refused(typed: str, said: str) -> None:
    assert said in str(answer(*typed.split()))


def test_an_error_inside_an_own_class_keeps_its_traceback() -> None:
    cfg = composed("model._target_=own_nets.Net", "+model.activation=swish")
    with pytest.raises(Exception, match="swish") as raised:
        instantiate(cfg.model)
    assert explain(raised.value, []) is None


def sentence(cfg: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        train(cfg)
    return str(refused.value)


def sentences(configs: list[Any]) -> list[str]:
    return [sentence(cfg) for cfg in configs]


def test_a_net_whose_inputs_or_outputs_do_not_fit_is_refused_in_the_first_step(tmp_path: Path) -> None:
    base = ["logger=[]", f"run_dir={tmp_path}", "+model.activation=gelu"]
    of_transformers = accepted("model._target_=own_nets.OfTransformers", *base)
    of_transformers_in_parts = composed("strategy=model_parallel", "model._target_=own_nets.OfTransformers", *base)
    pair = accepted("model._target_=own_nets.Pair", *base)
    dicts = ["dataset=pair", *(f"dataset.{half}._target_=own_nets.LeftAndRight" for half in ("train", "test"))]
    dicts += ["dataset.classes=2"]
    masked = ["dataset=pair", *(f"dataset.{half}._target_=own_nets.MaskInADict" for half in ("train", "test"))]
    masks = composed("logger=[]", "task=segmentation", "dataset.classes=2", f"run_dir={tmp_path}", *masked)
    for found in in_world(2, sentences, [of_transformers, of_transformers_in_parts, pair, masks]):
        for sentence, kind in zip(found, ("Output", "Output", "tuple"), strict=False):
            assert f"and these are {kind} and [32], int64; type task=" in sentence
        assert " and dict; type task=" in found[3]


def test_what_a_task_must_not_return_is_refused_in_the_first_step(tmp_path: Path) -> None:
    base = ["logger=[]", f"run_dir={tmp_path}"]
    tasks = [accepted(f"task._target_=own_tasks.{name}", *base) for name in ("Means", "LossAlone", "Forgets")]
    for found in in_world(2, sentences, tasks):
        assert "Means gives loss as [], and a value for each sample is wanted, [32]" in found[0]
        assert 'type reduction="none"' in found[0]
        assert found[1].startswith("LossAlone gives loss as NoneType, and a value for each sample")
        assert found[2].startswith("Forgets gives accuracy as NoneType, and a value for each sample")


def test_a_scheduler_that_a_function_forgets_to_return_ends_before_the_first_step(tmp_path: Path) -> None:
    words = [*PYTHON_TRAIN, "scheduler._target_=own_tasks.forgets_to_return", "logger=[]"]
    output = Command(words, tmp_path, PYTHONPATH=str(tmp_path)).finish(1).output
    assert "'NoneType' object has no attribute 'step'" in output


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


@pytest.mark.parametrize("launch", ["env", "fork", "spawn"])
def test_what_a_module_draws_or_seeds_before_the_net_is_built_changes_no_weight(
    start: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    (tmp_path / "seeds.py").write_text(SEEDS_AT_IMPORT)
    words = [
        "model._target_=seeds.Net",
        "dataset._target_=seeds.Data",
        "seed=7",
        "optimizer.lr=1e-30",
        "trainer.max_steps=1",
        "logger=[]",
    ]
    start(*PYTHON_TRAIN, *words, f"launch={launch}", "hydra.run.dir=run", PYTHONPATH=tmp_path).finish()
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("seeds").Net
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    expected = torch.cat([parameter.detach().flatten() for parameter in net().parameters()])
    assert torch.equal(weights(tmp_path / "run"), expected.double())


COUNTED = """
import gc, os
from torch import nn

open("imports", "a").write(f"{gc.isenabled()}\\n")

def net(shape, classes):
    open("builds", "a").write(f"{os.getpid()}\\n")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


def test_a_model_is_built_in_ranks_alone_and_the_folder_of_the_command_may_hold_anything(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    """It is beside the folder of configs, holds another run, and a file that nobody could read to its end."""
    (tmp_path / "counted.py").write_text(COUNTED)
    for path, text in {
        ".hydra/config.yaml": "seed: 9\n",
        ".hydra/overrides.yaml": "[]",
        "snapshots/step_1/manifest.json": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    os.mkfifo(tmp_path / "conf" / "endless.yaml")
    node = "_target_: counted.net\nshape: ${dataset.shape}\nclasses: ${dataset.classes}\n"
    (tmp_path / "conf" / "model" / "counted.yaml").write_text(node)
    words = ["--config-dir=conf", "model=counted", "trainer.max_steps=1", "logger=[]"]
    two = ["launch=fork", "launch.nproc_per_node=2"]
    run = start(*PYTHON_TRAIN, *words, *two, cwd=tmp_path).finish()
    built = (tmp_path / "builds").read_text().split()
    assert len(built) == len(set(built)) == 2
    assert str(run.process.pid) not in built
