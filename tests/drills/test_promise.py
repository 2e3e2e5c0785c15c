"""The tables of `make promise`, which measures more lines of them, and longer runs, line by line.

runs/test_same_numbers.py has fewer ranks, and runs/test_starters.py the other launchers.
"""

import shutil
from itertools import islice

import pytest

from support.promise import LIMITS, STARTERS, SYSTEMS, systems, table

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]


def test_every_line_of_the_table_keeps_its_limit(tmp_path):
    launchers = ("torch.distributed.launch", "mpirun")
    starters = {name: STARTERS[name] for name in launchers if shutil.which(STARTERS[name][0])}
    for what, precision, losses, weights in table(tmp_path, (8,), (1,), starters, epochs=1):
        print(f"{what} ({precision}): losses {losses:.1e}, weights {weights:.1e}")
        assert max(losses, weights) <= LIMITS[precision], what


def test_every_system_of_the_tutorials_has_the_weights_of_one_process(tmp_path):
    for name, _, command, weights in islice(systems(tmp_path), len(SYSTEMS)):
        print(f"{name}: {command}: {weights:.1e}")
        assert weights <= 1e-9, name
