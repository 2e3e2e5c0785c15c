"""The promise's table, line by line."""

import shutil

import pytest

import promise


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_every_line_of_the_table_keeps_its_limit(tmp_path):
    starters = {name: command for name, command in promise.STARTERS.items() if shutil.which(command[0])}
    for what, precision, losses, weights in promise.table(tmp_path, starters=starters):
        print(f"{what} ({precision}): losses {losses:.1e}, weights {weights:.1e}")
        assert max(losses, weights) <= promise.LIMITS[precision], what
