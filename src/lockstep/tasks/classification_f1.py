"""Classification that is measured class by class: F1, precision and recall."""

from torch import Tensor

from lockstep.tasks.class_counts import COUNTS, class_counts, class_scores, require_known
from lockstep.tasks.classification import Classification, class_numbers


class ClassificationF1(Classification):
    """As Classification, with the metrics f1, precision, recall and iou: the mean over classes, or f1_<class> of one.

    They are computed once, from counts over all ranks: a mean of the batches' F1 would be another number. classes: None
    before the data is read, which tells how many they are.
    """

    def __init__(self, metrics: dict[str, str], monitor: str, label_smoothing: float, classes: int | None) -> None:
        super().__init__(metrics, monitor, label_smoothing, None, {})
        self.classes = classes or 0
        self.means = ("loss", "accuracy", *self.tops)
        require_known(metrics, self.means, classes)
        self.sums = dict.fromkeys(self.means, 1) | dict.fromkeys(COUNTS, classes or 0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().__call__(outputs, targets)
        return loss, sums | class_counts(outputs.argmax(dim=1), class_numbers(targets), self.classes)

    def finish(self, totals: dict[str, Tensor], samples: int) -> dict[str, float]:
        found = super().finish({name: totals[name] for name in self.means}, samples) | class_scores(totals)
        return {name: found[name] for name in self.metrics}
