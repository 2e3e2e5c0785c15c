"""A task whose mean is over the weights of the samples."""

import torch.nn.functional as F

from lockstep.tasks.base import Task


class Weighted(Task):
    """Cross entropy. Targets (N, 2) are class numbers and weights."""

    counts = "weights"

    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets[:, 0].long(), reduction="none") * targets[:, 1]}

    def count(self, targets):
        return targets[:, 1].sum()
