"""Nets, data sets and options that people bring: each combination gives the numbers of plain torch, or one sentence."""

import pytest
import torch

from zoo.combinations import ONCE, Zoo, covering

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]
CHOSEN = [*ONCE, *covering(1)]  # each net, data set, way and option once; `make zoo` tries each pair of them


@pytest.mark.parametrize("part", range(4))
def test_each_combination_gives_the_numbers_of_plain_torch_or_is_refused(tmp_path, part):
    torch.set_num_threads(1)
    outcomes = Zoo(tmp_path).outcomes(CHOSEN[part::4], at_once=1)
    wrong = [outcome for outcome in outcomes if outcome.result == "wrong"]
    assert not wrong, "\n".join(f"{outcome.combination}\n{outcome.why}" for outcome in wrong)
