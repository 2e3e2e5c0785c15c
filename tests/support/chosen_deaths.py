"""Models, loggers and data of runs in which a rank dies at a chosen moment, each once: an empty file shows that it has.

With DIES in the environment; without it the same run goes undisturbed.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.data.digits import digits
from lockstep.data.in_memory import InMemoryDataset
from lockstep.loggers.base import EpochSummary, Logger
from lockstep.models.mlp import mlp

FATAL_CALL = 11  # of the model in training, on rank 1


def comes(moment: str) -> bool:
    """True once, if ranks die in this run."""
    if "DIES" not in os.environ or Path(moment).exists():
        return False
    Path(moment).touch()
    return True


def kill_rank_1() -> None:
    """Called by rank 0. It takes its time, so that rank 1 waits for it in a collective when it dies."""
    time.sleep(0.5)
    os.kill(int(Path("pid_of_rank_1").read_text()), signal.SIGKILL)
    time.sleep(0.3)


class Counting(nn.Module):
    """Counts its training steps in a buffer that it assigns. Rank 1 dies in one, and its successor in its first."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self.deaths, self.calls = deaths, 0
        self.register_buffer("seen", torch.zeros(()))
        if os.environ.get("RANK") == "1":
            Path("pid_of_rank_1").write_text(str(os.getpid()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
            self.calls += 1
            if os.environ.get("RANK") == "1" and self._dies():
                os.kill(os.getpid(), signal.SIGKILL)
        return x

    def _dies(self) -> bool:
        if self.deaths > 1 and Path("first").exists():
            return comes("second")
        return self.deaths > 0 and self.calls == FATAL_CALL and comes("first")


def counting_mlp(
    shape: list[int], classes: int, width: int, depth: int, dropout: float, deaths: int = 0
) -> nn.Sequential:
    return nn.Sequential(Counting(deaths), mlp(shape, classes, width, depth, dropout))


class KillsAfterEvaluation(Logger):
    """Rank 1 dies after the first epoch's evaluation, before the epoch's snapshot."""

    def on_epoch_end(self, summary: EpochSummary) -> None:
        if summary.epoch == 1 and comes("killed"):
            kill_rank_1()


class KillsInLastSave(Logger):
    """Rank `victim` dies when the last snapshot is collected, and before it is written."""

    def __init__(self, victim: int) -> None:
        self.victim, self.is_last, self.flushes = victim, False, 0

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.is_last = summary.epoch == summary.epochs

    def flush(self) -> None:
        self.flushes += self.is_last
        if self.flushes == 2 and comes("killed"):
            if self.victim == 1:
                kill_rank_1()
            else:
                os.kill(os.getpid(), signal.SIGKILL)


def slow_digits(train: bool) -> InMemoryDataset:
    """A rank takes a minute to load them."""
    if "RANK" in os.environ:
        Path("loading").touch()
        time.sleep(60)
    return digits(train)
