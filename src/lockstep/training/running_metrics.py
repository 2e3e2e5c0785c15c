"""The metrics of the last few steps, and the check that the loss is still a number."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lockstep.errors import TrainingDiverged
from lockstep.training.state import TrainState

FindSnapshot = Callable[[], Path | None]
"""Finds the last good snapshot, for an error message."""


def diverged(what: str, newest_snapshot: FindSnapshot) -> TrainingDiverged:
    """The error for a loss or weights that are not finite. what: the first words, with the step."""
    path = newest_snapshot()
    saved = f"the last good snapshot is {path}" if path else "no snapshot was saved before"
    return TrainingDiverged(f"{what}; {saved}; type optimizer.lr=<smaller> or trainer.max_grad_norm=1.0")


class StepLogger(Protocol):
    """What a logger offers in every step, see `lockstep.loggers.base.Logger`."""

    def on_step(self, step: int, samples: int) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...


class RunningMetrics:
    """Called after every step on every rank. Every `log_every` steps it reports the loss and the learning rate.

    logger: takes metrics by tag.
    """

    def __init__(self, state: TrainState, logger: StepLogger, newest_snapshot: FindSnapshot) -> None:
        self.state, self.logger, self.newest_snapshot = state, logger, newest_snapshot
        self.last_step = state.progress.step

    def after_step(self, samples: int) -> None:
        """Raises TrainingDiverged, on all ranks, if the loss is not finite."""
        step, every = self.state.progress.step, self.state.settings.log_every
        is_due = step // every > self.last_step // every  # a strategy may report several steps at once
        self.last_step = step
        self.logger.on_step(step, samples)
        if not is_due:
            return
        loss = self.finite("loss", self.state.meter.means_since_last())["loss"]
        learning_rate = float(self.state.scheduler.get_last_lr()[0])
        self.logger.log_metrics({"train/running_loss": loss, "train/lr": learning_rate}, step)

    def finite(self, name: str, means: dict[str, float]) -> dict[str, float]:
        """`means`, the same on all ranks. Raises TrainingDiverged if their loss, called `name`, is NaN or infinite."""
        loss = means["loss"]
        if math.isfinite(loss):
            return means
        step, found = self.state.progress.step, self.state.meter.first_non_finite()
        where = f"by step {step}" if found is None else f"at step {found}"
        raise diverged(f"the {name} is {loss} {where}", self.newest_snapshot)
