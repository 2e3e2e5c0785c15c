"""Scores of a classifier from counts for each class. Counts add up over ranks and batches; scores do not."""

import math
import re

import torch
from torch import Tensor

from lockstep.errors import ConfigError

COUNTS = ("right", "predicted", "true")  # for each class: hits, predictions of it, and samples of it
SCORES = ("precision", "recall", "f1", "iou")


def class_counts(predictions: Tensor, targets: Tensor, classes: int) -> dict[str, Tensor]:
    """{count: (classes,) whole numbers} of class numbers of one shape. Targets that are no class are left out."""
    is_class = (targets >= 0) & (targets < classes)
    is_right = is_class & (predictions == targets)
    return {
        "right": _count(targets, is_right, classes),
        "predicted": _count(predictions, is_class, classes),
        "true": _count(targets, is_class, classes),
    }


def _count(numbers: Tensor, where: Tensor, classes: int) -> Tensor:
    """How often each class is in `numbers`. bincount would wait for a GPU."""
    places = torch.where(where & (numbers < classes), numbers, classes).flatten()
    counts = torch.zeros(classes + 1, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))[:classes]


def class_scores(totals: dict[str, Tensor]) -> dict[str, float]:
    """{"f1": mean over the classes, "f1_0": of class 0, ...} for each of SCORES, from the totals of COUNTS.

    A class that is neither predicted nor true is left out of the mean, as in scikit-learn, and has the score 0 itself.
    """
    right, predicted, true = (totals[name].double() for name in COUNTS)
    per_class = {
        "precision": right / predicted.clamp(min=1),
        "recall": right / true.clamp(min=1),
        "f1": 2 * right / (predicted + true).clamp(min=1),
        "iou": right / (predicted + true - right).clamp(min=1),
    }
    occurs = predicted + true > 0
    scores = {}
    for name, values in per_class.items():
        scores[name] = values[occurs].mean().item() if occurs.any() else math.nan
        scores |= {f"{name}_{number}": value for number, value in enumerate(values.tolist())}
    return scores


def require_known(metrics: dict[str, str], means: tuple[str, ...], classes: int | None) -> None:
    """Raise ConfigError for a metric that is neither one of `means` nor a score, of all classes or of one.

    classes: None if it is not known yet how many there are.
    """
    for name in metrics:
        score = re.fullmatch(rf"({'|'.join(SCORES)})(?:_(\d+))?", name)
        if name in means or (score and (classes is None or int(score[2] or 0) < classes)):
            continue
        known = ", ".join([*means, *SCORES])
        numbers = "" if classes is None else f" with a class from 0 to {classes - 1}"
        raise ConfigError(
            f"task.metrics.{name} is not measured by this task; type one of {known}, or f1_<class>{numbers}"
        )
