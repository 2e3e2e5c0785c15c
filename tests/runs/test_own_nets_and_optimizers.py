"""Nets and optimizers as people bring them: the numbers of plain torch, or one sentence with what to type."""

from pathlib import Path

import pytest
import torch

from support.small_commands import answer_of
from zoo.combinations import Combination, Zoo

EQUAL = [
    # What a net changes in an evaluation is put back, buffers and weights.
    Combination("AlwaysCounting", "tensors", "one", after="resume"),
    Combination("AlwaysCounting", "tensors", "two", equal="small evaluations"),
    Combination("EmbeddedMaxNorm", "tensors", "one"),
    # Weights that some ranks do not need in a step.
    Combination("Experts", "tensors", "two, unused", "accumulation", after="resume"),
    # What an optimizer keeps is saved.
    *(Combination("batch_norm_1d", "tensors", "two", name, after="resume") for name in ("Lookahead", "Counting")),
    Combination("batch_norm_1d", "tensors", "two", "OddState", after="resume"),
]
UNUSED = [  # in the first step; what a later one leaves out is a hang, whose cause is told
    Combination("Experts", "tensors", way, equal="saved")
    for way in ("two, all_reduce", "two, ring", "three, parameter_server", "fsdp, two")
]
UNUSED += [Combination("Unused", "tensors", way) for way in ("two, ring", "fsdp, two", "virtual_ranks, one")]
UNUSED += [Combination("LateExperts", "tensors", "virtual_ranks")]


@pytest.mark.parametrize(("chosen", "result"), [(EQUAL, "equal"), (UNUSED, "refused")])
def test_there_are_the_numbers_of_plain_torch_or_what_to_type(
    tmp_path: Path, chosen: list[Combination], result: str
) -> None:
    torch.set_num_threads(1)
    found = list(Zoo(tmp_path).outcomes(chosen, at_once=1))
    wrong = [outcome for outcome in found if outcome.result != result]
    assert not wrong, "\n".join(f"{outcome.combination} | {outcome.result}\n{outcome.why}" for outcome in wrong)
    assert result == "equal" or all("find_unused_parameters=true" in outcome.why for outcome in found)


def test_state_that_no_snapshot_has_is_refused(tmp_path: Path) -> None:
    words = ["model=linear", "optimizer=sgd", "optimizer.lr=0.05", "optimizer._target_=zoo.optimizers.Recent"]
    answer = answer_of([*words, "backend=gloo", "trainer.max_steps=1"], tmp_path)
    assert answer.code == 2, answer
    assert "has collections.deque; keep tensors, numbers" in answer.sentences[0]
