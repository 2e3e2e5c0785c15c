"""Numbers as a table: metrics.csv in the run folder, with the columns step, tag and value."""

import csv
import io
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.files import write_whole
from lockstep.loggers.base import Logger, RunInfo

HEADER = "step,tag,value\n"
Row = tuple[int, str, float]


class CSVLogger(Logger):
    """Appends one row for each number. run_dir: folder of this run."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "metrics.csv"

    def start(self, info: RunInfo) -> None:
        step = info.run.progress.step
        rows = [row for row in read_rows(self.path) if row[0] <= step] if step else []
        write_whole(self.path, HEADER + to_text(rows), sync=False)

    def log(self, metrics: dict[str, float], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            header = "" if file.tell() else HEADER  # the folder was deleted, and made again
            file.write(header + to_text((step, tag, float(value)) for tag, value in metrics.items()))


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, without lines that are no rows, such as the last one if a kill cut it off."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []:
        with suppress(ValueError, csv.Error):
            step, tag, value = next(csv.reader([line]), [])
            rows.append((int(step), tag, float(value)))
    return rows


def to_text(rows: Iterable[Row]) -> str:
    """CSV lines. Floats keep all their digits."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
