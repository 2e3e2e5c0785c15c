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
        step, lines = info.run.progress.step, list[str]()
        if step and self.path.exists():  # without the header, and what a kill has cut off
            lines = self.path.read_text(encoding="utf-8").split("\n")[1:-1]
        kept = [line for line in lines if int(line.partition(",")[0]) <= step]
        write_whole(self.path, "\n".join(["step,tag,value", *kept, ""]), sync=False)

    def log(self, metrics: dict[str, float], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows((step, tag, float(value)) for tag, value in metrics.items())
