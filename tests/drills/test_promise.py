"""The table of `make promise`, which measures more lines of it, and longer runs, line by line.

runs/test_same_numbers.py has fewer ranks, and runs/test_starters.py the other launchers.
"""

import shutil

import pytest

from support.promise import LIMITS, STARTERS, table

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]


def test_every_line_of_the_table_keeps_its_limit(tmp_path):
    launchers = ("torch.distributed.launch", "mpirun")
    starters = {name: STARTERS[name] for name in launchers if shutil.which(STARTERS[name][0])}
    for what, precision, losses, weights in table(tmp_path, (8,), (1,), starters, epochs=1):
        print(f"{what} ({precision}): losses {losses:.1e}, weights {weights:.1e}")
        assert max(losses, weights) <= LIMITS[precision], what
