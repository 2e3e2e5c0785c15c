"""What is held out of the training data for validation. It depends on the data and on `loader.split_seed` alone."""

from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep.data.partition import fold_in, generator
from lockstep.data.source import class_numbers, of_each_sample
from lockstep.errors import ConfigError

GROUP_FOLDS = 20  # that a share of a data set with groups is made up of


def hold_out(
    dataset: Any, size: float | None, fold: tuple[int, int] | None, seed: int, grouping: str
) -> tuple[Any, Any]:
    """(training part, validation part) of a map-style data set, as torch Subsets.

    size: a share of the samples below 1, or their number; None with `fold`, (its number, how many there are).
    grouping: "auto" keeps samples with one value of the data set's `groups` together, where it has them; "off".

    The part has the classes of the rest, in proportion, where `targets` are known without reading samples. A data set
    with a method `hold_out(size, fold, seed)`, such as a text, is asked. Raises ConfigError where no part can be taken.
    """
    typed = f"loader.validation={size:g}" if fold is None else f"loader.folds={fold[1]}"
    samples = len(dataset)
    count = 0 if size is None else max(1, round(size * samples)) if size < 1 else int(size)
    if count >= samples or (fold is not None and fold[1] > samples):
        right = "validation=null" if samples < 2 else "validation=0.1" if fold is None else f"folds={samples}"
        raise ConfigError(f"{typed}, and there are {samples} training samples; type loader.{right}")
    if hasattr(dataset, "hold_out"):
        train, validation = dataset.hold_out(size, fold, seed)
        return train, validation
    classes, groups = class_numbers(dataset), None if grouping == "off" else of_each_sample(dataset, "groups")
    if groups is not None:
        chosen = _of_groups(np.unique(groups, return_inverse=True)[1].reshape(-1), classes, count, fold, seed, typed)
    else:  # at even distances, in a random order that is sorted by class
        order = torch.randperm(samples, generator=generator(seed), dtype=torch.int32)
        if classes is not None:
            small = torch.from_numpy(classes.astype(np.int16 if classes.max() < 2**15 else np.int32))  # sorted faster
            order = order.index_select(0, small.index_select(0, order).sort(stable=True).indices)
        places = torch.arange(count) * 2 + 1
        chosen = order[fold[0] :: fold[1]] if fold is not None else order[places * samples // (2 * count)]
    is_held_out, numbers = np.zeros(samples, bool), np.arange(samples, dtype=np.int32)
    is_held_out[chosen] = True
    parts = [numbers[~is_held_out], numbers[is_held_out]]
    if hasattr(dataset, "fit"):  # a table is scaled by the rows that are trained on
        dataset.fit(parts[0])
    # As small as numpy's, but it gives ints: those of numpy overflow where a data set multiplies them.
    train, validation = (Subset(dataset, array("i", part.tobytes())) for part in parts)
    return train, validation


def _of_groups(groups: Any, classes: Any, count: int, fold: tuple[int, int] | None, seed: int, typed: str) -> Tensor:
    """The samples to hold out: whole groups, with about the classes of the rest."""
    from sklearn import model_selection  # type: ignore[import-untyped]  # takes a second: for groups alone

    most = int(groups.max()) + 1
    folds = min(GROUP_FOLDS, most) if fold is None else fold[1]
    if most < max(2, folds):
        what = f"{typed}, and the training data has {most} groups, each of which stays on one side"
        raise ConfigError(f"{what}; type loader.folds={max(2, most)}, or loader.groups=off")
    labels = np.zeros(len(groups), dtype=int) if classes is None else classes
    if np.bincount(np.unique(labels, return_inverse=True)[1]).max() < folds:  # scikit-learn refuses so few of each
        labels = np.zeros_like(labels)
    splitter = model_selection.StratifiedGroupKFold(folds, shuffle=True, random_state=fold_in(seed) % 2**32)
    parts = [torch.from_numpy(part) for _, part in splitter.split(labels, labels, groups)]
    if fold is not None:
        return parts[fold[0]]
    held_out = max(1, round(folds * count / len(groups)))
    return torch.cat(parts[: min(held_out, folds - 1)])  # one stays to train on
