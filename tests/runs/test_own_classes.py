"""Classes of the user's own, named by `_target_`: what the checks accept and refuse, and where they are built."""

import importlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.check import explain, instantiate
from lockstep.errors import ConfigError
from support.commands import PYTHON_TRAIN, Command
from support.configs import composed
from support.refusals import answer
from support.worlds import in_world, train, weights

OWN_MODULE = """
import torch
import torch.nn.functional as F
from torch import nn
from lockstep.tasks.tasks import CrossEntropy

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

class MaskInADict:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.rand(1, 8, 8), {"mask": torch.zeros(8, 8, dtype=torch.int64)}

NUMBER = 3

class Means(CrossEntropy):
    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets), "accuracy": outputs.argmax(1) == targets}

class LossAlone(CrossEntropy):
    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

class Forgets(CrossEntropy):
    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets, reduction="none")}

def forgets_to_return(optimizer):
    pass
"""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(OWN_MODULE)
    (tmp_path / "own_failing.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)


REFUSED = {
    "model._target_=own_nets.Net": "own_nets.Net needs activation; type +model.activation=<value>",
    "model._target_=own_nets.Net +model.activation=gelu +model.weight=x": "no weight, but weights; type ~model.weight ",
    "model._target_=own_nets.Nett": "'own_nets' is not a package); type model._target_=own_nets.Net",
    "model._target_=own_nets.NUMBER": "it is neither a class nor a function); type model._target_=",
    "model._target_=kornia.models.ViT": "type PYTHONPATH=<the folder of kornia.py> before the command, or pip install",
    "model._target_=own_failing.Net": "before the command, or pip install a_package_that_nobody_has",
    "model._target_=torch.nn.Linear": "Linear needs in_features and out_features; type +model.in_features=<value>",
    "loader.test_transforms=[{_target_:torchvision.transforms.v2.Resize}]": "v2.Resize needs size; type ",
    "model=mlp ~model.width": "mlp needs width; type +model.width=<value>",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_a_class_that_does_not_fit_its_node_is_refused(typed: str) -> None:
    assert REFUSED[typed] in str(answer(*typed.split()))


def test_an_error_inside_an_own_class_keeps_its_traceback() -> None:
    cfg = composed("model._target_=own_nets.Net", "+model.activation=swish")
    with pytest.raises(Exception, match="swish") as raised:
        instantiate(cfg.model)
    assert explain(raised.value, []) is None


def sentences(configs: list[Any]) -> list[str]:
    found = []
    for cfg in configs:
        with pytest.raises(ConfigError) as refused:
            train(cfg)
        found.append(str(refused.value))
    return found


MASKS = ["task=segmentation", "dataset=pair", "dataset.classes=2"]
MASKS += [f"dataset.{half}._target_=own_nets.MaskInADict" for half in ("train", "test")]
FIRST_STEP = [
    (
        ["model._target_=own_nets.OfTransformers", "+model.activation=gelu"],
        "and these are Output and [32], int64; type",
    ),
    (["model._target_=own_nets.Pair", "+model.activation=gelu"], "and these are tuple and [32], int64; type task="),
    (MASKS, " and dict; type task="),
    (
        ["task._target_=own_nets.Means"],
        'value for each sample is wanted, [32]: the ranks add them up; type reduction="',
    ),
    (["task._target_=own_nets.LossAlone"], "LossAlone gives loss as NoneType, and a value for each sample"),
    (["task._target_=own_nets.Forgets"], "Forgets gives accuracy as NoneType, and a value for each sample"),
]


def test_what_does_not_fit_is_refused_in_the_first_step(tmp_path: Path) -> None:
    configs = [composed("logger=[]", f"run_dir={tmp_path}", *words) for words, _ in FIRST_STEP]
    for found in in_world(2, sentences, configs):
        for (words, said), sentence in zip(FIRST_STEP, found, strict=True):
            assert said in sentence, words


def test_a_scheduler_that_a_function_forgets_to_return_ends_before_the_first_step(tmp_path: Path) -> None:
    words = [*PYTHON_TRAIN, "scheduler._target_=own_nets.forgets_to_return", "logger=[]"]
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
