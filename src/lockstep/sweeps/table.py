"""The table of a sweep, `sweep.csv` in its folder: one row for each job. The sweep's parent process alone writes it."""

import csv
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, path_word
from lockstep.files import write_whole

TABLE = "sweep.csv"
WAITING, RUNNING, FINISHED, FAILED, STOPPED, PRUNED = "waiting", "running", "finished", "failed", "stopped", "pruned"
SUBMITTED = "submitted, and runs elsewhere"  # the cause of a running row that this command does not wait for
REFUSED = "refused: "  # the cause of a failed row begins with it if the job would fail again: its config is wrong
STATES = (WAITING, RUNNING, FINISHED, FAILED, STOPPED, PRUNED)


@dataclass
class Row:
    """One job. overrides: what it changes, as words of a shell. objective: of the last evaluation, as a run returns it.

    best, best_step: the best evaluation, and the step of it. seconds: of all its lives together. folder: inside the
    sweep's folder. cause: why it is in this state, in one line. rungs: of a search by halving: the objective at each
    rung, as epochs:objective.
    """

    number: int
    overrides: str
    folder: str
    state: str = WAITING
    objective: float | None = None
    best: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    cause: str = ""
    rungs: str = ""


COLUMNS = [field.name for field in fields(Row)]
NUMBERS: dict[str, type] = {"number": int, "objective": float, "best": float, "best_step": int, "seconds": float}


class SweepTable:
    """The rows of a sweep, in the order of their numbers. Each change is on the disk before the method returns.

    The methods that change it raise ConfigError if it cannot be written, as on a full disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[int, Row] = {row.number: row for row in read_rows(folder)}

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def add(self, rows: list[Row]) -> None:
        """Add rows with new numbers."""
        self.rows |= {row.number: row for row in rows}
        self._write()

    def update(self, number: int, **values: Any) -> Row:
        """Change columns of one row."""
        row = self.rows[number]
        for name, value in values.items():
            assert name in COLUMNS, name
            setattr(row, name, value)
        self._write()
        return row

    def read_best(self, number: int) -> dict[str, Any]:
        """The columns `best` and `best_step` of a job, from its best snapshot's companion. Empty without one."""
        companion = self.folder / self.rows[number].folder / "snapshots" / "best.json"
        with suppress(OSError, ValueError):
            position = json.loads(companion.read_text())
            return {"best": position.get("best"), "best_step": position.get("step")}
        return {}

    def _write(self) -> None:
        """The file has the old rows or the new ones, whenever this process is killed."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_cell(getattr(row, name)) for name in COLUMNS] for row in self)
        path = self.folder / TABLE
        try:
            write_whole(path, text.getvalue(), sync=True)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); free some space there, then type "
                f"-m {path_word('sweep.resume', self.folder)}"
            ) from None


def read_rows(folder: Path) -> list[Row]:
    """The rows of a sweep folder's table; none if it has no table. Raises ConfigError for a file that is no table."""
    path = folder / TABLE
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [_row(cells) for cells in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not the table of a sweep ({error}); type hydra.sweep.dir=<another folder>"
        ) from None


def _row(cells: dict[str, str]) -> Row:
    values: dict[str, Any] = {name: cells[name] for name in COLUMNS}
    for name, kind in NUMBERS.items():
        values[name] = kind(cells[name]) if cells[name] else None
    if values["state"] not in STATES:
        raise ValueError(f"state {values['state']}")
    return Row(**values)


def _cell(value: object) -> str:
    """Numbers in full, so that they are read back with the same bits."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
