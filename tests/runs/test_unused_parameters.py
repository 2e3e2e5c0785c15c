"""Weights that some ranks do not need in a step, such as those of an expert: right numbers, or one sentence."""

from pathlib import Path

import pytest
import torch

from zoo.combinations import Combination, Zoo

REFUSED = [  # in the first step; what a later one leaves out is a hang, whose cause is told
    Combination("Experts", "tensors", way, equal="saved")
    for way in ("two, all_reduce", "two, ring", "three, parameter_server", "fsdp, two")
]
REFUSED += [Combination("Unused", "tensors", way) for way in ("two, ring", "fsdp, two", "virtual_ranks, one")]
REFUSED += [Combination("LateExperts", "tensors", "virtual_ranks")]
EQUAL = [Combination("Experts", "tensors", "two, unused", "accumulation", after="resume")]


@pytest.mark.parametrize(("chosen", "result"), [(REFUSED, "refused"), (EQUAL, "equal")])
def test_each_strategy_adds_up_what_there_is_or_says_what_to_type(
    tmp_path: Path, chosen: list[Combination], result: str
) -> None:
    torch.set_num_threads(1)
    found = list(Zoo(tmp_path).outcomes(chosen, at_once=1))
    other = [outcome for outcome in found if outcome.result != result]
    assert not other, "\n".join(f"{outcome.combination} | {outcome.result}\n{outcome.why}" for outcome in other)
    assert result == "equal" or all("find_unused_parameters=true" in outcome.why for outcome in found)
