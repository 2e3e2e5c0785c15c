"""Classification: cross entropy and accuracy."""

import torch.nn.functional as F
from torch import Tensor

from lockstep.tasks.base import Task, at_least_float32


class Classification(Task):
    """Cross entropy over logits (N, classes) and class numbers (N,), and the share of correct predictions."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(at_least_float32(outputs), targets, reduction="sum")
        return loss, {"loss": loss, "accuracy": (outputs.argmax(dim=1) == targets).sum()}
