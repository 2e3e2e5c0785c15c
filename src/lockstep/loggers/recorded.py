"""What was logged since the files were last known to be complete, on every rank: another rank can write it again."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from lockstep.loggers.base import EpochSummary, Logger, LoggerList, RunInfo

FLUSH_AFTER = 500  # calls kept at most, and perhaps as many again

Call = tuple[str, int, Any]
"""("metrics" or "epoch", step, its content as plain values)"""


class LogRecord:
    """The calls that may be missing in the files if rank 0 dies now: those after step `written`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.noted = 0  # how many of them are part of the latest note
        self.written = 0
        self.flushed_at: int | None = None  # the step of a flush that rank 0 may not have come to

    def add(self, call: Call) -> None:
        self.calls.append(call)

    def note(self, step: int) -> None:
        """All calls until now belong to `step`. A later step shows that rank 0 has come to the flush before it."""
        if self.flushed_at is not None and step > self.flushed_at:
            self.written, self.flushed_at = self.flushed_at, None
            self.calls = [call for call in self.calls if call[1] > self.written]
        self.noted = len(self.calls)

    def content(self) -> dict[str, Any]:
        """The calls up to the latest note, and the step after which they come."""
        return {"calls": self.calls[: self.noted], "written": self.written}

    def restore(self, content: dict[str, Any]) -> None:
        self.calls, self.written = list(content["calls"]), content["written"]
        self.noted, self.flushed_at = len(self.calls), None


class RecordedLoggers(LoggerList):
    """Records the numbers of every call, and hands the call to the loggers, which other ranks than 0 do not have."""

    def __init__(self, loggers: Sequence[Logger], before_writing: Callable[[], None], record: LogRecord) -> None:
        super().__init__(loggers, before_writing)
        self.record = record

    def on_fit_start(self, run: RunInfo) -> None:
        """The loggers drop what comes after the last step that was surely written, and get the rest again."""
        super().on_fit_start(replace(run, start_step=self.record.written))
        for kind, step, content in self.record.calls:
            if kind == "epoch":
                super().on_epoch_end(EpochSummary(**content))
            else:
                super().log_metrics(content, step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if metrics:
            self.record.add(("metrics", step, dict(metrics)))
        super().log_metrics(metrics, step)
        if len(self.record.calls) > FLUSH_AFTER and self.record.flushed_at is None:
            self.flush()
            self.record.flushed_at = step

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.record.add(("epoch", summary.step, asdict(summary)))
        super().on_epoch_end(summary)
        self.flush()
        self.record.flushed_at = summary.step
