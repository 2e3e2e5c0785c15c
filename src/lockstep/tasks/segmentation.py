"""Semantic segmentation: a class for each pixel."""

from typing import Any

import torch
from torch import Tensor

from lockstep.config.schema import ClassWeights, Count
from lockstep.errors import ConfigError
from lockstep.tasks.base import (
    COUNTS,
    CrossEntropy,
    Task,
    at_least_float32,
    check_class_numbers,
    class_counts,
    class_scores,
    require_known,
)


class Segmentation(Task):
    """Cross entropy over logits (N, classes, H, W) and class numbers (N, H, W), averaged over each image's own pixels.

    accuracy is the share of right pixels. iou (the mean over classes of intersection over union), f1, precision and
    recall come from counts over all pixels of all ranks; iou_<class> is the one of a class.

    classes: classes that are counted; null: as many as the data has.
    ignored_label: pixels with this class number count nowhere.
    class_weights: weight of each class in the loss, in the mean over an image's pixels, too; balanced: as
        classification has it, over all pixels.
    """

    def __init__(
        self,
        metrics: dict[str, str],
        monitor: str,
        classes: Count | None,
        ignored_label: int,
        class_weights: ClassWeights,
    ) -> None:
        super().__init__(metrics, monitor)
        self.cross_entropy = CrossEntropy(class_weights, ignore_index=ignored_label, reduction="none")
        require_known(metrics, ("loss", "accuracy"), classes)
        self.sums = {"loss": 1} | dict.fromkeys(COUNTS, classes or 0)
        self.classes, self.ignored_label = classes or 0, ignored_label

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        wanted = (targets.shape[0], self.classes, *targets.shape[1:])
        if outputs.dim() < 3 or outputs.shape != wanted or targets.is_floating_point():
            raise ConfigError(
                f"{type(self).__name__} takes outputs (N, {self.classes}, H, W) and whole numbers (N, H, W), and these "
                f"are {list(outputs.shape)} and {list(targets.shape)}, {targets.dtype}; "
                f"type model._target_=<a net with an output for each class and pixel>, or task=classification"
            )
        numbers, logits = targets.long(), at_least_float32(outputs)
        if logits.is_cuda and torch.are_deterministic_algorithms_enabled():  # CUDA has such a kernel for rows only
            losses = self.cross_entropy(logits.movedim(1, -1).flatten(0, -2), numbers.flatten()).view_as(numbers)
        else:
            losses = self.cross_entropy(logits, numbers)
        losses = losses.flatten(1).sum(1)
        is_ignored, weight = numbers == self.ignored_label, self.cross_entropy.weight
        counted = (~is_ignored).to(losses.dtype)
        if weight is not None:
            counted *= weight.to(losses.dtype)[numbers.masked_fill(is_ignored, 0)]
        counted = counted.flatten(1).sum(1)
        loss = (losses / counted.where(counted > 0, 1)).sum()
        labels = numbers.masked_fill(is_ignored, -1)
        return loss, {"loss": loss} | class_counts(outputs.argmax(dim=1), labels, self.classes)

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        super().check_targets(targets, numbers, classes)
        check_class_numbers(targets, numbers, classes, self.ignored_label)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": outputs.argmax(1)}

    def finish(self, totals: dict[str, Tensor], samples: float) -> dict[str, float]:
        metrics = super().finish({"loss": totals["loss"]}, samples) | class_scores(totals)
        metrics["accuracy"] = (totals["right"].sum() / totals["true"].sum().clamp(min=1)).item()
        return {name: metrics[name] for name in self.metrics}
