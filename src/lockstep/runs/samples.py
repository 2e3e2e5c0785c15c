"""What a test says of each sample: test_samples.csv in a run folder, with number, file, target, loss and right.

file and target stand there where samples have a file and a class. mode=evaluate writes such a file, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.runs.record import read_run
from lockstep.runs.stats import Estimate, estimate, wilson

if TYPE_CHECKING:
    import pandas as pd

NAME = "test_samples.csv"
SAMPLED = {"accuracy": "right", "loss": "loss"}  # metrics that each sample has, and their columns


def read_samples(place: Path) -> "pd.DataFrame":
    """Of a run folder, or of a file. The index is the sample's number. Raises OSError."""
    import pandas as pd

    return pd.read_csv(place / NAME if place.is_dir() else place, index_col="number", dtype={"file": str})


def paired_by_sample(a: Path, b: Path, metric: str) -> tuple[Estimate, Estimate, Estimate]:
    """(of run A, of run B, of B - A) over the samples of one test set. metric: one of SAMPLED.

    It is about these two trained nets: another seed gives others. Raises ConfigError for two sets.
    """
    data = [read_run(folder)["data"].get("test_data") for folder in (a, b)]
    one, other = (read_samples(folder) for folder in (a, b))
    if data[0] != data[1] or not one.index.equals(other.index):
        raise ConfigError(f"{a} and {b} were tested on other samples; type folders with several runs a side")
    values = [side[SAMPLED[metric]].tolist() for side in (one, other)]
    return estimate(values[0]), estimate(values[1]), of_differences([y - x for x, y in zip(*values, strict=True)])


def of_differences(values: Sequence[float]) -> Estimate:
    """Their mean. Of 0, 1 and -1 Student's t is too sure where few differ: one more for each side mends it (Bonett and
    Price 2012)."""
    if not set(values) <= {-1.0, 0.0, 1.0}:
        return estimate(values)
    return replace(estimate([*values, 1.0, -1.0]), count=len(values), mean=fmean(values))


def samples_table(place: Path, worst: int, by: str | None = None) -> list[str]:
    """The lines of `runs.py samples`: the samples with the highest loss, or the means of those with one value in the
    column `by`. Raises ConfigError."""
    table = read_samples(place).reset_index()
    if by is None:
        table = table.sort_values("loss", ascending=False, kind="stable").head(worst)
    elif by not in table:
        raise ConfigError(f"--by {by}: the columns are {', '.join(table)}; type --by {table.columns[-1]}")
    else:
        named = {"samples": ("loss", "size"), "mean loss": ("loss", "mean")}
        named |= {"share right": ("right", "mean")} if "right" in table else {}
        table = table.groupby(by, dropna=False).agg(**named).reset_index()
        if "share right" in table:
            both = zip(table["share right"], table["samples"], strict=True)
            table["95 %"] = ["{:.4f} to {:.4f}".format(*wilson(*one)) for one in both]
    text: str = table.to_string(index=False, na_rep="-", float_format="{:.4f}".format)
    return text.splitlines()
