"""The table of a sweep, as a test reads it, and its settings."""

import csv
from pathlib import Path
from typing import Any

import yaml

from lockstep.sweeps.search import SweepSettings
from support.commands import ROOT


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of `sweep.csv` in a sweep's folder."""
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(folder: Path, name: str) -> list[str]:
    """One column, in the order of the jobs' numbers."""
    return [row[name] for row in rows_of(folder)]


def states(folder: Path) -> list[str]:
    return column(folder, "state")


def settings(**changes: Any) -> SweepSettings:
    """Those of conf/config.yaml, for an objective of one epoch."""
    section = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["sweep"]
    return SweepSettings(**({"objective": "test/loss", "mode": "min", "epochs": 1} | section | changes))
