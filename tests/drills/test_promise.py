"""The table of `make promise`, which measures more lines, line by line. Here two ranks are those of the launchers."""

import shutil
from pathlib import Path

import pytest

from support.promise import LIMITS, STARTERS, table

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]


def test_every_line_of_the_table_keeps_its_limit(tmp_path: Path) -> None:
    starters = {name: command for name, command in STARTERS.items() if shutil.which(command[0])}
    for what, precision, losses, weights in table(tmp_path, (3, 8), (1,), starters):
        print(f"{what} ({precision}): losses {losses:.1e}, weights {weights:.1e}")
        assert max(losses, weights) <= LIMITS[precision], what
