"""Each row of CONTRIBUTING's table "Delete this, lose that": without these files the rest imports and trains."""

import json
import re
import sys

import pytest

from support.commands import ROOT

ROWS = {
    losing: re.findall("`([^`]+)`", files)
    for files, losing in re.findall(
        r"^\| (`(?:src|conf)/.*?) \| (.*?) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
}


@pytest.mark.parametrize("turn", range(4))
def test_the_rest_imports_and_trains(start, turn):
    rows = dict(list(ROWS.items())[turn::4])
    assert len(rows) >= 5
    run = start(sys.executable, ROOT / "tests/support/deleted.py", json.dumps(rows)).finish()
    assert json.loads(run.output.splitlines()[-1]) == {}
