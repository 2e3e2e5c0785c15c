"""Nets, data sets and options that people bring: each combination gives the numbers of plain torch, or one sentence."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from zoo.combinations import AXES, ONCE, Combination, Zoo, pairwise

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

TIMES = 1  # that each net, data set, way and option is tried at least: `make zoo` tries each pair of them, and others


def chosen() -> list[Combination]:
    """Those of the pairwise combinations that have a value which those before do not have often enough."""
    missing, found = Counter({(axis, value): TIMES for axis, values in AXES.items() for value in values}), [*ONCE]
    for combination in pairwise():
        values = [*zip(AXES, combination, strict=True)]
        if any(missing[value] > 0 for value in values):
            missing.subtract(values)
            found.append(combination)
    return found


@pytest.mark.parametrize("part", range(4))
def test_each_combination_gives_the_numbers_of_plain_torch_or_is_refused(tmp_path: Path, part: int) -> None:
    torch.set_num_threads(1)
    outcomes = Zoo(tmp_path).outcomes(chosen()[part::4], at_once=1)
    wrong = [outcome for outcome in outcomes if outcome.result == "wrong"]
    assert not wrong, "\n".join(f"{outcome.combination}\n{outcome.why}" for outcome in wrong)
