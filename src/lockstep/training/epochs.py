"""Trains one epoch after the other. With `watch.nan=rollback` it goes back to a snapshot after a NaN."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.data.loader import BatchLoader
from lockstep.errors import TrainingDiverged
from lockstep.failures import rank as monitor
from lockstep.training import loop
from lockstep.training.meter import RunningMetrics
from lockstep.training.state import TrainState
from lockstep.training.timing import StepTimer

RollBack = Callable[[TrainingDiverged], None]
"""Brings the state back to a snapshot, on all ranks, or raises the error."""


class EpochLogger(Protocol):
    """What a logger offers for an epoch, see `lockstep.loggers.base.Logger`."""

    def on_epoch_start(self, epoch: int, epochs: int, samples: int, samples_done: int) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...


@dataclass(frozen=True)
class TrainedEpoch:
    """epoch: counted from 1. means: {metric: mean over the epoch's samples}; empty if none of them was counted.

    samples_per_second: over all ranks, without the first step of this process; None if it took no step of the epoch.
    counted_per_second: the same of what the task counts, such as {"tokens": 8192.0}; empty if it counts samples.
    """

    epoch: int
    means: dict[str, float]
    samples_per_second: float | None
    counted_per_second: dict[str, float]


class FirstStep:
    """Notes when this process ended its first step, which took longer than others: it fills caches."""

    def __init__(self) -> None:
        self.ended = 0.0
        self.samples = 0

    def __call__(self, samples: int) -> None:
        if self.samples == 0:
            self.ended, self.samples = time.perf_counter(), samples


class EpochTrainer:
    """Trains `state`. after_step: called after every step. running: checks that the mean loss is a number."""

    def __init__(
        self,
        state: TrainState,
        loader: BatchLoader,
        timer: StepTimer,
        after_step: Sequence[loop.AfterStep],
        running: RunningMetrics,
        logger: EpochLogger,
        roll_back: RollBack,
    ) -> None:
        self.first_step = FirstStep()
        self.state, self.loader, self.timer = state, loader, timer
        self.after_step: list[loop.AfterStep] = [*after_step, self.first_step]
        self.running, self.logger, self.roll_back = running, logger, roll_back

    def train(self) -> TrainedEpoch:
        """The rest of the current epoch. After a rollback this may be an earlier epoch than before."""
        while True:
            try:
                return self._train()
            except TrainingDiverged as error:
                self.roll_back(error)

    def _train(self) -> TrainedEpoch:
        progress, start, samples_before = self.state.progress, time.perf_counter(), self.state.progress.samples
        has_first_step = self.first_step.samples == 0
        epoch = progress.epoch + 1
        monitor.epoch_starts(epoch)
        self.logger.on_epoch_start(epoch, self.state.settings.epochs, len(self.loader), progress.samples)
        self.running.epoch_start()
        samples = loop.train_epoch(self.state, self.loader, self.timer, self.after_step)
        means = self.running.finite(self.state.meter.means())
        if self.state.meter.counted == 0:  # all updates were left out, or a resumed run measures something else
            means = {}
        timed = samples
        if has_first_step and samples > self.first_step.samples:
            start, timed = self.first_step.ended, samples - self.first_step.samples
        samples_per_second = timed / (time.perf_counter() - start)
        self.logger.log_metrics(self.state.strategy.epoch_metrics(), progress.step)
        if samples == 0:  # resumed after the epoch's last step, before its evaluation
            return TrainedEpoch(epoch, means, None, {})
        name, meter = self.state.task.counts, self.state.meter
        counted = {name: samples_per_second * meter.counted / (samples_before + samples)} if name != "samples" else {}
        return TrainedEpoch(epoch, means, samples_per_second, counted)
