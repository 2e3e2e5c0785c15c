"""Parts of a training that linger in the phase that the variable LINGER names, and leave a file there when they do.

LINGER=evaluation:60 makes each phase "evaluation" of a rank last 60 s. Every part also works without lingering.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from lockstep.data import Pair
from lockstep.distributed.environment import read_rank_info
from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.strategies.ddp import DDP
from support.commands import own_data
from support.digits import Samples
from support.slow import mlp


def linger(phase: str) -> None:
    """Take long in `phase`, if LINGER says so, and leave the file `in-<phase>-<rank>` in the current folder."""
    wanted, _, seconds = os.environ.get("LINGER", "").partition(":")
    if wanted != phase:
        return
    Path(f"in-{phase}-{read_rank_info().rank}").touch()
    time.sleep(float(seconds))


class Prepared(Pair):
    """Two data sets. It lingers in "prepare"."""

    def prepare(self) -> None:
        linger("prepare")


class Digits(Samples):
    first = 64


class Net(torch.nn.Module):
    """An mlp. It lingers in "build", in "step" when it computes with gradients, and in "evaluation" without. With
    HANG=1 rank 1 hangs in the sixth pass."""

    def __init__(self, shape: list[int], classes: int) -> None:
        super().__init__()
        linger("build")
        self.passes = 0
        self.net = mlp(shape, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            linger("step")
            self.passes += 1
            if self.passes == 6 and os.environ.get("HANG", "-") == os.environ.get("RANK"):
                Path("hangs").touch()
                time.sleep(600)
        elif not self.training:  # in the first step copies pass a part of the batch once more
            linger("evaluation")
        outputs: Tensor = self.net(inputs)
        return outputs


class LateDDP(DDP):
    """Lingers in "meeting" on rank 1, which the other ranks then wait for."""

    def __init__(self) -> None:
        super().__init__(bucket_cap_mb=25, find_unused_parameters=False)

    @property
    def binds_one_device(self) -> bool:  # type: ignore[override]
        """A rank asks it before it meets the others, and in the first steps once more."""
        if read_rank_info().rank and not in_phase(Path(), "meeting"):
            linger("meeting")
        return True


class SlowLogger(Logger):
    """Lingers in "snapshot" before the snapshot of an epoch, and in "end" after the training."""

    def __init__(self) -> None:
        pass

    def epoch(self, summary: EpochSummary) -> None:
        linger("snapshot")

    def end(self, run: RunInfo, state: str) -> None:
        linger("end")


PARTS = [
    *own_data("support.phases.Digits"),
    "dataset._target_=support.phases.Prepared",
    "model=mlp",
    "model._target_=support.phases.Net",
    "strategy._target_=support.phases.LateDDP",
    "+logger.slow._target_=support.phases.SlowLogger",
    "trainer.deterministic=true",
    "trainer.batch_size=16",
    "hydra.run.dir=run",
]


def in_phase(folder: Path, phase: str) -> bool:
    """Whether rank 0 has come to `phase`, and for a meeting rank 1."""
    return (folder / f"in-{phase}-{int(phase == 'meeting')}").exists()
