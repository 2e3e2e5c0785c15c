"""Nets, data sets and options that people bring: each combination gives the numbers of plain torch, or one sentence."""

from pathlib import Path

import pytest
import torch

from zoo.combinations import ONCE, Zoo, pairwise

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

SHARE = 10  # of the combinations: `make zoo` runs all of them, and others that are drawn


@pytest.mark.parametrize("part", range(4))
def test_each_combination_gives_the_numbers_of_plain_torch_or_is_refused(tmp_path: Path, part: int) -> None:
    torch.set_num_threads(1)
    chosen = [*ONCE, *pairwise()[::SHARE]][part::4]
    wrong = [outcome for outcome in Zoo(tmp_path).outcomes(chosen, at_once=1) if outcome.result == "wrong"]
    assert not wrong, "\n".join(f"{outcome.combination}\n{outcome.why}" for outcome in wrong)
