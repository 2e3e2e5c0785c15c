"""A hash of a data set: another run, another rank or a resumed run shall see that its data is another one."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, SupportsFloat
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lockstep.data.dataset import TARGET_KEYS, InMemoryDataset, of_each_sample, whole_of
from lockstep.data.image_files import ImageFiles, Target
from lockstep.data.partition import random_states_kept
from lockstep.training.weight_check import digest

LARGEST_TENSOR = 2**30  # bytes; a larger one may be a file that is mapped into memory, and is sampled
TENSOR_ROWS = 64  # sampled of such a tensor
FILES = 4096  # whose sizes are read of a folder of images
ITEMS = 16  # sampled of any other data set, where loading an item may take a while

_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def data_fingerprint(dataset: Any) -> str:
    """A hash of a map-style data set, and what it covers: "0123456789abcdef of all samples and targets".

    In memory every bit counts, or of more than `LARGEST_TENSOR` bytes some rows. Of a folder of images the names of all
    files count, and the sizes of up to `FILES` of them. A data set may have it as its attribute `fingerprint`.
    Elsewhere the length and some numeric targets count, since random transforms change the inputs; an item that cannot
    be loaded counts as one without a target. The hash of a part is that of the whole data set.
    """
    try:
        known = _known.get(dataset)
        if known is None:
            known = _known[dataset] = _fingerprint(dataset)
        return known
    except TypeError:  # a list
        return _fingerprint(dataset)


def _fingerprint(dataset: Any) -> str:
    dataset = whole_of(dataset)
    weights = of_each_sample(dataset, "sample_weights")
    if weights is None:
        return _of_samples(dataset)
    return f"{_of_samples(dataset)}, sample_weights {_hash(torch.as_tensor(weights, dtype=torch.float64).tolist())}"


def _of_samples(dataset: Any) -> str:
    images = image_files(dataset)
    if images is not None:
        folder, files = images
        names = "\n".join(f"{str(file)[len(folder) :]} {target}" for file, target in files)
        sizes = [_size(files[index][0]) for index in _evenly_spaced(len(files), FILES)]
        return f"{_hash(names, sizes)} of the names of {len(files)} files and the sizes of {len(sizes)}"
    if isinstance(dataset, InMemoryDataset):
        return _of_tensors(dataset)
    if isinstance(own := getattr(dataset, "fingerprint", None), str):
        return own
    targets: list[float | None] = []
    with random_states_kept():  # the data set may draw random numbers; the run's must not change
        for index in _evenly_spaced(len(dataset), ITEMS):
            number = None
            with suppress(Exception):  # the data set's own code, or several numbers: training will show what is wrong
                item = dataset[index]
                if isinstance(item, Mapping):
                    target = next((item[key] for key in TARGET_KEYS if key in item), None)
                else:
                    target = item[-1] if isinstance(item, tuple | list) and item else None
                if isinstance(target, torch.Tensor | np.ndarray):
                    target = target.item()  # one number, whatever its shape
                number = float(target) if isinstance(target, SupportsFloat) else None
            targets.append(number)
    return f"{_hash(len(dataset), targets)} of the length and {len(targets)} targets"


def _hash(*content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _of_tensors(dataset: InMemoryDataset) -> str:
    tensors = [dataset.samples.detach(), dataset.targets.detach()]
    described = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
    held = [_held_once(tensor) for tensor in tensors]
    covers = "all samples and targets"
    if max(tensor.nbytes for tensor in held) > LARGEST_TENSOR:
        rows = torch.tensor(_evenly_spaced(len(dataset.targets), TENSOR_ROWS), dtype=torch.int64)
        held = [tensor[rows.to(tensor.device)] for tensor in tensors]
        covers = f"{len(rows)} of {len(dataset.targets)} samples and targets"
    return f"{_hash(described, [int(digest(tensor)) for tensor in held])} of {covers}"


def _held_once(tensor: torch.Tensor) -> torch.Tensor:
    """The values (n,) behind rows that overlap in memory, such as windows of a text: a copy of the rows takes 64 times
    the memory there. Any other tensor as it is."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)) if 0 < span < tensor.numel() else tensor


def image_files(dataset: Any) -> tuple[str, Sequence[tuple[Any, Target]]] | None:
    """(folder, [(file, target)]) of this project's images and torchvision's folders. None for other data sets."""
    dataset = whole_of(dataset)
    source = getattr(dataset, "source", None)
    if isinstance(source, ImageFiles):
        return str(source.folder), source.files
    vision = sys.modules.get("torchvision.datasets")
    if vision is not None and isinstance(dataset, vision.DatasetFolder):
        return str(dataset.root), dataset.samples
    return None


def _size(file: Any) -> int:
    """Of a file, in bytes; 0 if it is gone: training will show it."""
    with suppress(OSError):
        return os.stat(file).st_size
    return 0


def _evenly_spaced(length: int, count: int) -> list[int]:
    """Up to `count` indices below `length`, evenly spaced, the first included."""
    count = min(count, length)
    return [index * length // count for index in range(count)]
