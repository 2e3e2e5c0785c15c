"""What is held out of the training data for validation.

It depends on the data and on `dataset.split_seed` alone: it is the same on any number of ranks, after a resume, with
another `seed`, and in every job of a sweep.
"""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.dataset import class_of_each_sample, part_of
from lockstep.data.partition import fold_in, generator
from lockstep.data.text import TextWindows
from lockstep.errors import ConfigError

PIECES = 10  # of a text that are held out, one in each tenth of it
GROUP_FOLDS = 20  # that a share of a data set with groups is made up of
ALONE = "dataset.validation=null to choose on the test set, or dataset.validation='{_target_:<module>.<class>}'"


@dataclass(frozen=True)
class HeldOut:
    """A data set in two.

    train, validation: the two parts.
    numbers: (n,) of the validation samples in the data set; of a text the tokens at which their blocks begin.
    samples: of the data set.
    how: in words.
    """

    train: Any
    validation: Any
    numbers: Tensor
    samples: int
    how: str

    def __str__(self) -> str:
        """With a hash of the numbers: two that are equal have held out the same samples."""
        digest = hashlib.sha256(self.numbers.numpy().tobytes()).hexdigest()[:16]
        return f"{digest} of {len(self.numbers)} samples of {self.samples}, {self.how}"


@dataclass(frozen=True)
class Split:
    """How much is held out, and how it is drawn.

    size: a share of the samples below 1, or their number; None with `fold`.
    fold: (its number, how many there are): over all of them each sample is held out once.
    seed: dataset.split_seed.
    groups: dataset.groups.
    """

    size: float | None
    fold: tuple[int, int] | None
    seed: int
    groups: str

    @property
    def typed(self) -> str:
        """The key that asks for it, and its value."""
        return f"dataset.validation={self.size:g}" if self.fold is None else f"dataset.folds={self.fold[1]}"

    def count(self, samples: int) -> int:
        """How many of the samples a share or a number is. Raises ConfigError if none are left to train on."""
        assert self.size is not None
        count = max(1, round(self.size * samples)) if self.size < 1 else int(self.size)
        if count >= samples:
            raise ConfigError(
                f"{self.typed} leaves none of the {samples} training samples to train on; "
                f"type dataset.validation=0.1, or {ALONE}"
            )
        return count


def hold_out(dataset: Any, split: Split) -> HeldOut:
    """Hold out a part of `dataset`, the training data. Raises ConfigError for data of which no part can be taken.

    The part has as many samples of each class as the rest, in proportion, where the classes are known without reading
    samples, and samples of one group stay together where the data set has `groups`. Of a text it is blocks.
    """
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{split.typed} takes samples by their number, and the training data is an IterableDataset, "
            f"{type(dataset).__name__}, whose items come one after the other; type {ALONE}"
        )
    if split.fold is not None and split.fold[1] > len(dataset):
        raise ConfigError(
            f"{split.typed} and the training data has {len(dataset)} samples; type dataset.folds={len(dataset)}"
        )
    seeded = f"split_seed={split.seed}"
    part = "" if split.fold is None else f"fold {split.fold[0]} of {split.fold[1]}, "
    groups = _groups(dataset, split.groups)
    if isinstance(dataset, TextWindows):
        pieces = _pieces(dataset, split)
        train, validation = dataset.without(pieces)
        if not len(train):
            raise ConfigError(
                f"{split.typed} leaves no {dataset.block + 1} tokens side by side of the {len(dataset.tokens)} to "
                f"train on; type dataset.block={max(1, dataset.block // 4)}, or {ALONE}"
            )
        numbers = torch.cat([torch.arange(p.start, p.stop - 1, dataset.block) for p in pieces])
        samples = (len(dataset.tokens) - 1) // dataset.block
        return HeldOut(train, validation, numbers, samples, f"{part}{len(pieces)} pieces of the text, {seeded}")
    samples, classes = len(dataset), class_of_each_sample(dataset)
    if groups is not None:
        chosen, by = _of_groups(groups, classes, split), "by group"
    else:
        chosen, by = _of_samples(samples, classes, split), "at random"
    is_held_out = torch.zeros(samples, dtype=torch.bool)
    is_held_out[chosen] = True
    numbers = is_held_out.nonzero().flatten()
    rest = is_held_out.logical_not_().nonzero().flatten()
    by = "by class" if classes is not None and groups is None else by
    return HeldOut(part_of(dataset, rest), part_of(dataset, numbers), numbers, samples, f"{part}{by}, {seeded}")


