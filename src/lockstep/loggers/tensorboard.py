"""TensorBoard events in the run folder. The x-axis is always the number of optimizer steps done."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from lockstep.loggers.base import EpochSummary, Logger, RunInfo

log = logging.getLogger(__name__)

REOPEN_SECONDS = 10.0  # from a failed write to the next event file
PROBE_BYTES = 4096


class TensorBoardLogger(Logger):
    """Writes event files to `run_dir`.

    A SummaryWriter that failed once, on a full disk, fails for ever. It is replaced by a new one REOPEN_SECONDS later;
    what is logged in between is lost.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        self._reopen_at = 0.0  # time.monotonic()

    def on_fit_start(self, run: RunInfo) -> None:
        """On resume, TensorBoard is told to drop the points after the snapshot: one curve, no step twice."""
        if run.start_step > 0:
            self._purge_step = run.start_step + 1
            self._write(lambda writer: None)  # creates the file, which contains the purge step
        else:
            self.log_text("config", f"```yaml\n{run.config_yaml}```", 0)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """All tags share one event. An event for each tag takes several times as long."""
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        summary = Summary(value=values)
        self._write(lambda writer: writer.file_writer.add_summary(summary, step))  # type: ignore[attr-defined]

    def log_text(self, tag: str, text: str, step: int) -> None:
        self._write(lambda writer: writer.add_text(tag, text, step))

    def log_image(self, tag: str, image: Tensor, step: int) -> None:
        self._write(lambda writer: writer.add_image(tag, image, step))

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.log_metrics(summary.tagged_metrics(), summary.step)
        self.flush()

    def flush(self) -> None:
        if self._writer is not None:
            self._write(lambda writer: writer.flush())

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        log.info("curves:     tensorboard --logdir %s", run_dir)

    def close(self) -> None:
        if self._writer is not None:
            self._write(lambda writer: writer.close())
            self._writer = None

    def _write(self, write: Callable[[SummaryWriter], object]) -> None:
        if self._writer is None and time.monotonic() < self._reopen_at:
            return
        try:
            if self._writer is None:
                self._check_space()
                self._writer = SummaryWriter(self.run_dir, purge_step=self._purge_step)
            write(self._writer)
            self._purge_step = None  # not before: a full disk would lose the purge
        except OSError:
            self._discard_writer()
            self._reopen_at = time.monotonic() + REOPEN_SECONDS
            raise

    def _check_space(self) -> None:
        """Raise OSError if the disk is still full. A SummaryWriter would leave an empty file and print a traceback."""
        if self._reopen_at > 0:
            probe = self.run_dir / "tensorboard.tmp"
            try:
                probe.write_bytes(bytes(PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)

    def _discard_writer(self) -> None:
        """Stop the writer's thread. SummaryWriter.close() would raise before it comes to that."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.file_writer.event_writer.close()  # type: ignore[attr-defined]
            self._writer = None
