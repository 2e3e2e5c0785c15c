"""mode=check as whole commands. What it says of 90 nets is in tests/drills/test_check_nets.py."""

import signal

import pytest

from lockstep.errors import EXIT_HANG
from lockstep.modes.check import Ended, judged
from support.commands import PYTHON_TRAIN, wait_for

ROWS = [
    "the same run, typed again",
    "the same numbers on 3 ranks",
    "the same numbers in micro-batches",
    "stopped and resumed, the same bits",
    "every weight learns",
    "not looked at",
]
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
        (["nets.Unused", UNUSED], []),  # advice that is followed is not given again
        (["nets.Unused", FREEZE], []),
        (["nets.Normed", FREEZE, "sync_bn=off"], [*BY_SHARE, "bits  yes    all"]),
        (["nets.InFloat32", UNUSED], ["head (Linear): it ", ROUNDING]),
        (["nets.OneSample", FREEZE], [f"{STEPS}one sample has no variance\n"]),
        (["zoo.checked_nets.OnlyFloat32", *POINTS], ["(in float32)"]),
        (["zoo.checked_nets.Half", *POINTS], ["(in float16)"]),
        (["zoo.checked_nets.Infinite", *POINTS], [f"{STEPS}the "]),
    ],
)
def test_broken_promises_are_explained(check, tmp_path, words, said):
    holds = not said or said[0].startswith("(in ")
    output = check(*words[1:], f"model._target_={words[0]}").finish(code=0 if holds else 1).output
    assert ("  no  " in output) == (not holds)
    assert [words for words in said if words not in output] == []
    assert not left_in(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer._target_=zoo.optimizers.Recent", "optimizer.lr=0.05"], "has collections.deque; keep tensors"),
        (["resume=outputs/a"], "leave resume=outputs/a out, or type parameters.init=<a run>"),
        (["strategy=async_parameter_server", "launch=fork"], "strategy=async_parameter_server cannot have one rank"),
    ],
)
def test_what_cannot_run_is_refused(check, words, said):
    assert said in check("model=linear", *words).finish(2).output


def test_ctrl_c_ends_a_check_at_once_and_one_that_hangs_ends_with_a_verdict(check, tmp_path):
    run = check("model._target_=nets.Slow")
    wait_for((tmp_path / "began").exists, "the first forward pass")
    run.send(signal.SIGINT, to="group")
    assert run.finish(130, limit=20).sentence == "lockstep: ended by Ctrl-C; there is nothing to save"
    assert not left_in(tmp_path)
    output = check("model._target_=nets.Slow", "watch.timeout=1").finish(code=EXIT_HANG).output
    assert "verdict: a rank is in user code" in output
    assert "time.sleep(600)" in output


def test_rounding_is_no_difference_and_other_bits_are():
    def trace(number, size, stage="weights"):
        return Ended({(1, "weights", "a"): (7, 1.0, 1.0), (1, stage, "b"): (number, size, size)})

    one, near, far = trace(1, 1.0), trace(2, 1.0 + 1e-9), trace(2, 1.1)
    assert judged("two", one, near, 1e-6, True) == ("yes", "1e-09 apart")
    assert judged("two", one, far, 1e-6, True)[1].startswith("step 1, weights, 1e-01 apart: b: it depends on")
    assert judged("resumed", one, trace(2, 1.0), 0.0, True)[0] == "no"  # a sum does not show each bit
    assert judged("two", trace(14, 1.0, "layers"), trace(7, 0.5, "layers"), 1e-6, True)[0] == "yes"
    assert judged("two", one, trace(1, 1.0)._replace(failed="lost"), 1e-6, True) == ("no", "lost")
