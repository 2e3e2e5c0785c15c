"""Classification: cross entropy and accuracy."""

import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.tasks.base import Report, Share, Task, at_least_float32
from lockstep.tasks.class_report import ClassReport


class Classification(Task):
    """Cross entropy over logits (N, classes) and class numbers (N,), and the share of correct predictions."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if targets.is_floating_point() or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
            raise ConfigError(
                f"{type(self).__name__} wants outputs (N, classes) and whole numbers (N,), and these are "
                f"{list(outputs.shape)} and {list(targets.shape)}, {targets.dtype}; "
                f"type task=regression for targets that are numbers"
            )
        loss = F.cross_entropy(at_least_float32(outputs), targets, reduction="sum")
        return loss, {"loss": loss, "accuracy": (outputs.argmax(dim=1) == targets).sum()}

    def report(self, share: Share, images: int) -> Report | None:
        return ClassReport(share, images)
