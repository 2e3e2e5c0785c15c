"""Lockstep under measurement: a callback that times steps and epochs, and a logger.

python src/train.py callbacks=[{_target_:measured.Steps}] +logger.measured._target_=measured.EpochRecorder ...

`RECORD` holds what was measured. Every rank writes it after an epoch's training, rank 0 also after the evaluation.
"""

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import Record

from lockstep.config.schema import Count
from lockstep.data.source import DataSource, Splits, Tensors
from lockstep.data.vision import TorchvisionImages
from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.training import loop
from lockstep.training.callbacks import Callback
from lockstep.training.exchange import Exchange
from lockstep.training.run import Run

RECORD = Record()


class Steps(Callback):
    """A lap of training reaches to the epoch's means over all ranks, which no callback sees."""

    def on_fit_start(self, run: Run, logger: Logger) -> None:
        self.own = loop.begin_epoch, loop.end_epoch
        loop.begin_epoch, loop.end_epoch = self.begins, self.ends

    def on_fit_end(self, run: Run) -> None:
        loop.begin_epoch, loop.end_epoch = self.own

    def begins(self, run: Run, exchange: Exchange) -> None:
        self.before = run.progress.samples
        RECORD.start()
        self.own[0](run, exchange)

    def ends(self, run: Run, exchange: Exchange) -> EpochSummary:
        summary = self.own[1](run, exchange)
        RECORD.lap("training", (run.progress.samples or run.epoch_samples) - self.before)
        if "BENCH_RECORD" in os.environ:
            RECORD.write()
        RECORD.start()
        return summary

    def on_step_end(self, run: Run) -> None:
        RECORD.stepped()


class SyncCounts(Steps):
    """Counts where the host waits for the GPU, in all steps of an epoch after the first `WARM_UP`."""

    WARM_UP = 5

    def begins(self, run: Run, exchange: Exchange) -> None:
        self.number, self.places = -self.WARM_UP, dict[str, int]()
        RECORD.extra = {"places": self.places, "steps": 0}
        self.catching = warnings.catch_warnings(record=True)
        self.caught: Any = self.catching.__enter__()
        warnings.simplefilter("always")
        super().begins(run, exchange)

    def ends(self, run: Run, exchange: Exchange) -> EpochSummary:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self.catching.__exit__(None, None, None)
        return super().ends(run, exchange)

    def on_step_end(self, run: Run) -> None:
        super().on_step_end(run)
        self.number += 1
        if self.number == 0 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        RECORD.extra["steps"] = self.number
        self.places.clear()
        for warning in self.caught:
            if "called a synchronizing" in str(warning.message):
                place = f"{Path(warning.filename).name}:{warning.lineno}"
                self.places[place] = self.places.get(place, 0) + 1


class EpochRecorder(Logger):
    """On rank 0: the lap of each evaluation, until the best snapshot is copied, and when each accuracy was known."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[float, float]] = []  # (time.time(), accuracy)

    def start(self, info: RunInfo) -> None:
        self.samples = len(info.run.loaders.test.reader)

    def epoch(self, summary: EpochSummary) -> None:
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
