"""mode=check as whole commands. What it says of 90 nets is in tests/drills/test_check_nets.py."""

import signal

import pytest

from lockstep.errors import EXIT_HANG
from support.commands import PYTHON_TRAIN, wait_for

ROWS = ["the same run, typed again", "the same numbers on 3 ranks", "the same numbers in micro-batches"]
ROWS += ["stopped and resumed, the same bits", "every weight learns", "not looked at"]
NETS = """
import time
from pathlib import Path
from torch import nn

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.spare = nn.Linear(64, 10), nn.Linear(2, 2)

    def forward(self, images):
        return self.head(images.flatten(1))

class Normed(Unused):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, images):
        return super().forward(self.norm(images))

class InFloat32(Unused):
    def forward(self, images):
        images = images.float()
        return super().forward(images - images.mean(0))

class OneSample(Unused):
    def forward(self, images):
        if len(images) == 1:
            raise ValueError("one sample has no variance")
        return super().forward(images)

class NotFlat(Unused):
    def forward(self, images):
        return self.head(images)

class Slow(Unused):
    def forward(self, images):
        Path("began").touch()
        time.sleep(600)
"""
POINTS = [f"+dataset.{half}={{_target_: support.own_data.Points}}" for half in ("train", "test")]
POINTS += ["dataset=pair", "dataset.shape=[4]", "dataset.classes=2", "model=linear"]
FREEZE, UNUSED = "parameters.freeze=[spare.weight,spare.bias]", "strategy.find_unused_parameters=true"
STEPS = "5 steps and evaluations  no     "
BY_SHARE = ["step 1, layers, ", "norm (BatchNorm2d): it depends on a rank's share", "type sync_bn=auto"]
NO_GRADIENT = "spare.weight, spare.bias: no gradient in 5 steps; type parameters.freeze=[spare.weight"
ROUNDING = "\nrounding in fp32 hides small faults; fp64 fails: mat1 and mat2 must have the sam"


@pytest.fixture
def check(start, tmp_path):
    """check(words): mode=check, where a class of NETS can be named."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "temporary").mkdir()
    return lambda *words: start(*PYTHON_TRAIN, "mode=check", *words, PYTHONPATH=tmp_path, TMPDIR=tmp_path / "temporary")


def left_in(folder):
    """What a command has left, but for the cache of torch's compiler."""
    own = [path for path in (folder / "temporary").iterdir() if not path.name.startswith("torchinductor_")]
    return [*own, *folder.glob("outputs"), *folder.glob("mine")]


def test_promises_of_a_good_model_hold_and_nothing_is_written(check, tmp_path):
    words = ["launch=torchrun", "launch.nproc_per_node=4", "hydra.run.dir=mine", "mode.ranks=3", "model=mlp"]
    head, *rows = check(*words).finish().output.splitlines()  # no warning about a flag that nobody has typed
    assert head.split() == ["promise", "holds", "because"]
    assert [row.split("  ")[0] for row in rows] == ROWS
    assert ["  yes  " in row for row in rows] == [True] * 5 + [False]
    assert not left_in(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nets.Unused"], [NO_GRADIENT]),
        (["nets.Normed", FREEZE, "sync_bn=off"], [*BY_SHARE, "bits  yes    all"]),
        pytest.param(["nets.InFloat32", UNUSED], ["head (Linear): it ", ROUNDING], marks=pytest.mark.drill),
        pytest.param(["nets.OneSample", FREEZE], [f"{STEPS}one sample has no variance\n"], marks=pytest.mark.drill),
        pytest.param(["zoo.checked_nets.Half", *POINTS], ["(in float16)"], marks=pytest.mark.drill),
    ],
)
def test_broken_promises_are_explained(check, tmp_path, words, said):
    holds = not said or said[0].startswith("(in ")
    output = check(*words[1:], f"model._target_={words[0]}").finish(code=0 if holds else 1).output
    assert ("  no  " in output) == (not holds)
    assert [words for words in said if words not in output] == []
    assert not left_in(tmp_path)


def test_what_cannot_run_is_refused(check):
    state = ["optimizer._target_=zoo.optimizers.Recent", "optimizer.lr=0.05"]
    assert "has collections.deque; keep tensors" in check("model=linear", *state).finish(2).output
    server = ["strategy=async_parameter_server", "launch=fork"]
    said = "strategy=async_parameter_server cannot have one rank"
    assert said in check("model=linear", *server).finish(2).output
    lines = check("model._target_=nets.NotFlat").finish(1).output.splitlines()
    assert lines[-1] == "what to do: change either at the line above"  # and no folder, which is gone


def test_ctrl_c_ends_a_check_at_once_and_one_that_hangs_ends_with_a_verdict(check, tmp_path):
    run = check("model._target_=nets.Slow")
    wait_for((tmp_path / "began").exists, "the first forward pass")
    run.send(signal.SIGINT, to="group")
    assert run.finish(130, limit=20).sentence == "lockstep: ended by Ctrl-C; there is nothing to save"
    assert not left_in(tmp_path)
    output = check("model._target_=nets.Slow", "watch.timeout=1").finish(code=EXIT_HANG).output
    assert "verdict: a rank is in user code" in output
    assert "time.sleep(600)" in output
