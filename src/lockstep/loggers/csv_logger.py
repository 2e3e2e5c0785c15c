"""Numbers as a table: metrics.csv in the run folder, with the columns step, tag and value."""

import csv
from pathlib import Path

from lockstep.files import write_whole
from lockstep.loggers.base import Logger, RunInfo


class CSVLogger(Logger):
    """Appends one row for each number."""

    def __init__(self, run_dir: str) -> None:
        self.path = Path(run_dir) / "metrics.csv"

    def start(self, info: RunInfo) -> None:
        step = info.run.progress.step
        kept = [line for line in lines_of(self.path) if int(line.partition(",")[0]) <= step] if step else []
        write_whole(self.path, "\n".join(["step,tag,value", *kept, ""]), sync=False)

    def log(self, metrics: dict[str, float], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows((step, tag, float(value)) for tag, value in metrics.items())


def lines_of(path: Path) -> list[str]:
    """Those of a file, without its header and what a kill has cut off."""
    return path.read_text(encoding="utf-8").split("\n")[1:-1] if path.exists() else []


def read_rows(path: Path) -> list[tuple[int, str, float]]:
    return [(int(step), tag, float(value)) for step, tag, value in csv.reader(lines_of(path))]
