"""What an evaluation of a classifier shows: the worst mistakes, the confusion matrix, the accuracy of each class."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.distributed.world import World
from lockstep.tasks.base import ReadSample, Report, Share, at_least_float32

MOST_CLASSES = 200  # for a confusion matrix
COLUMNS = 5  # of the table of shown samples: score, number, prediction, truth, confidence


@dataclass(frozen=True)
class Shown:
    """A test sample in the grid. number: in the data set. confidence: the probability of the prediction."""

    number: int
    prediction: int
    truth: int
    confidence: float


class ClassReport(Report):
    """Counts (truth, prediction) pairs, and keeps the samples that the model is most wrong about.

    First come mistakes, those of the highest confidence first, then correct predictions, the lowest confidence first.
    confusion: (classes, classes), how often a class (row) was taken for a class (column); None if there are too many.
    """

    def __init__(self, share: Share, images: int) -> None:
        self.share, self.images = share, images
        self.seen = 0
        self.confusion: Tensor | None = None
        self.worst: Tensor | None = None  # (at most `images`, COLUMNS) float64
        self.shown: list[Shown] = []

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape[:1] + outputs.shape[2:] != targets.shape or targets.is_floating_point():
            return  # a task of the user's that is derived from Classification may have other targets
        confidence, prediction = at_least_float32(outputs).softmax(dim=1).max(dim=1)
        if outputs.shape[1] <= MOST_CLASSES:
            counts = _confusion(prediction.flatten(), targets.flatten(), outputs.shape[1])
            self.confusion = counts if self.confusion is None else self.confusion + counts
        if targets.dim() == 1:
            self._keep_worst(confidence, prediction, targets)
        self.seen += len(targets)

    def _keep_worst(self, confidence: Tensor, prediction: Tensor, targets: Tensor) -> None:
        positions = torch.arange(self.seen, self.seen + len(targets), device=targets.device)
        numbers = self.share.rank + self.share.size * positions
        score = torch.where(prediction == targets, 1 - confidence, 1 + confidence)
        is_class = targets >= 0  # others, such as -100, become empty rows: to drop them would wait for a GPU
        score, confidence = score * is_class, confidence * is_class
        rows = torch.stack([column.double() for column in (score, numbers, prediction, targets, confidence)], dim=1)
        if self.worst is not None:
            rows = torch.cat([self.worst, rows])
        self.worst = rows[rows[:, 0].topk(min(self.images, len(rows))).indices]

    def reduce(self, world: World) -> None:
        """One all-reduce: each rank's worst samples in a row of their own, and the sum of the counts."""
        classes = max(world.all_gather_json(0 if self.confusion is None else len(self.confusion)))
        table = torch.zeros(world.size, self.images, COLUMNS, dtype=torch.float64, device=world.device)
        if self.worst is not None:
            table[world.rank, : len(self.worst)] = self.worst
        counts = torch.zeros(classes, classes, dtype=torch.float64, device=world.device)
        if self.confusion is not None:
            counts += self.confusion
        both = world.all_reduce_sum(torch.cat([table.flatten(), counts.flatten()])).cpu()
        rows = both[: table.numel()].view(-1, COLUMNS).tolist()
        # A row of zeros is empty. Equal scores are in the order of the samples, at any number of ranks.
        found = sorted((row for row in rows if row[-1] > 0), key=lambda row: (-row[0], row[1]))
        self.shown = [Shown(int(row[1]), int(row[2]), int(row[3]), row[4]) for row in found[: self.images]]
        self.confusion = both[table.numel() :].view(classes, classes) if classes else None

    def figures(self, sample: ReadSample, classes: Sequence[str]) -> dict[str, Tensor]:
        from lockstep.tasks.drawing import Tile, draw_accuracies, draw_confusion, draw_tiles, is_image

        figures = {}
        if self.shown and is_image(sample(self.shown[0].number)):
            tiles = [
                Tile(
                    sample(shown.number),
                    f"{_name(classes, shown.prediction)[:8]} ({shown.confidence:.0%})",
                    f"is {_name(classes, shown.truth)}",
                    shown.prediction == shown.truth,
                )
                for shown in self.shown
            ]
            figures["test/worst_first"] = draw_tiles(tiles)
        if self.confusion is not None and self.confusion.sum() > 0:
            names = [_name(classes, number) for number in range(len(self.confusion))]
            figures["test/confusion_matrix"] = draw_confusion(self.confusion.tolist(), names)
            correct, counts = self.confusion.diagonal(), self.confusion.sum(1)
            accuracies = [
                one / count if count else None for one, count in zip(correct.tolist(), counts.tolist(), strict=True)
            ]
            figures["test/accuracy_of_classes"] = draw_accuracies(accuracies, names)
        return figures


def _confusion(predictions: Tensor, targets: Tensor, classes: int) -> Tensor:
    """(classes, classes) counts. Targets that are no class, such as -100, are left out.

    A product of matrices: bincount would wait for a GPU. Counts below 2**24 are exact in float32.
    """
    numbers = torch.arange(classes, device=targets.device)
    truths, guesses = (targets[:, None] == numbers).float(), (predictions[:, None] == numbers).float()
    return (truths.T @ guesses).double()


def _name(classes: Sequence[str], number: int) -> str:
    return classes[number] if 0 <= number < len(classes) else str(number)
