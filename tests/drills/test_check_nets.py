"""mode=check names each fault of `zoo.checked_nets` where it is, and doubts no right net."""

import os

import pytest

from support.checked import misjudged
from support.commands import PYTHON_TRAIN
from zoo.checked_nets import RIGHT, WRONG

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]


@pytest.mark.parametrize("part", range(4))
def test_each_fault_is_named_and_no_right_net_is_doubted(tmp_path, part):
    nets = [*WRONG, *RIGHT]
    chosen = nets if os.environ.get("LOCKSTEP_NETS") == "all" else nets[::2]  # `make matrices` checks all
    assert misjudged(chosen[part::4], tmp_path) == []


def test_a_deep_net_whose_rounding_errors_grow_is_compared_in_float64(start):
    output = start(*PYTHON_TRAIN, "mode=check", "model=resnet18").finish(limit=600).output
    (numbers,) = [line for line in output.splitlines() if line.startswith("the same numbers on 2 ranks")]
    assert "  yes  " in numbers
    assert numbers.endswith("(in float64)")
