"""The contract of a logger, and the list that hands every call to several loggers.

To add a logger:

1. Write a subclass of `Logger` in a file of its own. Override the methods you need; the others do nothing.
2. Write `conf/logger/<name>.yaml` with one key, whose value has the `_target_`:

       my_logger:
         _target_: my_package.my_module.MyLogger
         run_dir: ${run_dir}

3. Type `logger=[tensorboard,console,my_logger]`.

Only rank 0 has loggers, so a logger must not call a collective. The other ranks have an empty LoggerList.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from lockstep.config.record import ConfigRecord, sets
from lockstep.tasks.base import ReadSample, Report
from lockstep.text import show

log = logging.getLogger(__name__)

WARN_SECONDS = 60.0  # at most one warning per logger in this time

Hyperparameter = bool | int | float | str
NOT_HYPERPARAMETERS: tuple[str, ...] = ("run_dir", "data_dir", "resume", "mode", "backend", "launch", "logger", "sweep")
NOT_HYPERPARAMETERS += ("hydra", "sync_bn.mode", "trainer.pause_after")


def hyperparameters(record: ConfigRecord, world_size: int) -> dict[str, Hyperparameter]:
    """{key: value} by which runs are compared. Numbers stay numbers, lists become text; null is left out, since
    TensorBoard would show all values of the key as text."""
    return {
        key: value if isinstance(value, Hyperparameter) else show(value)
        for key, value in {**record.options, **record.shown, "world_size": world_size}.items()
        if value is not None and not sets(key, NOT_HYPERPARAMETERS) and not key.endswith(("._target_", "._partial_"))
    }


@dataclass(frozen=True)
class RunInfo:
    """What is known about a run when it starts or resumes.

    config_yaml: the composed config.
    hyperparameters: {key: number, text or truth value} by which runs are compared.
    metrics: the names that an evaluation measures.
    data_parallel_size: into how many shares a global batch is cut.
    batch_size: samples of a global batch.
    start_step: optimizer steps already done, 0 for a fresh run.
    best, best_step: the best evaluation of the objective so far, and its step; None without one.
    objective: such as "val/accuracy"; None: nothing is chosen. is_final: a training on all data.
    val_samples: of the validation set, 0 without one. eval_samples: of the test set.
    facts: plain values for run.json, see `lockstep.loggers.run_json`.
    script: the path of src/train.py, as typed.
    flags: words that a command with this run has to repeat: they name folders of configs.
    """

    run_dir: Path
    config_yaml: str
    hyperparameters: Mapping[str, Hyperparameter]
    metrics: Sequence[str]
    world_size: int
    data_parallel_size: int
    train_samples: int
    eval_samples: int
    batch_size: int
    epochs: int
    start_step: int
    best: float | None = None
    best_step: int | None = None
    objective: str | None = None
    is_final: bool = False
    val_samples: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    script: Path = Path("src/train.py")
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class EpochSummary:
    """The results of one epoch. They are not passed to `log_metrics` as well.

    epoch: counted from 1.
    step: optimizer steps done.
    metrics: {"train": {"loss": 0.1, ...}, "val": {...}}, each a mean over all samples; "train" is missing if no sample
        was counted, "val" if the epoch had no evaluation. "test" is there if the test set decides or is read each time.
    samples_per_second: of training, over all ranks; None if this process has trained no step of the epoch.
    best: {"accuracy": 0.9}, the best evaluation of the objective so far; empty without one.
    best_step: its step.
    counted_per_second: of what the task counts, such as {"tokens": 8192.0}; empty if it counts samples.
    """

    epoch: int
    epochs: int
    step: int
    metrics: dict[str, dict[str, float]]
    samples_per_second: float | None
    best: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    counted_per_second: dict[str, float] = field(default_factory=dict)

    def tagged_metrics(self) -> dict[str, float]:
        """{"speed/samples_per_s": ..., "train/loss": ..., "val/loss": ...}: all numbers, as `log_metrics` has them."""
        tagged = {} if self.samples_per_second is None else {"speed/samples_per_s": self.samples_per_second}
        tagged |= {f"speed/{name}_per_s": speed for name, speed in self.counted_per_second.items()}
        groups = self.metrics | {"best": self.best} if self.metrics.keys() - {"train"} else self.metrics
        for group, means in groups.items():
            for name, value in means.items():
                tagged[f"{group}/{name}"] = value
        return tagged


class Logger:
    """Receives what a run reports. Every method does nothing here.

    Steps are counted from 1: `step` is the number of optimizer steps done. A method may raise OSError, for example on
    a full disk: the user gets a warning, training goes on, and the next call comes as usual. Any other exception ends
    the run.
    """

    packages: tuple[str, ...] = ()
    """What it imports beside the requirements. A run is refused if one is not installed."""

    def on_fit_start(self, run: RunInfo) -> None:
        """Training is about to start or to resume. This is the first call.

        A run that was killed may have logged steps after `run.start_step`. It repeats them, so drop them here.
        """

    def on_epoch_start(self, epoch: int, epochs: int, samples: int, samples_done: int) -> None:
        """Training of an epoch starts.

        epoch: counted from 1. samples: of the whole epoch, over all ranks. samples_done: how many of these were
        trained on before the run resumed, else 0.
        """

    def on_step(self, step: int, samples: int) -> None:
        """An optimizer step has ended. samples: of its global batch. Called at every step, so it must be cheap."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Numbers by tag, such as {"train/running_loss": 0.1, "train/lr": 0.05}. Called every `logging.every` steps.

        train/lr at step N is the learning rate of the next step.
        """

    def image(self, tag: str, image: Tensor, step: int) -> None:
        """An image (3, height, width) with values from 0 to 1."""

    def log_report(self, report: Report, sample: ReadSample, classes: Sequence[str], step: int, split: str) -> None:
        """What the task found in an evaluation of `split`, "val" or "test". sample, classes: for `report.figures`,
        which draws images of it.

        Called if the config of a logger has the key `images`: the number of samples to show.
        """

    def on_epoch_end(self, summary: EpochSummary) -> None:
        """An epoch has ended, and its evaluation if there was one."""

    def on_test(self, metrics: dict[str, float], step: int, is_logged: bool) -> None:
        """Training has ended, and this is the number of the run: of the test set, with the weights that were chosen.

        step: of these weights. is_logged: whether a summary of an epoch, or an earlier start of the run, had it.
        """

    def flush(self) -> None:
        """Write everything received so far. Called before each snapshot, so that a resumed run has no gaps."""

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        """Training has finished. metrics: {"loss": 0.1, ...} of the last evaluation of the objective's set.

        Not called if the run stops early or fails.
        """

    def on_fit_stop(self, error: BaseException) -> None:
        """The run stops early (StoppedEarly) or fails. Perhaps it has not called `on_fit_start` yet."""

    def close(self) -> None:
        """Release files and threads. This is the last call, even if the run fails."""


class LoggerList(Logger):
    """Hands every call to each logger. An OSError of one logger is a warning, at most once a minute for this logger.

    Calls that mark a start or a step go through the list in its order. Calls that mark an end go through it in reverse
    order: with `logger=[tensorboard,console,progress_bar]` the bar is gone before the console writes its line.
    """

    def __init__(self, loggers: Sequence[Logger], before_writing: Callable[[], None] = lambda: None) -> None:
        """before_writing: called before loggers may write, every few steps. It makes a deleted run folder again."""
        self.loggers, self.before_writing = list(loggers), before_writing
        self._last_warning: dict[int, float] = {}  # index of a logger -> time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.on_fit_stop(error)
        finally:
            self.close()

    def on_fit_start(self, run: RunInfo) -> None:
        self._call_each(lambda logger: logger.on_fit_start(run))

    def on_epoch_start(self, epoch: int, epochs: int, samples: int, samples_done: int) -> None:
        self._call_each(lambda logger: logger.on_epoch_start(epoch, epochs, samples, samples_done))

    def on_step(self, step: int, samples: int) -> None:
        self._call_each(lambda logger: logger.on_step(step, samples))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.before_writing()
        if metrics:
            self._call_each(lambda logger: logger.log_metrics(metrics, step))

    def image(self, tag: str, image: Tensor, step: int) -> None:
        self._call_each(lambda logger: logger.image(tag, image, step))

    def log_report(self, report: Report, sample: ReadSample, classes: Sequence[str], step: int, split: str) -> None:
        self._call_each(lambda logger: logger.log_report(report, sample, classes, step, split))

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.before_writing()
        self._call_each(lambda logger: logger.on_epoch_end(summary), reverse=True)

    def on_test(self, metrics: dict[str, float], step: int, is_logged: bool) -> None:
        self._call_each(lambda logger: logger.on_test(metrics, step, is_logged))

    def flush(self) -> None:
        self.before_writing()
        self._call_each(lambda logger: logger.flush())

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        self._call_each(lambda logger: logger.on_fit_end(run_dir, metrics), reverse=True)

    def on_fit_stop(self, error: BaseException) -> None:
        self._call_each(lambda logger: logger.on_fit_stop(error), reverse=True)

    def close(self) -> None:
        self._call_each(lambda logger: logger.close(), reverse=True)

    def _call_each(self, call: Callable[[Logger], None], reverse: bool = False) -> None:
        indices = range(len(self.loggers))
        for index in reversed(indices) if reverse else indices:
            try:
                call(self.loggers[index])
            except OSError as error:
                self._warn(index, error)

    def _warn(self, index: int, error: OSError) -> None:
        now = time.monotonic()
        last = self._last_warning.get(index)
        if last is None or now - last >= WARN_SECONDS:
            self._last_warning[index] = now
            log.warning("%s cannot write (%s); training goes on", type(self.loggers[index]).__name__, error)
