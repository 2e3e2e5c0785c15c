"""What the targets of a classification must be, and which sample has something else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError

IGNORED = -100  # the target that torch's losses leave out
TOLERANCE = 1e-2  # of the sum of probabilities


@dataclass(frozen=True)
class Labels:
    """What is allowed. name: of the data set, for messages.

    classes: class numbers are below it; None: any are. is_signed: whether negative numbers may mean something to the
    task. are_probabilities: whether targets of several values a sample must be probabilities. may_be_ignored: whether
    -100 is allowed; a task that counts samples would count it as a wrong answer. one_each: whether the task counts
    samples, so that there must not be fewer targets.
    """

    name: str
    classes: int | None
    is_signed: bool = False
    are_probabilities: bool = False
    may_be_ignored: bool = True
    one_each: bool = False

    def check(self, numbers: Sequence[int], targets: Any) -> None:
        """Raise ConfigError for the first target that is not allowed. numbers: of their samples."""
        if self.one_each and isinstance(targets, Tensor) and targets.shape[:1].numel() < len(numbers):
            raise ConfigError(
                f"dataset.collate_fn makes {targets.shape[:1].numel()} targets of {len(numbers)} samples of the "
                f"{self.name}, and a step takes the mean over all of them; write a task whose count says what it "
                f"counts, or return None from __getitem__ for samples to leave out and type dataset.on_error=skip"
            )
        if is_class_numbers(targets):
            self._check_numbers(numbers, targets)
        elif self.are_probabilities and isinstance(targets, Tensor) and targets.is_floating_point():
            self._check_probabilities(numbers, targets)

    def _check_numbers(self, numbers: Sequence[int], targets: Tensor) -> None:
        targets = targets.long()  # the number of classes, and -100, may be more than a small type holds
        if not self.may_be_ignored:
            for row in (targets == IGNORED).nonzero().flatten().tolist()[:1]:
                raise ConfigError(
                    f"sample {numbers[row]} of the {self.name} has the target {IGNORED}, and a classification counts "
                    f"every sample; leave that sample out, or type task._target_=<module>.<a task whose count does>"
                )
        if self.classes is None:
            return
        wrong = targets >= self.classes
        if not self.is_signed:
            wrong |= (targets < 0) & (targets != IGNORED)
        for row in wrong.nonzero().flatten().tolist()[:1]:
            label = int(targets[row])
            typed = f"dataset.classes={label + 1}" if label >= 0 else f"its target as 0 to {self.classes - 1}"
            raise ConfigError(
                f"sample {numbers[row]} of the {self.name} has the target {label}, and the classes are "
                f"0 to {self.classes - 1}; type {typed}"
            )

    def _check_probabilities(self, numbers: Sequence[int], targets: Tensor) -> None:
        if targets.dim() != 2:
            return  # the task says what it wants
        wrong = (targets < 0).any(1) | ~((targets.sum(1) - 1).abs() < TOLERANCE)
        for row in wrong.nonzero().flatten().tolist()[:1]:
            values = ", ".join(f"{value:g}" for value in targets[row, :4].tolist())
            more = ", ..." if targets.shape[1] > 4 else ""
            raise ConfigError(
                f"sample {numbers[row]} of the {self.name} has the target [{values}{more}], which are no probabilities "
                f"of classes; type task=regression, or task=multi_label for labels of 0 and 1"
            )


def is_class_numbers(targets: Any) -> bool:
    """Whether targets are one whole number for each sample."""
    if not isinstance(targets, Tensor) or targets.dim() != 1:
        return False
    return not targets.is_floating_point() and targets.dtype != torch.bool
