"""A progress bar over the samples of each epoch, shown only on a terminal."""

import logging
import os
import sys
import threading
from typing import Any

from tqdm import tqdm

from lockstep.distributed.run_folder import BAR_COLUMNS
from lockstep.loggers.base import EpochSummary, Logger


class ProgressBarLogger(Logger):
    """A tqdm bar on stderr with the running loss. It disappears when the epoch's training ends.

    Jobs of a sweep that run at once draw it for the sweep's process, which shows the bars of all.

    A log line takes the bar's place, and the bar comes back below it with the next step.
    """

    def __init__(self) -> None:
        # tqdm's own lock adds a semaphore for several processes, which Python calls leaked when a rank exits.
        tqdm.set_lock(threading.RLock())
        self._bar: tqdm[Any] | None = None
        self._samples_left = 0

    def on_epoch_start(self, epoch: int, epochs: int, samples: int, samples_done: int) -> None:
        self._samples_left = samples - samples_done
        columns = os.environ.get(BAR_COLUMNS)
        self._bar = tqdm(
            total=samples,
            initial=samples_done,
            desc=f"epoch {epoch}/{epochs}",
            unit=" samples",
            leave=False,
            ncols=None if columns is None else int(columns),
            disable=None if columns is None else False,  # None: on if stderr is a terminal
        )
        for handler in _console_handlers():
            handler.addFilter(self._clear_line)

    def on_step(self, step: int, samples: int) -> None:
        if self._bar is not None:
            self._bar.update(samples)
            self._samples_left -= samples
            if self._samples_left <= 0:
                self.close()  # not during the evaluation, which may take long

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        loss = metrics.get("train/running_loss")
        if self._bar is not None and loss is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.close()  # an epoch that trainer.max_steps ends leaves samples over

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            for handler in _console_handlers():
                handler.removeFilter(self._clear_line)

    def _clear_line(self, record: logging.LogRecord) -> bool:
        """Called before a log line is written."""
        if self._bar is not None and not self._bar.disable:
            self._bar.clear()
        return True


def _console_handlers() -> list[logging.Handler]:
    streams = (sys.stdout, sys.stderr)
    return [handler for handler in logging.getLogger().handlers if getattr(handler, "stream", None) in streams]
