"""TensorBoard events in the run folder. A step on the x-axis is the number of optimizer steps done."""

import logging
import shlex
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from lockstep.loggers.base import EpochSummary, Logger, RunInfo
from lockstep.loggers.event_times import last_wall_time
from lockstep.loggers.run_header import finished, write_header
from lockstep.tasks.base import ReadSample, Report

log = logging.getLogger(__name__)

REOPEN_SECONDS = 10.0  # from a failed write to the next event file
PROBE_BYTES = 4096
DRAWING_SHARE = 0.01  # of the time: images of an evaluation are drawn after training for 100 times as long
FIRST_DRAWING = 0.1  # seconds


class TensorBoardLogger(Logger):
    """Writes event files to `run_dir`.

    Events of a resumed run have the times that they would have if the run had not paused: TensorBoard's relative x-axis
    shows the time that was trained.

    A SummaryWriter that failed once, on a full disk, fails for ever. It is replaced by a new one REOPEN_SECONDS later;
    what is logged in between is lost.
    """

    def __init__(self, run_dir: str | Path, images: int, histograms: bool, graph: bool) -> None:
        """images: test samples in the grid of an evaluation; 0: no images of an evaluation."""
        self.run_dir, self.images, self.histograms, self.graph = Path(run_dir), images, histograms, graph
        self._draw: Callable[[], None] = lambda: None  # the newest report, if it is not drawn yet
        self._drawn_at, self._drawing_seconds = time.monotonic(), FIRST_DRAWING
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        self._reopen_at = 0.0  # time.monotonic()
        self._last_step = 0
        self._pause = 0.0  # seconds in which the run was not running

    def on_fit_start(self, run: RunInfo) -> None:
        """TensorBoard is told to drop the points after the snapshot: one curve, no step twice."""
        if any(self.run_dir.glob("events.out.tfevents.*")):  # perhaps of a run that ended before its first snapshot
            last = last_wall_time(self.run_dir, run.start_step)
            self._pause = 0.0 if last is None else max(0.0, time.time() - last)
            self._purge_step = run.start_step + 1
            self._write(lambda writer: None)  # creates the file, which contains the purge step
        write_header(run)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """All tags share one event. An event for each tag takes several times as long."""
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._add_summary(Summary(value=values), step)

    def log_text(self, tag: str, text: str, step: int) -> None:
        self._write(lambda writer: writer.add_text(tag, text, step, self._now()))

    def log_image(self, tag: str, image: Tensor, step: int) -> None:
        self._write(lambda writer: writer.add_image(tag, image, step, self._now()))

    def log_report(self, report: Report, sample: ReadSample, classes: Sequence[str], step: int) -> None:
        """Draw it, now or at the end of the training: most evaluations of a very short epoch are not drawn."""
        if self.images == 0:
            return

        def draw() -> None:
            self._draw, start = lambda: None, time.monotonic()
            for tag, image in report.figures(sample, classes).items():
                self.log_image(tag, image, step)
            self._drawn_at = time.monotonic()
            self._drawing_seconds = self._drawn_at - start

        self._draw = draw
        if time.monotonic() - self._drawn_at >= self._drawing_seconds / DRAWING_SHARE:
            draw()

    def log_histogram(self, tag: str, values: Tensor, step: int) -> None:
        if self.histograms:
            dense = values.to_dense() if values.is_sparse else values
            finite = dense[dense.isfinite()].float()
            self._write(lambda writer: writer.add_histogram(tag, finite, step, walltime=self._now()))

    def log_graph(self, model: nn.Module, inputs: Tensor) -> None:
        """A model that torch cannot trace costs a warning."""
        if not self.graph:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # torch.jit is deprecated, and add_graph has no other way
                self._write(lambda writer: writer.add_graph(model, inputs))
        except (RuntimeError, TypeError, ValueError) as error:
            log.warning("no graph is written: torch cannot trace this model (%s)", str(error).splitlines()[0])

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.log_metrics(summary.tagged_metrics(), summary.step)
        self.flush()

    def flush(self) -> None:
        if self._writer is not None:
            self._write(lambda writer: writer.flush())

    def on_fit_end(self, run_dir: Path, metrics: dict[str, float]) -> None:
        self._draw()
        self._add_summary(finished(), self._last_step)
        log.info("curves:     tensorboard --logdir %s", shlex.quote(str(run_dir)))

    def close(self) -> None:
        if self._writer is not None:
            self._write(lambda writer: writer.close())
            self._writer = None

    def _add_summary(self, summary: Summary, step: int) -> None:
        self._last_step = step
        self._write(lambda writer: writer.file_writer.add_summary(summary, step, self._now()))  # type: ignore[attr-defined]

    def _now(self) -> float:
        return time.time() - self._pause

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
