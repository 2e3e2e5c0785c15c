"""`make zoo`: any two of nets, data, ranks and options meet in a combination, and others are drawn. Prints a table.

python tests/zoo_table.py [combinations that are drawn] [seed]
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from zoo.combinations import AXES, ONCE, Zoo, covering, drawn


def main():
    count, seed = (int(word) for word in (*sys.argv[1:], "0", "0")[:2])
    torch.set_num_threads(1)
    chosen, wrong = [*ONCE, *covering(2), *drawn(count, seed)], []
    results = {axis: {value: Counter() for value in values} for axis, values in AXES.items()}
    with tempfile.TemporaryDirectory() as folder:
        for outcome in Zoo(Path(folder)).outcomes(chosen, at_once=2):
            for axis, value in zip(AXES, outcome.combination, strict=True):
                results[axis].setdefault(value, Counter())[outcome.result] += 1
            if outcome.result == "wrong":
                wrong.append(outcome)
                print(f"{outcome.combination}\n{outcome.why}\n", flush=True)
    print(f"| {'what':28} | equal | ran | refused | wrong |\n|---|---|---|---|---|")
    for axis, values in results.items():
        for value, found in values.items():
            shown = " | ".join(f"{found[result]:5}" for result in ("equal", "ran", "refused", "wrong"))
            print(f"| {axis + ' ' + value:28} | {shown} |")
    print(f"{len(chosen)} combinations, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
