"""The contract of a logger, the smallest one, and the list that hands every call to several loggers.

To add one: a subclass of `Logger`, and `conf/logger/<name>.yaml` with one key, whose value has the `_target_`; then
type `logger=[tensorboard,console,<name>]`. Rank 0 alone has loggers: they must not call a collective.
"""

import csv
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.errors import EXIT_FINISHED, StoppedEarly, TrainingDiverged, exit_code_of
from lockstep.files import write_whole
from lockstep.runs.record import FAILED
from lockstep.training.run import Run

log = logging.getLogger(__name__)

DRAWING_SHARE = 0.01  # of the time: images of an evaluation are drawn after training for 100 times as long
FIRST_DRAWING = 10.0  # seconds after the start


@dataclass(frozen=True)
class RunInfo:
    """What loggers receive. run: its parts, and its `progress`, where it starts or what it has reached at the end.
    facts: keys of run.json, "config" and "sweep" among them. At the end also last: {metric: value} of the last
    evaluation; test: None, or {"step": of its weights, "metrics": {name: value}, "samples": how many, "errors": {name:
    standard error over the samples}}; exit_code: of the command."""

    run: Run
    facts: Mapping[str, Any]
    last: Mapping[str, float] = field(default_factory=dict)
    test: Mapping[str, Any] | None = None
    exit_code: int = EXIT_FINISHED


@dataclass(frozen=True)
class EpochSummary:
    """The results of an epoch, counted from 1, which are not passed to `log` as well. step: optimizer steps done.
    metrics: {"train": {"loss": 0.1, ...}, "val": {...}}, means over all samples; "train" is missing if no sample was
    counted, "val" and "best", the best evaluation so far, if the epoch had no evaluation; "test" is there if the test
    set is read each time. speeds: {"samples": a second, "tokens": a second} over all ranks; empty without a step."""

    epoch: int
    epochs: int
    step: int
    metrics: dict[str, dict[str, float]]
    speeds: dict[str, float]

    def flat(self) -> dict[str, float]:
        """{"speed/samples_per_s": ..., "train/loss": ..., "val/loss": ...}: all numbers, as `log` has them."""
        groups = {"speed": {f"{name}_per_s": speed for name, speed in self.speeds.items()}, **self.metrics}
        return {f"{group}/{name}": value for group, means in groups.items() for name, value in means.items()}


class Logger:
    """Receives what a run reports. Every method but `epoch` does nothing here. A step is the number of optimizer steps
    done. What a call reports is on its way to the disk when it returns: a snapshot may follow. An exception costs one
    warning, and the training goes on. Its key `images`, if it has one, says how many samples of an evaluation the
    images show."""

    def start(self, info: RunInfo) -> None:
        """Training starts or goes on. A run that was killed repeats the steps after `progress.step`: drop them."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Numbers by tag, such as {"train/running_loss": 0.1}: every `logging.every` steps, and those of the test."""

    def epoch(self, summary: EpochSummary) -> None:
        """An epoch has ended, and its evaluation if there was one."""
        self.log(summary.flat(), summary.step)

    def image(self, tag: str, image: Tensor, step: int) -> None:
        """image: (3, height, width), from 0 to 1. step: of the weights that it shows."""

    def end(self, info: RunInfo, state: str) -> None:
        """The run is finished, paused, stopped, diverged or failed. Not called for one that did not start."""

    def close(self) -> None:
        """Release files and threads. The last call."""


class CSVLogger(Logger):
    """Numbers as a table: metrics.csv in the run folder, a row for each, with the columns step, tag and value."""

    def start(self, info: RunInfo) -> None:
        self.path = Path(info.run.config.run_dir) / "metrics.csv"
        step, lines = info.run.progress.step, list[str]()
        if step and self.path.exists():  # without the header, and what a kill has cut off
            lines = self.path.read_text(encoding="utf-8").split("\n")[1:-1]
        kept = [line for line in lines if int(line.partition(",")[0]) <= step]
        write_whole(self.path, "\n".join(["step,tag,value", *kept, ""]), sync=False)

    def log(self, metrics: dict[str, float], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows((step, tag, float(value)) for tag, value in metrics.items())


class Loggers(Logger, AbstractContextManager["Loggers"]):
    """Hands every call to each logger. The first exception of one is a warning; one that cannot start is left out.
    members: loggers, and the RunRecord, which has some of their methods."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = list(members)
        self.info: RunInfo | None = None
        self.warned = set[int]()  # ids of those that have failed
        self.waiting = dict[str, tuple[Callable[[], Mapping[str, Tensor]], int]]()  # {split: as `draw` has got it}
        self.draw_at = time.monotonic() + FIRST_DRAWING

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.info is not None:
            is_stop = isinstance(error, StoppedEarly | KeyboardInterrupt)
            state = "stopped" if is_stop else "diverged" if isinstance(error, TrainingDiverged) else FAILED
            self._each("end", replace(self.info, exit_code=exit_code_of(error)), state)
        self.close()

    def start(self, info: RunInfo) -> None:
        self.info = info
        self.members = [member for member in self.members if self._call(member, "start", info)]

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._each("log", metrics, step)

    def epoch(self, summary: EpochSummary) -> None:
        self._each("epoch", summary)

    def image(self, tag: str, image: Tensor, step: int) -> None:
        self._each("image", tag, image, step)

    def draw(self, split: str, figures: Callable[[], Mapping[str, Tensor]], step: int) -> None:
        """Images of the weights of `step`, which `figures` draws as {tag: image}: now, in 1 % of the time, or at the
        end, the newest ones."""
        self.waiting[split] = figures, step
        self._draw()

    def test(self, test: Mapping[str, Any], is_logged: bool) -> None:
        """The number of the run. test: as in RunInfo. is_logged: whether its numbers have been logged before."""
        self._each("test", test)  # to be recorded
        if not is_logged:
            self.log({f"test/{name}": value for name, value in test["metrics"].items()}, test["step"])

    def end(self, info: RunInfo, state: str) -> None:
        if info.facts["sweep"] is None:
            self.draw_at = 0.0  # jobs of a sweep that last a few seconds have no images
        self._draw()
        self._each("end", info, state)

    def close(self) -> None:
        self._each("close")

    def _draw(self) -> None:
        start = time.monotonic()
        if start >= self.draw_at:
            self._call(self, "_show")
            self.waiting.clear()
            self.draw_at = time.monotonic() + (time.monotonic() - start) / DRAWING_SHARE

    def _show(self) -> None:
        for figures, step in self.waiting.values() if self.members else ():
            for tag, image in figures().items():
                self.image(tag, image, step)

    def _each(self, method: str, *arguments: Any) -> None:
        for member in self.members:
            self._call(member, method, *arguments)

    def _call(self, receiver: object, method: str, *arguments: Any) -> bool:
        """Returns whether it went well."""
        try:
            getattr(receiver, method, lambda *_: None)(*arguments)
            return True
        except Exception as error:
            if id(receiver) not in self.warned:
                self.warned.add(id(receiver))
                what = " ".join(f"{type(error).__name__}: {error}".split())
                sentence = f"{type(receiver).__name__} loses a part of this run ({what}); training goes on"
                log.warning(sentence, exc_info=not isinstance(error, OSError))
            return False
