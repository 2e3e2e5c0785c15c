"""Language modelling: cross entropy per token, and perplexity."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.tasks.base import Task, at_least_float32, check_class_numbers

IGNORED = -100  # the target that torch's losses leave out
LARGEST_EXPONENT = 700.0  # math.exp of more than 709 raises OverflowError


class LanguageModelling(Task):
    """Cross entropy over logits (N, T, classes) and token numbers (N, T), and its exponential, the perplexity.

    A mean is over the tokens of the whole global batch, those with the label -100 left out.
    """

    counts = "tokens"

    def __init__(self, metrics: dict[str, str], monitor: str) -> None:
        super().__init__(metrics, monitor)
        self.sums = {"loss": 1}

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
            raise ConfigError(
                f"{type(self).__name__} takes outputs (N, tokens, classes) and token numbers (N, tokens), and these "
                f"are {list(outputs.shape)} and {list(targets.shape)}, {targets.dtype}; "
                f"type model=gpt for a model that has an output for each token"
            )
        logits = at_least_float32(outputs).flatten(0, -2)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
        return loss, {"loss": loss}

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        check_class_numbers(targets, numbers, classes, IGNORED)

    def count(self, targets: Tensor) -> Tensor:
        """The tokens that are not ignored, 0-d."""
        return (targets != IGNORED).sum()

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """The most probable next token at each place."""
        return {"prediction": outputs.argmax(-1)}

    def finish(self, totals: dict[str, Tensor], count: float) -> dict[str, float]:
        loss = totals["loss"].item() / max(count, 1)
        metrics = {"loss": loss, "perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else math.inf}
        return {name: value for name, value in metrics.items() if name in self.metrics}
