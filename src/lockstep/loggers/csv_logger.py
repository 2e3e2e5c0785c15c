"""Numbers as a table: metrics.csv in the run folder, with the columns step, tag and value."""

import csv
import io
import os
from contextlib import suppress
from pathlib import Path

from lockstep.files import write_whole
from lockstep.loggers.base import EpochSummary, Logger, RunInfo

HEADER = "step,tag,value\n"
BUFFERED_ROWS = 100

Row = tuple[int, str, float]


class CSVLogger(Logger):
    """Appends one row for each number. Rows that could not be written, on a full disk, are written later.

    run_dir: folder of this run.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "metrics.csv"
        self._rows: list[Row] = []  # not in the file yet
        self._start_step: int | None = None  # the file must still be started for a run from this step

    def on_fit_start(self, run: RunInfo) -> None:
        self._start_step = run.start_step
        self.flush()

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._rows += [(step, tag, float(value)) for tag, value in metrics.items()]
        if len(self._rows) >= BUFFERED_ROWS:
            self.flush()

    def on_epoch_end(self, summary: EpochSummary) -> None:
        self.log_metrics(summary.tagged_metrics(), summary.step)
        self.flush()

    def on_test(self, metrics: dict[str, float], step: int, is_logged: bool) -> None:
        if not is_logged:
            self.log_metrics({f"test/{name}": value for name, value in metrics.items()}, step)

    def flush(self) -> None:
        if self._start_step is not None:
            self._start_file(self._start_step)
            self._start_step = None
        elif self._rows and not self.path.exists():  # the run folder was deleted or moved away
            self._start_file(start_step=0)
        if self._rows:
            append(self.path, to_text(self._rows).encode())
            self._rows = []

    def close(self) -> None:
        self.flush()

    def _start_file(self, start_step: int) -> None:
        """Replace the file by one with its rows up to `start_step`; none for a fresh run."""
        kept = [row for row in read_rows(self.path) if row[0] <= start_step] if start_step > 0 else []
        write_whole(self.path, HEADER + to_text(kept), sync=False)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file. Without the last line if a kill cut it off, and without lines that are not rows."""
    if not path.exists():
        return []
    complete_lines, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    rows: list[Row] = []
    for line in complete_lines.split("\n"):
        with suppress(ValueError, csv.Error):
            step, tag, value = next(csv.reader([line]), [])
            rows.append((int(step), tag, float(value)))
    return rows


def to_text(rows: list[Row]) -> str:
    """CSV lines. Floats keep all their digits."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def append(path: Path, content: bytes) -> None:
    """Append all of `content`, or nothing if it raises OSError."""
    size = path.stat().st_size
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError:
        os.truncate(path, size)
        raise
