"""The tasks of this project: a class at each place, several labels, and numbers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.schema import ClassWeights, Count, Fraction
from lockstep.data.source import count_samples
from lockstep.errors import ConfigError
from lockstep.tasks.base import (
    Function,
    Samples,
    Task,
    as_float64,
    at_least_float32,
    misfit,
)
from lockstep.text import show

LARGEST_EXPONENT = 700.0  # math.exp of more than 709 raises OverflowError


class CrossEntropy(Task):
    """Cross entropy over logits and class numbers, and the share of those that are right.

    Of samples: outputs (N, classes), targets (N,). Of pixels: (N, classes, H, W) and (N, H, W). Of tokens, with
    `classes_last`: (N, T, classes) and (N, T). Targets of samples may be probabilities (N, classes), as MixUp makes
    them: then the most probable class is the right one.

    With class weights a target counts as much as its class weighs: the loss is divided by the sum of the weights over
    the whole global batch, in an evaluation over the whole data set, as torch.nn.CrossEntropyLoss does in one process.
    Where targets are probabilities it is divided by the samples, as there. Accuracies count each target once.

    label_smoothing: share of a target that is spread over all classes, also in evaluations (Szegedy et al. 2016).
    class_weights: weight of each class in the loss; balanced: samples / (classes * samples of the class).
    ignored_label: targets with this number count nowhere.
    top: [5] measures top5, too: whether the class is among the 5 best.
    loss: of your own in place of cross entropy.
    """

    monitor = "accuracy"

    def __init__(
        self,
        label_smoothing: Fraction = 0.0,
        class_weights: ClassWeights = None,
        ignored_label: int = -100,
        classes_last: bool = False,
        top: list[Count] | None = None,
        loss: Function | None = None,
    ) -> None:
        if loss is not None and class_weights is not None:
            what = f"task.class_weights={show(class_weights)} weighs the task's own loss, which task.loss replaces"
            raise ConfigError(f"{what}; type task.class_weights=null, or task.loss=null")
        self.label_smoothing, self.own_loss = label_smoothing, without_weights(loss)
        self.ignored = self.label = ignored_label
        self.classes_last, self.top = classes_last, list(top or ())
        self.better = {"loss": "min", "accuracy": "max"} | {f"top{k}": "max" for k in self.top}
        self.weight: Tensor | None = None
        self.draws = not classes_last
        if class_weights is not None and class_weights != "balanced":  # else the data will tell
            if not any(class_weights):
                what = f"task.class_weights={show(list(class_weights))} has no weight above 0, so no sample counts"
                raise ConfigError(f"{what}; type task.class_weights=balanced")
            self.weight = torch.tensor(class_weights, dtype=torch.float64)
        if classes_last:
            self.counts, self.monitor = "tokens", "loss"
            self.better = {"loss": "min", "perplexity": "min"} | {f"top{k}": "max" for k in self.top}
            self.derived = ["perplexity"]

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if not self._fits(outputs, targets):
            wanted = "(N, T, classes) and (N, T)" if self.classes_last else "(N, classes, ...) and (N, ...)"
            raise misfit(self, f"logits and class numbers {wanted}", outputs, targets)
        logits, is_soft = at_least_float32(self._classes_second(outputs)), targets.is_floating_point()
        if self.own_loss is not None:
            loss = self.own_loss(logits, targets)
        else:
            loss = self._cross_entropy(logits, targets.to(logits.dtype) if is_soft else targets)
        labels = targets.argmax(1) if is_soft else targets
        found = {"loss": loss}
        if "accuracy" in self.better:
            found["accuracy"] = logits.argmax(1) == labels
        for k in self.top:
            best = logits.topk(min(k, logits.shape[1]), dim=1).indices
            found[f"top{k}"] = (best == labels.unsqueeze(1)).any(1)
        return found

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """One for each target."""
        weight = None if self.weight is None else self.weight.to(logits.dtype)
        ignored = self.label
        if logits.is_cuda and logits.dim() > 2 and torch.are_deterministic_algorithms_enabled():
            rows = logits.movedim(1, -1).flatten(0, -2)  # CUDA has such a kernel for rows only
            options: Any = {"ignore_index": ignored, "reduction": "none", "label_smoothing": self.label_smoothing}
            return F.cross_entropy(rows, targets.flatten(), weight, **options).view_as(targets)
        return F.cross_entropy(
            logits, targets, weight, ignore_index=ignored, reduction="none", label_smoothing=self.label_smoothing
        )

    def count(self, targets: Tensor) -> int | Tensor:
        if self.weight is not None and not targets.is_floating_point():
            is_counted = torch.ne(targets, self.label)
            return as_float64(self.weight[targets.where(is_counted, 0)] * is_counted).sum()
        if targets.is_floating_point() or targets.dim() == 1:
            return count_samples(targets)
        return torch.ne(targets, self.label).sum()

    def counts_by_value(self, targets: Tensor, ignores: bool) -> bool:
        if not isinstance(targets, Tensor):
            return False  # the call will say so
        is_plain = targets.is_floating_point() or targets.dim() == 1 or not ignores
        return self.weight is not None or type(self).count is not CrossEntropy.count or not is_plain

    @property
    def counts_samples(self) -> bool:
        return type(self).count is CrossEntropy.count

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        if "perplexity" not in self.better:
            return means
        loss = means["loss"]
        return means | {"perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else math.inf}

    def scores(self, outputs: Tensor) -> Tensor:
        return at_least_float32(self._classes_second(outputs)).softmax(1)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        logits = at_least_float32(self._classes_second(outputs))
        named = {"prediction": logits.argmax(1)}
        return named | ({"probability": logits.softmax(1)} if logits.dim() == 2 else {})

    def figures(self, *samples: Any) -> dict[str, Tensor]:
        from lockstep.tasks.reports import class_figures  # imports Pillow

        return class_figures(*samples)

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        super().check_targets(targets, numbers, classes)
        if not isinstance(targets, Tensor) or targets.is_floating_point() or classes is None:
            return
        values = targets.long()  # the number of classes may be more than a small type holds
        wrong = ((values < 0) | (values >= classes)) & ((values != self.ignored) | (targets.dim() == 1))
        for row, *place in wrong.nonzero().tolist()[:1]:
            label, where = int(values[(row, *place)]), f" at {place}" if place else ""
            advice = f"dataset.classes={label + 1}" if label >= 0 else f"its target as 0 to {classes - 1}"
            advice += f", or task.ignored_label={label} if it counts nowhere" if place else ""
            what = f"sample {numbers[row]} has the target {label}{where}, and the classes are 0 to {classes - 1}"
            raise ConfigError(f"{what}; type {advice}")

    def _classes_second(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(-1, 1) if self.classes_last else outputs

    def _fits(self, outputs: Any, targets: Any) -> bool:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.dim() < 2:
            return False
        samples, *places = outputs.shape
        classes = places.pop(-1 if self.classes_last else 0)
        wanted = [samples, classes, *places] if targets.is_floating_point() else [samples, *places]
        return classes > 1 and [*targets.shape] == wanted


class MultiLabel(Task):
    """Binary cross entropy over logits (N, labels) and targets (N, labels) of 0 and 1, averaged over a sample's labels.

    accuracy: the share of right labels. all_right: of samples with all labels right. A label is predicted where its
    logit is above 0.

    loss: of your own in place of it.
    """

    better = {"loss": "min", "accuracy": "max", "all_right": "max"}
    monitor = "accuracy"

    def __init__(self, loss: Function | None = None) -> None:
        self.own_loss = without_weights(loss)

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if not _are_alike(outputs, targets) or outputs.dim() != 2:
            raise misfit(self, "outputs and targets (N, labels)", outputs, targets)
        logits = at_least_float32(outputs)
        if self.own_loss is None:
            loss = F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none")
        else:
            loss = self.own_loss(logits, targets.to(logits))
        right = (outputs > 0) == (targets > 0)
        return {"loss": loss, "accuracy": right.float(), "all_right": right.all(1)}

    def scores(self, outputs: Tensor) -> Tensor:
        return at_least_float32(outputs).sigmoid()

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": (outputs > 0).long(), "probability": self.scores(outputs)}

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        super().check_targets(targets, numbers, classes)
        if isinstance(targets, Tensor) and targets.dim() > 1:
            wrong = ~((targets >= 0) & (targets <= 1)).flatten(1).all(1)
            for row in wrong.nonzero().flatten().tolist()[:1]:
                what = f"sample {numbers[row]} has the target {targets[row].tolist()}, and its labels are 0 or 1"
                raise ConfigError(f"{what}; type task=regression, or its target as 0s and 1s")


class Regression(Task):
    """Squared error and absolute error over outputs and targets (N, values), averaged over the values of a sample.

    Where a sample has one value, either may be (N,).

    loss: of your own in place of the squared error.
    """

    better = {"loss": "min", "mae": "min"}
    draws = True

    def __init__(self, loss: Function | None = None) -> None:
        self.own_loss = without_weights(loss)

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if _is_one_value(outputs) and _is_one_value(targets):
            outputs = outputs.reshape(targets.shape)
        if not _are_alike(outputs, targets):  # torch would broadcast them, and compare each with each
            raise misfit(self, "outputs and targets of one shape", outputs, targets)
        values = at_least_float32(outputs)
        error = values - targets.to(values.dtype)
        loss = error.square() if self.own_loss is None else self.own_loss(values, targets.to(values.dtype))
        return {"loss": loss, "mae": error.detach().abs()}

    def scores(self, outputs: Tensor) -> Tensor:
        return at_least_float32(outputs)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": at_least_float32(outputs)}

    def figures(self, samples: Samples, *_: Any) -> dict[str, Tensor]:
        from lockstep.tasks.reports import value_figures  # imports Pillow

        return value_figures(samples)


def without_weights(loss: Function | None) -> Function | None:
    """Raise ConfigError for a loss with weights, which no optimizer would train."""
    if isinstance(loss, nn.Module) and (names := [name for name, _ in loss.named_parameters()]):
        what = f"task.loss has weights of its own ({', '.join(names)}), which nothing trains"
        raise ConfigError(f"{what}; type model._target_=<a net that has them, and outputs what the loss needs>")
    return loss


def _are_alike(outputs: Any, targets: Any) -> bool:
    return isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape == targets.shape


def _is_one_value(values: Any) -> bool:
    """Whether these are one value a sample: (N,) or (N, 1)."""
    return isinstance(values, Tensor) and values.dim() in (1, 2) and values.shape[1:].numel() == 1
