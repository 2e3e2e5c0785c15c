"""`make promise`: prints a table of how far other numbers of ranks, other launchers and stops are from one rank.

Each line shows the largest relative difference of any logged loss (in float64, as the snapshots keep them) and of any
weight, relative to the largest weight of its tensor. tests/drills/test_promise.py holds every line to its limit.
"""

import tempfile
from pathlib import Path

from support.promise import LIMITS, table


def main() -> None:
    print("| against one rank | precision | losses differ by | weights differ by | at most |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for what, precision, losses, weights in table(Path(folder)):
            print(f"| {what} | {precision} | {losses:.1e} | {weights:.1e} | {LIMITS[precision]:.0e} |", flush=True)


if __name__ == "__main__":
    main()
