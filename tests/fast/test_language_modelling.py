"""The mean over counted tokens, and which GPT a pipeline takes."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from lockstep.errors import ConfigError
from lockstep.tasks.tasks import CrossEntropy

TASK, IGNORED = CrossEntropy(classes_last=True), -100


def test_the_mean_is_over_the_tokens_that_count() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, IGNORED, 4], [IGNORED, IGNORED, 0]])
    sums = TASK.sums(logits, targets)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert TASK.count(targets) == sums.counts[0] == 3
    found = TASK.finish({"loss": float(sums.values[0] / sums.counts[0])})
    assert found["loss"] == pytest.approx(mean.item(), rel=1e-14)
    assert found["perplexity"] == pytest.approx(math.exp(mean.item()), rel=1e-14)
    assert TASK.sums(logits, torch.full((2, 3), IGNORED)).loss.item() == 0
    assert TASK.finish({"loss": 1e4})["perplexity"] == math.inf


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 3), (2, 3)])
def test_outputs_that_are_not_one_row_a_token_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{list(shape)} and [2, 3]") + ".*; type task="):
        TASK.sums(torch.zeros(shape), torch.zeros(2, 3, dtype=torch.int64))
