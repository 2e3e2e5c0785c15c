"""Optimizers as people bring them: each gives the numbers of plain torch, also after a resume, or is refused."""

from pathlib import Path

import pytest
import torch

from support.small_commands import answer_of
from zoo.combinations import Combination, Zoo

CHOSEN = [
    Combination("batch_norm_1d", "tensors", "two", name, after="resume")
    for name in ("Lookahead", "Counting", "OddState")
]
REFUSED = [
    (
        ["optimizer._target_=zoo.optimizers.Recent", "trainer.max_steps=1"],
        "has collections.deque; keep tensors, numbers",
    )
]


def test_what_an_optimizer_keeps_is_saved(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = Zoo(tmp_path).outcomes(CHOSEN, at_once=1)
    wrong = [f"{outcome.combination}\n{outcome.why}" for outcome in found if outcome.result != "equal"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_state_that_no_snapshot_has_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    answer = answer_of(["model=linear", "optimizer=sgd", "optimizer.lr=0.05", "backend=gloo", *words], tmp_path)
    assert answer.code == 2, answer
    assert said in answer.sentences[0]
