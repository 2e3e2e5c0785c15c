"""Multi-label classification: each sample has any number of labels."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lockstep.config.schema import Count
from lockstep.errors import ConfigError
from lockstep.tasks.base import COUNTS, Task, at_least_float32, class_scores, require_known

MEANS = ("loss", "accuracy", "all_right")


class MultiLabel(Task):
    """Binary cross entropy over logits (N, labels) and targets (N, labels) of 0 and 1, averaged over a sample's labels.

    accuracy: the share of right labels. all_right: of samples with all labels right. f1, precision, recall and iou: the
    mean over the labels, or f1_<label> of one. A label is predicted where its logit is above 0.

    classes: labels that are counted; null: as many as the data has.
    """

    def __init__(self, metrics: dict[str, str], monitor: str, classes: Count | None) -> None:
        super().__init__(metrics, monitor)
        require_known(metrics, MEANS, classes)
        self.sums = dict.fromkeys(MEANS, 1) | dict.fromkeys(COUNTS, classes or 0)
        self.classes = classes or 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if outputs.shape != targets.shape or outputs.shape[1:] != (self.classes,):
            raise ConfigError(
                f"{type(self).__name__} takes outputs and targets (N, {self.classes}), and these are "
                f"{list(outputs.shape)} and {list(targets.shape)}; type dataset.classes=<labels of a sample>, "
                f"or task=classification for targets that are class numbers"
            )
        logits = at_least_float32(outputs)
        loss = F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1).sum()
        predicted, true = outputs > 0, targets > 0
        right = predicted == true
        counts = {"right": predicted & true, "predicted": predicted, "true": true}
        sums = {"loss": loss, "accuracy": right.to(logits).mean(1).sum(), "all_right": right.all(1).sum()}
        return loss, sums | {name: labels.sum(0) for name, labels in counts.items()}

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        super().check_targets(targets, numbers, classes)
        if isinstance(targets, Tensor) and targets.dim() > 1:
            wrong = ~((targets >= 0) & (targets <= 1)).flatten(1).all(1)
            for row in wrong.nonzero().flatten().tolist()[:1]:
                what = f"sample {numbers[row]} has the target {targets[row].tolist()}, and its labels are 0 or 1"
                raise ConfigError(f"{what}; type task=regression, or its target as 0s and 1s")

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": (outputs > 0).long(), "probability": at_least_float32(outputs).sigmoid()}

    def finish(self, totals: dict[str, Tensor], samples: float) -> dict[str, float]:
        metrics = super().finish({name: totals[name] for name in MEANS}, samples) | class_scores(totals)
        return {name: metrics[name] for name in self.metrics}
