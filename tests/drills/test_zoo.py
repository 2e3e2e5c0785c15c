"""Nets, data sets and options that people bring: each combination gives the numbers of plain torch, or one sentence."""

from functools import cache
from pathlib import Path

import pytest
import torch

from zoo.combinations import AXES, ONCE, Combination, Zoo, drawn

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]


@cache
def chosen() -> list[Combination]:
    """Few combinations, in which each net, data set, way and option is at least once: `make zoo` tries each pair of
    them. The next one has the most values that are missing."""
    missing = {(axis, value) for axis, values in AXES.items() for value in values}
    found, pool = [*ONCE], [{*zip(AXES, one, strict=True)} for one in drawn(4000, seed=0)]
    while missing:
        best = max(pool, key=lambda values: len(values & missing))
        missing -= best
        found.append(Combination(**dict(best)))
    return found


@pytest.mark.parametrize("part", range(4))
def test_each_combination_gives_the_numbers_of_plain_torch_or_is_refused(tmp_path: Path, part: int) -> None:
    torch.set_num_threads(1)
    outcomes = Zoo(tmp_path).outcomes(chosen()[part::4], at_once=1)
    wrong = [outcome for outcome in outcomes if outcome.result == "wrong"]
    assert not wrong, "\n".join(f"{outcome.combination}\n{outcome.why}" for outcome in wrong)
