"""The table of a sweep, as a test reads it."""

import csv
from pathlib import Path


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of `sweep.csv` in a sweep's folder."""
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(folder: Path, name: str) -> list[str]:
    """One column, in the order of the jobs' numbers."""
    return [row[name] for row in rows_of(folder)]


def states(folder: Path) -> list[str]:
    return column(folder, "state")
