"""How mode=check compares runs. See also tests/runs/test_check_commands.py and tests/drills/test_check_nets.py."""

from typing import Any

import pytest
import torch

from lockstep.modes.recorder import compare, kept


def test_rounding_is_no_difference_and_other_bits_are() -> None:
    def trace(stage: str, **values: Any) -> Any:
        return {(1, stage, name): kept(torch.as_tensor(value)) for name, value in values.items()}

    weights = trace("weights", a=torch.ones(3), mask=torch.tensor([-torch.inf, 1.0]), steps=torch.tensor(3))
    one = weights | trace("gradients", a=torch.ones(3, dtype=torch.float64), b=1e-12)
    near = weights | trace("gradients", a=torch.ones(3, dtype=torch.float64), b=-1e-12)
    assert compare(one, near, 1e-6, 5) == (None, pytest.approx(2e-9))
    assert compare(one, near, 0.0, 5)[0] == (1, "gradients", ["b"], pytest.approx(2e-9))
    moved = near | trace("weights", a=torch.tensor([1.0, 1.0, 1.01]))
    assert compare(one, moved, 1e-6, 5)[0] == (1, "weights", ["a"], pytest.approx(0.01, rel=0.5))
    grown = near | trace("weights", a=torch.ones(4), late=1.0)
    assert compare(one, grown, 1e-6, 5)[0] == (1, "weights", ["a", "late"], float("inf"))
    large, changed = torch.rand(10**5), torch.rand(1)
    bits = large.clone()
    bits[77] = torch.nextafter(bits[77], changed[0] + 2)
    first, second = trace("weights", a=large), trace("weights", a=bits)
    assert compare(first, second, 1e-6, 5)[0] is None
    assert compare(first, second, 0.0, 5)[0] is not None
