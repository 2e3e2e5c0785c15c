"""mode=check as whole commands."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import EXIT_FAILED, EXIT_HANG
from support.commands import PYTHON_TRAIN, Command, wait_for

Start = Callable[..., Command]
BAD = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.norm, self.head, self.spare = nn.BatchNorm2d(1), nn.Linear(64, classes), nn.Linear(2, 2)

    def forward(self, images):
        return self.head(self.norm(images).flatten(1))
"""


def left_in(folder: Path) -> list[str]:
    """What a command has left in its folder for temporary files, but for the cache of torch's compiler."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def test_promises_of_a_good_model_hold_and_nothing_is_written(start: Start, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["mode=check", "launch=torchrun", "launch.nproc_per_node=4", "hydra.run.dir=mine", "mode.ranks=3"]
    output = start(*PYTHON_TRAIN, *words, "model=mlp", TMPDIR=temporary).finish().output
    rows = [line for line in output.splitlines() if "  yes  " in line]
    assert [line.split("  ")[0] for line in rows] == [
        "the same run, typed again",
        "the same numbers on 3 ranks",
        "the same numbers in micro-batches",
        "stopped and resumed, the same bits",
        "every weight learns",
    ]
    assert len(output.splitlines()) == 1 + len(rows)  # no warning about a flag that nobody has typed
    assert not left_in(temporary)
    assert list(tmp_path.iterdir()) == [temporary]


def test_broken_promises_are_explained(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bad_net.py").write_text(BAD)
    words = ["mode=check", "model=linear", "model._target_=bad_net.Net", "sync_bn=off"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    unused = start(*PYTHON_TRAIN, *words, PYTHONPATH=path).finish(code=EXIT_FAILED).output
    assert "no     spare.weight, spare.bias: no gradient in 5 steps; type parameters.freeze=[spare.weight" in unused
    frozen = "parameters.freeze=[spare.weight,spare.bias]"
    output = start(*PYTHON_TRAIN, *words, frozen, PYTHONPATH=path).finish(code=EXIT_FAILED).output
    assert "no     step 1, layers, " in output
    assert "apart: norm (BatchNorm2d) sees a rank's share of the batch; type sync_bn=auto" in output
    assert "stopped and resumed, the same bits  yes    all bits\n" in output
    assert not (tmp_path / "outputs").exists()


OTHERS = """
import time
from torch import nn

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.spare = nn.Linear(64, 10), nn.Linear(2, 2)

    def forward(self, images):
        return self.head(images.flatten(1))

class InFloat32(Unused):
    def forward(self, images):
        images = images.float()
        return super().forward(images - images.mean(0))

class Slow(Unused):
    def forward(self, images):
        time.sleep(600)

"""


def test_advice_that_is_followed_is_not_given_again(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(OTHERS)
    words = [*PYTHON_TRAIN, "mode=check", "model._target_=nets.Unused"]
    assert "  no  " in start(*words, PYTHONPATH=tmp_path).finish(code=EXIT_FAILED).output
    for advice in ("strategy.find_unused_parameters=true", "parameters.freeze=[spare.weight,spare.bias]"):
        assert "  no  " not in start(*words, advice, PYTHONPATH=tmp_path).finish().output


def test_what_float64_cannot_compute_is_compared_as_typed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(OTHERS)
    words = [*PYTHON_TRAIN, "mode=check", "strategy.find_unused_parameters=true"]
    found = start(*words, "model._target_=nets.InFloat32", PYTHONPATH=tmp_path).finish(code=EXIT_FAILED).output
    assert "head (Linear) gives other outputs for the same samples" in found
    assert "\nrounding in fp32 hides small faults; fp64 fails: mat1 and mat2 must have the same dtype" in found
    points = [f"+dataset.{half}={{_target_: support.own_data.Points}}" for half in ("train", "test")]
    points += ["dataset=pair", "dataset.shape=[4]", "dataset.classes=2", "model=linear"]
    for net, code in (("OnlyFloat32", 0), ("Half", 0), ("Infinite", EXIT_FAILED)):
        output = start(*words, *points, f"model._target_=zoo.checked_nets.{net}").finish(code=code).output
        assert ("  no  " in output) == bool(code)
    assert output.splitlines()[1].startswith("every weight learns  no     the ")
    assert "not finite" in output or "is nan" in output


def test_a_job_whose_snapshots_are_refused_is_refused(start: Start) -> None:
    words = ["mode=check", "model=linear", "optimizer._target_=zoo.optimizers.Recent", "optimizer.lr=0.05"]
    assert "has collections.deque; keep tensors" in start(*PYTHON_TRAIN, *words).finish(2).output


def test_a_check_that_hangs_ends_with_a_verdict(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(OTHERS)
    words = ["mode=check", "model._target_=nets.Slow", "watch.timeout=1"]
    output = start(*PYTHON_TRAIN, *words, PYTHONPATH=tmp_path).finish(code=EXIT_HANG).output
    assert "verdict: a rank is in user code" in output
    assert "time.sleep(600)" in output


def test_a_check_reads_no_run(start: Start) -> None:
    run = start(*PYTHON_TRAIN, "mode=check", "resume=outputs/a").finish(2)
    assert "leave resume=outputs/a out, or type parameters.init=<a run>" in run.sentence


SLOW = """
import time
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        Path("began").touch()
        time.sleep(600)
"""


def test_ctrl_c_ends_a_check_at_once_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "slow_net.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = ["mode=check", "model=linear", "model._target_=slow_net.Net", "~model.shape", "~model.classes"]
    run = start(*PYTHON_TRAIN, *words, TMPDIR=temporary, PYTHONPATH=path)
    wait_for((tmp_path / "began").exists, "the first forward pass")
    run.send(signal.SIGINT, to="group")
    assert run.finish(130, limit=20).sentence == "lockstep: ended by Ctrl-C; there is nothing to save"
    assert not left_in(temporary)


def test_a_strategy_that_one_rank_cannot_run_is_refused(start: Start) -> None:
    words = ["mode=check", "strategy=async_parameter_server", "launch=fork", "model=linear"]
    run = start(*PYTHON_TRAIN, *words).finish(2)
    assert "mode=check runs on 1 and on 2 ranks: strategy=async_parameter_server has no worker in a wor" in run.sentence
