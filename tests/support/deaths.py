"""Ranks that are killed at chosen moments, each once. A moment that has come leaves an empty file of its name.

The moments: "step", in rank 1's first step; "build", while its successor builds the model and the others wait for it;
"end", when the others have finished and rank 0 closes the training; "last", rank 0 itself in the same place.
"""

import os
import signal
import time
from pathlib import Path

from torch import Tensor, nn

from lockstep.data.digits import digits
from lockstep.data.in_memory import InMemoryDataset
from lockstep.loggers.base import Logger
from lockstep.models.mlp import mlp

MOMENTS = ("step", "build", "end", "last")


def comes(moment: str) -> bool:
    """Whether `moment` has come: it is the next one in the order of MOMENTS. True once."""
    before = MOMENTS[: MOMENTS.index(moment)]
    if Path(moment).exists() or not all(Path(name).exists() for name in before):
        return False
    Path(moment).touch()
    return True


class DyingRank(nn.Module):
    """Does nothing but die at the moments "step" and "build", on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("RANK") == "1":
            Path("pid_of_rank_1").write_text(str(os.getpid()))
            if comes("build"):
                os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and os.environ.get("RANK") == "1" and comes("step"):
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def dying_mlp(shape: list[int], classes: int, width: int, depth: int, dropout: float) -> nn.Module:
    return nn.Sequential(DyingRank(), mlp(shape, classes, width, depth, dropout))


class DyingAtEnd(Logger):
    """Kills a rank at the moments "end" and "last". Rank 0 has loggers; the others wait for it by then."""

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        if comes("end"):
            time.sleep(0.5)  # until rank 1 waits
            os.kill(int(Path("pid_of_rank_1").read_text()), signal.SIGKILL)
            time.sleep(0.5)  # rank 0 finishes its work after the death
        elif comes("last"):
            os.kill(os.getpid(), signal.SIGKILL)


def mortal_digits(train: bool) -> InMemoryDataset:
    """The digits. While a file "no_memory" is there, whoever loads them is killed."""
    if Path("no_memory").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return digits(train)
