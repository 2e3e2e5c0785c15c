"""The tasks of this project: a class at each place, several labels, and numbers."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config.schema import ClassWeights, Fraction
from lockstep.errors import ConfigError, show
from lockstep.tasks.base import Function, Task, at_least_float32, misfit


class CrossEntropy(Task):
    """Cross entropy over logits and class numbers, and the share of those that are right.

    Of samples: outputs (N, classes), targets (N,). Of pixels: (N, classes, H, W) and (N, H, W). Of tokens, with
    `classes_last`: (N, T, classes) and (N, T). Targets of samples may be probabilities (N, classes), as MixUp makes
    them: then the most probable class is the right one.

    With class weights a target counts as much as its class weighs: the loss is divided by the sum of the weights over
    the whole global batch, in an evaluation over the whole data set, as torch.nn.CrossEntropyLoss does in one process.
    Where targets are probabilities it is divided by the samples, as there. Accuracies count each target once.

    label_smoothing: share of a target that is spread over all classes, also in evaluations (Szegedy et al. 2016).
    class_weights: weight of each class in the loss.
    ignored_label: targets with this number count nowhere.
    loss: of your own in place of cross entropy.
    """

    monitor = "accuracy"

    def __init__(
        self,
        label_smoothing: Fraction = 0.0,
        class_weights: ClassWeights = None,
        ignored_label: int = -100,
        classes_last: bool = False,
        loss: Function | None = None,
    ) -> None:
        if loss is not None and class_weights is not None:
            what = f"task.class_weights={show(class_weights)} weighs the task's own loss, which task.loss replaces"
            raise ConfigError(f"{what}; type task.class_weights=null, or task.loss=null")
        self.label_smoothing, self.own_loss, self.ignored = label_smoothing, loss, ignored_label
        self.classes_last, self.draws = classes_last, not classes_last
        self.better = {"loss": "min", "accuracy": "max"}
        if class_weights is not None:
            self.target_weights = torch.tensor(class_weights, dtype=torch.float64)
        if classes_last:
            self.counts, self.monitor, self.derived = "tokens", "loss", ["perplexity"]
            self.better = {"loss": "min", "perplexity": "min"}

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if not self._fits(outputs, targets):
            of_both = ("(N, T, classes)", "(N, T)") if self.classes_last else ("(N, classes, ...)", "(N, ...)")
            raise misfit(self, "logits {} and class numbers {}, whole ones".format(*of_both), outputs, targets)
        rows, is_soft = outputs, targets.is_floating_point()
        if outputs.dim() > 2:  # (n, classes) for all places: CUDA has deterministic kernels for these alone
            rows = (outputs if self.classes_last else outputs.movedim(1, -1)).flatten(0, -2)
        rows = at_least_float32(rows)
        classes = targets.to(rows.dtype) if is_soft else targets.flatten()
        labels, found = classes.argmax(1) if is_soft else classes, {}
        if self.own_loss is None:
            weight = None if self.target_weights is None else self.target_weights.to(rows.dtype)
            options: Any = {"ignore_index": self.ignored, "label_smoothing": self.label_smoothing, "reduction": "none"}
            found["loss"] = F.cross_entropy(rows, classes, weight, **options)
        if "accuracy" in self.better:
            found["accuracy"] = rows.argmax(1) == labels
        if targets.dim() > 1 and not is_soft:
            found = {name: value.view(targets.shape) for name, value in found.items()}
        if self.own_loss is not None:
            logits = at_least_float32(self._classes_second(outputs))
            found["loss"] = self.own_loss(logits, classes if is_soft else targets)
        return found

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        return means | {name: torch.tensor(means["loss"], dtype=torch.float64).exp().item() for name in self.derived}

    def scores(self, outputs: Tensor) -> Tensor:
        return at_least_float32(self._classes_second(outputs)).softmax(1)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        probability = self.scores(outputs)
        named = {"prediction": self._classes_second(outputs).argmax(1)}
        return named | ({"probability": probability} if probability.dim() == 2 else {})

    def figures(self, *samples: Any) -> dict[str, Tensor]:
        from lockstep.tasks.reports import class_figures  # imports Pillow

        return class_figures(*samples)

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        super().check_targets(targets, numbers, classes)
        weights = self.target_weights
        if weights is not None and classes is not None and len(weights) != classes:
            what = f"task.class_weights has {len(weights)} weights, and there are {classes} classes"
            raise ConfigError(f"{what}; type task.class_weights=null, or a weight for each class")
        if not isinstance(targets, Tensor) or targets.is_floating_point() or classes is None:
            return
        values = targets.long()  # the number of classes may be more than a small type holds
        wrong = ((values < 0) | (values >= classes)) & ((values != self.ignored) | (targets.dim() == 1))
        for row, *place in wrong.nonzero().tolist()[:1]:
            label, where = int(values[(row, *place)]), f" at {place}" if place else ""
            what = f"sample {numbers[row]} has the target {label}{where}, and the classes are 0 to {classes - 1}"
            is_mark = label < 0 or (label == 255 and place)  # of what counts nowhere, or of white in an image
            advice = f"its target as 0 to {classes - 1}" if is_mark else f"dataset.classes={label + 1}"
            advice += f", or task.ignored_label={label} if it counts nowhere" if place else ""
            raise ConfigError(f"{what}; type {advice}")

    def _classes_second(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(-1, 1) if self.classes_last else outputs

    def _fits(self, outputs: Any, targets: Any) -> bool:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.dim() < 2:
            return False
        samples, classes, *places = self._classes_second(outputs).shape
        wanted = [samples, classes] if targets.is_floating_point() else [samples, *places]
        return classes > 1 and [*targets.shape] == wanted


class MultiLabel(Task):
    """Binary cross entropy over logits (N, labels) and targets (N, labels) of 0 and 1, averaged over a sample's labels.
    accuracy: the share of right labels; a label is predicted where its logit is above 0. loss: of your own."""

    better = {"loss": "min", "accuracy": "max"}
    monitor = "accuracy"

    def __init__(self, loss: Function | None = None) -> None:
        self.own_loss = loss or partial(F.binary_cross_entropy_with_logits, reduction="none")

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if outputs.shape != targets.shape or outputs.dim() != 2:
            raise misfit(self, "outputs and targets (N, labels)", outputs, targets)
        logits = at_least_float32(outputs)
        return {"loss": self.own_loss(logits, targets.to(logits)), "accuracy": (outputs > 0) == (targets > 0)}

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
    Where a sample has one value, either may be (N,). loss: of your own in place of the squared error."""

    better = {"loss": "min", "mae": "min"}

    def __init__(self, loss: Function | None = None) -> None:
        self.own_loss = loss or partial(F.mse_loss, reduction="none")

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if {*outputs.shape[1:], *targets.shape[1:]} <= {1}:
            outputs = outputs.reshape(targets.shape)
        if outputs.shape != targets.shape:  # torch would broadcast them, and compare each with each
            raise misfit(self, "outputs and targets of one shape", outputs, targets)
        values = at_least_float32(outputs)
        truth = targets.to(values.dtype)
        return {"loss": self.own_loss(values, truth), "mae": (values.detach() - truth).abs()}
