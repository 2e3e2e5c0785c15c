"""How often successive halving finds the best setting of a grid, by `sweep.eta` and `sweep.first_rung`.

python bench/halving.py [--seeds=8] [--epochs=9] [--folder=outputs/halving]

Trains the 27 settings of an MLP on the digits to the end, once for each seed, with `logger=csv`. Then each search is
replayed on the recorded curves: a job that is promoted ends with the bits of one that never paused, so what a search
would have seen is in them. A folder that has the sweep already is read, and not trained again.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness

from lockstep.loggers.csv_logger import read_rows
from lockstep.sweeps.halving import climb, rung_epochs
from lockstep.sweeps.table import read_table

GRID = ["optimizer.lr=0.01,0.05,0.2", "trainer.batch_size=64,128,256", "model.width=32,128,512"]
SETTINGS = 27
OBJECTIVES = {"test/loss": "min", "test/accuracy": "max"}
LIMIT = 0.35  # of the grid's training

Curves = Mapping[int, Sequence[float]]
"""{setting: its objective after each epoch}"""


@dataclass(frozen=True)
class Search:
    """What one search has found. place: of its best among all, 1 is the best. regret: how much worse that is."""

    share: float
    place: int
    regret: float


def train(folder: Path, seeds: int, epochs: int) -> None:
    """The whole grid for each seed, two jobs at once, each on one core."""
    fixed = [
        *harness.WHOLE,
        "model=mlp",
        f"trainer.epochs={epochs}",
        f"snapshot.every={epochs}epochs",
        "logger=[csv]",
    ]
    words = [*fixed, f"seed={','.join(map(str, range(seeds)))}", *GRID, "sweep.slots=auto", f"hydra.sweep.dir={folder}"]
    subprocess.run([sys.executable, harness.ROOT / "src" / "train.py", "-m", *words], check=True)


def read_curves(folder: Path, objective: str) -> list[Curves]:
    """For each seed the curves of all settings; seeds whose grid is not complete are left out."""
    grids: list[dict[int, list[float]]] = []
    for row in read_table(folder):  # the seed varies slowest
        if row.number % SETTINGS == 0:
            grids.append({})
        if row.state == "finished":
            values = [value for _, tag, value in read_rows(folder / row.folder / "metrics.csv") if tag == objective]
            grids[-1][row.number % SETTINGS] = values
    return [grid for grid in grids if len(grid) == SETTINGS]


def replay(curves: Curves, eta: int, first: int, mode: str) -> Search:
    """The search that `sweep.search=halving` makes on jobs with these curves."""
    epochs = len(curves[0])
    rungs = rung_epochs(first, eta, epochs)
    results: dict[int, dict[int, float]] = {}
    while ready := climb(list(curves), results, set(), rungs, eta, mode).to_run:
        for job, rung in ready:
            results.setdefault(job, {})[rung] = curves[job][rung - 1]
    sign = -1 if mode == "max" else 1
    order = sorted(curves, key=lambda job: (sign * curves[job][-1], job))
    found = next(job for job in order if epochs in results[job])
    trained = sum(max(values) for values in results.values())
    regret = abs(curves[found][-1] - curves[order[0]][-1])
    place = 1 + sum(sign * curves[job][-1] < sign * curves[found][-1] for job in curves)
    return Search(trained / (epochs * len(curves)), place, regret)


def noise(grids: Sequence[Curves]) -> float:
    """The standard deviation of a setting's last objective over the seeds: the median of the settings."""
    return statistics.median(statistics.stdev(grid[job][-1] for grid in grids) for job in grids[0])


def report(folder: Path, objective: str) -> str:
    grids, mode = read_curves(folder, objective), OBJECTIVES[objective]
    spread = noise(grids)
    rows = []
    for eta, first in ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (3, 3)):
        searches = [replay(grid, eta, first, mode) for grid in grids]
        share = searches[0].share
        best = sum(search.place == 1 for search in searches)
        near = sum(search.regret <= spread for search in searches)
        regrets = [search.regret for search in searches]
        places = " ".join(str(search.place) for search in searches)
        row = [eta, first, f"{share:.2f}", "yes" if share <= LIMIT else "no", best, near, places]
        rows.append([*row, f"{statistics.mean(regrets):.4f}", f"{max(regrets):.4f}"])
    head = ["eta", "first rung", "share", f"<= {LIMIT}", f"best of {len(grids)}", "within the noise", "places"]
    text = harness.table([*head, "mean regret", "worst"], rows)
    return f"{objective}, {len(grids)} seeds, noise {spread:.4f}\n\n{text}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=8)
    arguments.add_argument("--epochs", type=int, default=9)
    arguments.add_argument("--folder", type=Path, default=harness.ROOT / "outputs" / "halving")
    asked = arguments.parse_args()
    if not (asked.folder / "sweep.csv").exists():
        train(asked.folder, asked.seeds, asked.epochs)
    for objective in OBJECTIVES:
        print(report(asked.folder, objective), end="\n\n")


if __name__ == "__main__":
    main()
