"""mode=check names each fault of `zoo.checked_nets` where it is, and doubts no right net."""

from pathlib import Path

import pytest

from support.checked import misjudged
from zoo.checked_nets import RIGHT, WRONG

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]


@pytest.mark.parametrize("part", range(4))
def test_each_fault_is_named_and_no_right_net_is_doubted(tmp_path: Path, part: int) -> None:
    assert misjudged([*WRONG, *RIGHT][part::4], tmp_path) == []
