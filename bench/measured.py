"""Lockstep under measurement, by its public contracts: strategies whose steps are timed, and a logger.

python src/train.py strategy._target_=measured.MeasuredDDP +logger.measured._target_=measured.EpochRecorder ...

`RECORD` holds what was measured. Every rank writes it after an epoch's training, rank 0 also after the evaluation.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import Record

from lockstep.config.schema import Count
from lockstep.data.source import DataSource, Splits, Tensors
from lockstep.data.vision import TorchvisionImages
from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import DDP
from lockstep.training.loop import train_epoch
from lockstep.training.watchers import Watcher

RECORD = Record()


class RecordedSteps(Watcher):
    def after_step(self, samples: int) -> None:
        RECORD.stepped()


class MeasuredSteps(Strategy):
    """Put before a strategy's class. A lap of training reaches to the epoch's means over all ranks."""

    def own_epoch(self) -> Callable[..., int]:
        train = super().own_epoch() or train_epoch

        def measured(state: Any, stream: Iterator[Any], seed: int, timer: Any, watchers: Sequence[Watcher]) -> int:
            RECORD.start()
            self.samples = train(state, stream, seed, timer, [*self.step_watchers(), *watchers])
            return self.samples

        return measured

    def step_watchers(self) -> list[Watcher]:
        """What is called first after each step."""
        return [RecordedSteps()]

    def epoch_metrics(self) -> dict[str, float]:
        RECORD.lap("training", self.samples)
        if "BENCH_RECORD" in os.environ:
            RECORD.write()
        RECORD.start()
        return super().epoch_metrics()


class MeasuredDDP(MeasuredSteps, DDP):
    pass


class SyncCountingDDP(MeasuredDDP):
    """Counts where the host waits for the GPU, in all steps after the first `SyncCounts.WARM_UP`."""

    def own_epoch(self) -> Callable[..., int]:
        measured = super().own_epoch()

        def counted(*arguments: Any) -> int:
            with warnings.catch_warnings(record=True) as self.caught:
                warnings.simplefilter("always")
                return measured(*arguments)

        return counted

    def step_watchers(self) -> list[Watcher]:
        return [*super().step_watchers(), SyncCounts(self)]

    def epoch_metrics(self) -> dict[str, float]:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        return super().epoch_metrics()


class SyncCounts(Watcher):
    """After each step: the places where the host has waited since the warm-up."""

    WARM_UP = 5

    def __init__(self, strategy: SyncCountingDDP) -> None:
        self.strategy, self.number = strategy, -self.WARM_UP
        self.places: dict[str, int] = {}
        RECORD.extra = {"places": self.places, "steps": 0}

    def after_step(self, samples: int) -> None:
        self.number += 1
        if self.number == 0 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        RECORD.extra["steps"] = self.number
        self.places.clear()
        for warning in self.strategy.caught:
            if "called a synchronizing" in str(warning.message):
                place = f"{Path(warning.filename).name}:{warning.lineno}"
                self.places[place] = self.places.get(place, 0) + 1


class EpochRecorder(Logger):
    """On rank 0: the lap of each evaluation, until the best snapshot is copied, and when each accuracy was known."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[float, float]] = []  # (time.time(), accuracy)

    def on_fit_start(self, run: RunInfo) -> None:
        self.samples = run.eval_samples

    def on_epoch_end(self, summary: EpochSummary) -> None:
        accuracy = summary.metrics.get("test", {}).get("accuracy")
        if accuracy is not None:
            RECORD.lap("evaluation", self.samples)
            self.evaluations.append((time.time(), accuracy))
        gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        RECORD.extra |= {"evaluations": self.evaluations, "GiB": gib}
        RECORD.write(accuracy)


@dataclass(kw_only=True)
class FirstImages(TorchvisionImages):
    """The first `samples` and `test_samples` of the images that torchvision downloads."""

    samples: Count
    test_samples: Count

    def splits(self) -> Splits:
        pairs = zip(super().splits(), (self.samples, self.test_samples), strict=False)
        return Splits(*(Tensors(part.inputs[:count], part.targets[:count]) for part, count in pairs))


@dataclass(kw_only=True)
class Noise(DataSource):
    """Random images in CIFAR-10's shape, with random classes."""

    samples: Count
    test_samples: Count

    def splits(self) -> Splits:
        return Splits(*(self.drawn(count, seed) for seed, count in enumerate((self.samples, self.test_samples))))

    def drawn(self, count: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return Tensors(images, torch.randint(0, 10, (count,), generator=generator))
