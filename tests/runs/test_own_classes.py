"""Classes of the user's own, named by `_target_`: what the checks accept and refuse, and where they are built."""

import importlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from support.commands import PYTHON_TRAIN, Command
from support.configs import composed
from support.worlds import in_world, refusals, weights

OWN_MODULE = """
import torch
import torch.nn.functional as F
from torch import nn
from lockstep.tasks.tasks import CrossEntropy

class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))

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
COUNTED = """
import gc, os
from torch import nn

open("imports", "a").write(f"{gc.isenabled()}\\n")

def net(shape, classes):
    open("builds", "a").write(f"{os.getpid()}\\n")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"own_nets": OWN_MODULE, "seeds": SEEDS_AT_IMPORT, "counted": COUNTED}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


MASKS = ["task=segmentation", "dataset=pair", "dataset.classes=2"]
MASKS += [f"dataset.{half}._target_=own_nets.MaskInADict" for half in ("train", "test")]
FIRST_STEP = [
    (["model._target_=own_nets.OfTransformers"], "and these are Output and [32], int64; type"),
    (["model._target_=own_nets.Pair"], "and these are tuple and [32], int64; type task="),
    (MASKS, " and dict; type task="),
    (["task._target_=own_nets.Means"], 'is wanted, [32]: the ranks add them up; type reduction="'),
    (["task._target_=own_nets.LossAlone"], "LossAlone gives loss as NoneType, and a value for each sample"),
    (["task._target_=own_nets.Forgets"], "Forgets gives accuracy as NoneType, and a value for each sample"),
]


def test_what_does_not_fit_is_refused_in_the_first_step(tmp_path: Path) -> None:
    configs = [composed("logger=[]", f"run_dir={tmp_path}", *words) for words, _ in FIRST_STEP]
    for found in in_world(2, refusals, configs):
        for (words, said), sentence in zip(FIRST_STEP, found, strict=True):
            assert said in sentence, words


def test_a_scheduler_that_a_function_forgets_to_return_ends_before_the_first_step(tmp_path: Path) -> None:
    words = [*PYTHON_TRAIN, "scheduler._target_=own_nets.forgets_to_return", "logger=[]"]
    output = Command(words, tmp_path, PYTHONPATH=str(tmp_path)).finish(1).output
    assert "'NoneType' object has no attribute 'step'" in output


@pytest.mark.parametrize("launch", ["env", "fork", "spawn"])
def test_what_a_module_draws_or_seeds_before_the_net_is_built_changes_no_weight(
    start: Callable[..., Command], tmp_path: Path, launch: str
) -> None:
    words = ["model._target_=seeds.Net", "dataset._target_=seeds.Data", "seed=7", "optimizer.lr=1e-30"]
    words += ["trainer.max_steps=1", "logger=[]"]
    start(*PYTHON_TRAIN, *words, f"launch={launch}", "hydra.run.dir=run", PYTHONPATH=tmp_path).finish()
    net = importlib.import_module("seeds").Net
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    expected = torch.cat([parameter.detach().flatten() for parameter in net().parameters()])
    assert torch.equal(weights(tmp_path / "run"), expected.double())


def test_a_model_is_built_in_ranks_alone_and_the_folder_of_the_command_may_hold_anything(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    """It is beside the folder of configs, holds another run, and a file that nobody could read to its end."""
    node = "_target_: counted.net\nshape: ${dataset.shape}\nclasses: ${dataset.classes}\n"
    files = {".hydra/config.yaml": "seed: 9\n", ".hydra/overrides.yaml": "[]", "snapshots/step_1/manifest.json": ""}
    for path, text in (files | {"conf/model/counted.yaml": node}).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    os.mkfifo(tmp_path / "conf" / "endless.yaml")
    words = ["--config-dir=conf", "model=counted", "trainer.max_steps=1", "logger=[]"]
    two = ["launch=fork", "launch.nproc_per_node=2"]
    run = start(*PYTHON_TRAIN, *words, *two, cwd=tmp_path).finish()
    built = (tmp_path / "builds").read_text().split()
    assert len(built) == len(set(built)) == 2
    assert str(run.process.pid) not in built
