"""Regression: mean squared error."""

import torch.nn.functional as F
from torch import Tensor

from lockstep.tasks.base import Task, at_least_float32


class Regression(Task):
    """Squared error over outputs and targets (N, values), averaged over the values of a sample."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.mse_loss(at_least_float32(outputs), targets, reduction="none").flatten(1).mean(1).sum()
        return loss, {"loss": loss}
