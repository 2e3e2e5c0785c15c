"""`make promise`: prints tables of how far other numbers of ranks, launchers, stops and strategies are from one rank.

Each line shows the largest relative difference of any logged loss (in float64, as the snapshots keep them) and of any
weight, relative to the largest weight of its tensor. tests/drills/test_promise.py holds every line to its limit.
`make promise ARGS=systems` prints the second table alone: the systems of the tutorials.
"""

import sys
import tempfile
from pathlib import Path

from support.promise import LIMITS, systems, table


def main():
    with tempfile.TemporaryDirectory() as folder:
        if "systems" not in sys.argv:
            print("| against one rank | precision | losses differ by | weights differ by | at most |")
            print("|---|---|---|---|---|")
            for what, precision, losses, weights in table(Path(folder)):
                print(f"| {what} | {precision} | {losses:.1e} | {weights:.1e} | {LIMITS[precision]:.0e} |", flush=True)
        print("\n| system | ranks | command | weights differ from one process by |\n|---|---|---|---|")
        for name, ranks, command, weights in systems(Path(folder)):
            print(f"| {name} | {ranks} | `{command}` | {weights:.1e} |", flush=True)


if __name__ == "__main__":
    main()
