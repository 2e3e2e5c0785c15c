"""mode=check as whole commands."""

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import EXIT_PROMISES
from support.commands import PYTHON_TRAIN, Command

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


def test_promises_of_a_good_model_hold_and_nothing_is_written(start: Start, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["mode=check", "launch=torchrun", "launch.nproc_per_node=4", "hydra.run.dir=mine"]
    output = start(*PYTHON_TRAIN, *words, TMPDIR=temporary).finish().output
    promises = [line for line in output.splitlines() if "  yes  " in line]
    assert [line.split("  ")[0] for line in promises] == [
        "the same numbers on any number of ranks, up to rounding",
        "stopped and resumed, the bits of an unbroken run",
        "your own work fits",
    ]
    assert "a batch:   64 samples, 16 for each of 4 ranks\nsteps:     23 in an epoch, 115 in the run\n" in output
    assert not list(temporary.iterdir())
    assert list(tmp_path.iterdir()) == [temporary]


def test_broken_promises_are_explained(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bad_net.py").write_text(BAD)
    words = ["mode=check", "model=linear", "model._target_=bad_net.Net", "sync_bn=off"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    output = start(*PYTHON_TRAIN, *words, PYTHONPATH=path).finish(code=EXIT_PROMISES).output
    assert "no     batch norm sees a rank's share: norm; type sync_bn=auto\n" in output
    assert "yes    samples and outputs are the same twice\n" in output
    assert "no     parameters without a gradient: spare.weight, spare.bias; type strategy.find_unused" in output
    assert not (tmp_path / "outputs").exists()


def test_a_strategy_that_one_rank_cannot_run_is_refused(start: Start) -> None:
    words = ["mode=check", "strategy=async_parameter_server", "launch=fork", "model=linear"]
    run = start(*PYTHON_TRAIN, *words).finish(2)
    assert "mode=check runs on 1 and on 2 ranks: strategy=async_parameter_server has no worker in a wor" in run.sentence