def _of_samples(samples: int, classes: Tensor | None, split: Split) -> Tensor:
    """The numbers of the samples to hold out: at even distances, in a random order that is sorted by class."""
    order = torch.randperm(samples, generator=generator(split.seed))
    if classes is not None:
        # Of 10**7 samples these lines are most of a start: small numbers take less, and index_select than [].
        kind = next(kind for kind in (torch.int16, torch.int32, torch.int64) if classes.max() <= torch.iinfo(kind).max)
        order = order.index_select(0, classes.to(kind).index_select(0, order).sort(stable=True).indices)
    if split.fold is not None:
        number, folds = split.fold
        return order[number::folds]
    count = split.count(samples)
    return order[(2 * torch.arange(count) + 1) * samples // (2 * count)]


def _groups(dataset: Any, wanted: str) -> np.ndarray[Any, Any] | None:
    """The number (N,) of the group of each sample; None without groups."""
    values = None if wanted == "off" else getattr(dataset, "groups", None)
    if values is None:
        if wanted == "on":
            raise ConfigError(
                f"dataset.groups=on, and {type(dataset).__name__} of the training data has no attribute groups; give "
                f"it one with a value for each sample, such as the patient, or type dataset.groups=auto"
            )
        return None
    if len(values) != len(dataset):
        raise ConfigError(
            f"the attribute groups of the training data has {len(values)} values for {len(dataset)} samples; give it "
            f"one for each sample, or type dataset.groups=off"
        )
    return np.unique(np.asarray(values), return_inverse=True)[1].reshape(-1)


def _of_groups(groups: np.ndarray[Any, Any], classes: Tensor | None, split: Split) -> Tensor:
    """The numbers of the samples to hold out: whole groups, with about the classes of the rest."""
    from sklearn import model_selection  # type: ignore[import-untyped]  # takes a second: for groups alone

    count = int(groups.max()) + 1
    number, folds = split.fold or (0, min(GROUP_FOLDS, count))
    if count < max(2, folds):
        raise ConfigError(
            f"{split.typed} and the training data has {count} groups, of which each stays on one side; "
            f"type dataset.folds={max(2, count)}, or dataset.groups=off"
        )
    labels = np.zeros(len(groups), dtype=int) if classes is None else classes.numpy()
    splitter = model_selection.StratifiedGroupKFold(folds, shuffle=True, random_state=fold_in(split.seed) % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a class with fewer samples than folds
        parts = [held_out for _, held_out in splitter.split(labels, _for_sklearn(labels, folds), groups)]
    if split.fold is not None:
        return torch.from_numpy(parts[number])
    wanted, chosen = split.count(len(groups)), list[np.ndarray[Any, Any]]()
    for part in parts[:-1]:  # one stays to train on
        missing = wanted - sum(map(len, chosen))
        if chosen and missing < len(part) / 2:
            break
        chosen.append(part)
    return torch.from_numpy(np.concatenate(chosen))


def _for_sklearn(labels: np.ndarray[Any, Any], folds: int) -> np.ndarray[Any, Any]:
    """The classes; one for all samples where each has fewer than there are folds, which scikit-learn refuses."""
    return labels if np.bincount(np.unique(labels, return_inverse=True)[1]).max() >= folds else np.zeros_like(labels)


def _pieces(text: TextWindows, split: Split) -> Sequence[range]:
    """The pieces of the tokens to hold out, in their order."""
    tokens, block, random = len(text.tokens), text.block, generator(split.seed)
    if split.fold is not None:
        number, folds = split.fold
        rows = max(1, min(PIECES, tokens // (folds * (block + 1))))  # each row has a piece of every fold
        edges = [index * (tokens - 1) // (rows * folds) for index in range(rows * folds + 1)]
        orders = [torch.randperm(folds, generator=random).tolist() for _ in range(rows)]
        places = [row * folds + orders[row][number] for row in range(rows)]
        # With the token after it, so that each token is a target in one piece.
        return [range(edges[place], edges[place + 1] + 1) for place in places]
    blocks = split.count((tokens - 1) // block)
    pieces = min(PIECES, blocks)
    found = []
    for piece in range(pieces):
        start, stop = piece * tokens // pieces, (piece + 1) * tokens // pieces
        length = min((blocks // pieces + (piece < blocks % pieces)) * block + 1, stop - start)
        first = start + int(torch.randint(stop - start - length + 1, (1,), generator=random))
        found.append(range(first, first + length))
    return found
