"""Classification: cross entropy, accuracy and top-k accuracy; or also F1, precision and recall, class by class."""

import re
from typing import Any

import torch
from torch import Tensor

from lockstep.config.schema import ClassWeights, Count, Fraction
from lockstep.data.source import count_samples
from lockstep.errors import ConfigError
from lockstep.tasks.base import (
    COUNTS,
    CrossEntropy,
    Function,
    OwnParts,
    Report,
    Share,
    Task,
    as_float64,
    at_least_float32,
    check_class_numbers,
    class_counts,
    class_scores,
    require_known,
)
from lockstep.text import show

SAMPLE_COUNT = "sample count"  # a sum beside the metrics, where the loss is divided by another number


class Classification(Task):
    """Cross entropy over logits (N, classes) and class numbers (N,), and the share of correct predictions.

    Targets may be probabilities (N, classes), as MixUp makes them; then the most probable class is the correct one. A
    metric top<k>, such as top5, is the share of samples whose class is among the k best.

    With class weights a sample counts as much as its class weighs: the loss is divided by the sum of the weights over
    the whole global batch, in an evaluation over the whole data set, as torch.nn.CrossEntropyLoss does in one process.
    Where targets are probabilities it is divided by the samples, as there. Other metrics count each sample once.

    label_smoothing: share of a target that is spread over all classes, also in evaluation (Szegedy et al. 2016).
    loss: a loss of your own in place of the task's, see `OwnParts`.
    measures: metrics of your own, by name.
    class_weights: weight of each class in the loss; balanced: samples / (classes * samples of the class).
    """

    def __init__(
        self,
        metrics: dict[str, str],
        monitor: str,
        label_smoothing: Fraction,
        loss: Function | None,
        measures: dict[str, Function],
        class_weights: ClassWeights,
    ) -> None:
        super().__init__(metrics, monitor)
        if loss is not None and class_weights is not None:
            raise ConfigError(
                f"task.class_weights={show(class_weights)} weighs the task's own loss, which task.loss replaces; "
                f"type task.class_weights=null, or task.loss=null"
            )
        self.own = OwnParts(loss, measures)
        self.cross_entropy = CrossEntropy(class_weights, reduction="sum", label_smoothing=label_smoothing)
        if self.cross_entropy.weight is not None:
            self.sums[SAMPLE_COUNT] = 1
        self.tops = {name: int(name[3:]) for name in metrics if re.fullmatch(r"top[1-9]\d*", name)}

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self._require_fit(outputs, targets)
        logits, labels = at_least_float32(outputs), class_numbers(targets)
        if targets.is_floating_point():
            targets = targets.to(logits.dtype)
        try:
            loss = self.cross_entropy(logits, targets)
        except IndexError:  # on a CPU; a GPU's own assertion ends the process
            classes = outputs.shape[1]
            label = int(targets.max() if targets.max() >= classes else targets.min())
            raise ConfigError(
                f"a target is {label}, and the model has the outputs 0 to {classes - 1}; "
                f"type dataset.classes={classes}, which names the sample"
            ) from None
        # On a CPU count_nonzero takes half the time of a sum of booleans.
        sums = {"loss": loss, "accuracy": (outputs.argmax(dim=1) == labels).count_nonzero()}
        for name, k in self.tops.items():
            best = outputs.topk(min(k, outputs.shape[1]), dim=1).indices
            sums[name] = (best == labels.unsqueeze(1)).sum()
        if not self.counts_samples:
            sums[SAMPLE_COUNT] = torch.full((), len(labels), device=labels.device)
        return self.own.replace(logits, targets, loss, sums)

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        super().check_targets(targets, numbers, classes)
        if isinstance(targets, Tensor) and targets.dim() == 1:
            is_plain = type(self).count is Classification.count  # it counts every sample
            check_class_numbers(targets, numbers, classes, None if is_plain else -100)

    @property
    def counts_samples(self) -> bool:
        return self.cross_entropy.weight is None and type(self).count is Classification.count

    def count(self, targets: Any) -> float | Tensor:
        weight = self.cross_entropy.weight
        if weight is None or targets.is_floating_point():
            return count_samples(targets)
        return as_float64(weight[targets]).sum()

    def finish(self, totals: dict[str, Tensor], count: float) -> dict[str, float]:
        means, samples = super().finish(totals, count), totals.get(SAMPLE_COUNT)
        if samples is None:
            return means
        of_samples = super().finish(totals, samples.item())
        return {name: (means if name == "loss" else of_samples)[name] for name in totals if name != SAMPLE_COUNT}

    def _require_fit(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.is_floating_point():
            fits = outputs.dim() == 2 and outputs.shape[1] > 1 and outputs.shape == targets.shape
        else:
            fits = outputs.dim() == 2 and targets.dim() == 1 and len(outputs) == len(targets)
        if not fits:
            raise ConfigError(
                f"{type(self).__name__} takes outputs (N, classes) and whole numbers (N,), and these are "
                f"{list(outputs.shape)} and {list(targets.shape)}, {targets.dtype}; "
                f"type task={_other_task(outputs, targets)}"
            )

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        logits = at_least_float32(outputs)
        return {"prediction": logits.argmax(1), "probability": logits.softmax(1)}

    def report(self, share: Share, images: int) -> Report | None:
        from lockstep.tasks.reports import ClassReport  # imports Pillow

        return ClassReport(share, images)


class ClassificationF1(Classification):
    """As Classification, with the metrics f1, precision, recall and iou: the mean over classes, or f1_<class> of one.

    They are computed once, from counts over all ranks: a mean of the batches' F1 would be another number.

    classes: classes that are counted; null: as many as the data has.
    """

    def __init__(
        self,
        metrics: dict[str, str],
        monitor: str,
        label_smoothing: Fraction,
        classes: Count | None,
        class_weights: ClassWeights,
    ) -> None:
        super().__init__(metrics, monitor, label_smoothing, None, {}, class_weights)
        self.classes = classes or 0
        self.means = ("loss", "accuracy", *self.tops)
        require_known(metrics, self.means, classes)
        counted = {name: size for name, size in self.sums.items() if name == SAMPLE_COUNT}
        self.sums = counted | dict.fromkeys(self.means, 1) | dict.fromkeys(COUNTS, classes or 0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().__call__(outputs, targets)
        return loss, sums | class_counts(outputs.argmax(dim=1), class_numbers(targets), self.classes)

    def finish(self, totals: dict[str, Tensor], samples: float) -> dict[str, float]:
        means = {name: total for name, total in totals.items() if name not in COUNTS}
        metrics = super().finish(means, samples) | class_scores(totals)
        return {name: metrics[name] for name in self.metrics}


def class_numbers(targets: Tensor) -> Tensor:
    """Class numbers (N, ...) as they are; of probabilities (N, classes) the most probable class (N,)."""
    return targets.argmax(1) if targets.is_floating_point() else targets


def _other_task(outputs: Tensor, targets: Tensor) -> str:
    """What to type behind `task=` for outputs and targets that are not those of a classification."""
    if targets.is_floating_point():
        return "regression for targets that are numbers"
    if outputs.dim() == 2 and outputs.shape == targets.shape:
        return "multi_label for targets that are labels of 0 and 1"
    if targets.dim() == 2:
        return "language_modelling for a class number at each place of a text"
    if targets.dim() > 2:
        return "segmentation for a class number at each pixel"
    return "regression for targets that are numbers"
