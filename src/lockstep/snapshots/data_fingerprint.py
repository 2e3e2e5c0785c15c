"""A hash of a data set: another run, another rank or a resumed run shall see that its data is another one."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, SupportsFloat
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.data.partition import random_states_kept
from lockstep.data.source import TARGET_KEYS, Tensors, of_each_sample, tensors_in, unwrapped
from lockstep.training.replicas import digest

LARGEST_TENSOR = 2**30  # bytes; a larger one may be a file that is mapped into memory, and is sampled
TENSOR_ROWS = 64  # sampled of such a tensor
ITEMS = 16  # sampled of any other data set, where loading an item may take a while

_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def data_fingerprint(dataset: Any) -> str:
    """A hash of a data set, and what it covers: "0123456789abcdef of all samples and targets".

    In memory every bit counts, or of more than `LARGEST_TENSOR` bytes some rows. A data set may have it as its
    attribute `fingerprint`. Elsewhere the length and some numeric targets count, since random transforms change the
    inputs; an item that cannot be loaded counts as one without a target. The hash of a part is that of the whole.
    """
    try:
        known = _known.get(dataset)
        if known is None:
            known = _known[dataset] = _fingerprint(dataset)
        return known
    except TypeError:  # a list
        return _fingerprint(dataset)


def _fingerprint(dataset: Any) -> str:
    dataset, _ = unwrapped(dataset)
    weights = of_each_sample(dataset, "weights")
    if weights is None:
        return _of_samples(dataset)
    return f"{_of_samples(dataset)}, weights {_hash(np.asarray(weights, np.float64).tobytes())}"


def _of_samples(dataset: Any) -> str:
    if isinstance(own := getattr(dataset, "fingerprint", None), str):
        return own
    if isinstance(files := getattr(dataset, "files", None), np.ndarray):  # of images
        targets_of_files = np.asarray(getattr(dataset, "targets", ())).tobytes()
        return f"{_hash(files.tobytes(), targets_of_files)} of the names and targets of {len(files)} files"
    if isinstance(dataset, Tensors):
        return _of_tensors(dataset)
    if not hasattr(type(dataset), "__getitem__") or type(dataset).__getitem__ is Dataset.__getitem__:
        return _of_stream(dataset)
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


def _of_tensors(dataset: Tensors) -> str:
    tensors = [dataset.inputs.detach(), dataset.targets.detach()]
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


def _of_stream(dataset: Any) -> str:
    """Of the length and the first sample: a stream that shares its samples out by rank has another one on each."""
    with random_states_kept():
        first = next(iter(dataset), None)
    values = [torch.as_tensor(value).double().sum().item() for value in tensors_in(first)]
    return f"{_hash(len(dataset), values or repr(first))} of the length and the first sample"


def _evenly_spaced(length: int, count: int) -> list[int]:
    """Up to `count` indices below `length`, evenly spaced, the first included."""
    count = min(count, length)
    return [index * length // count for index in range(count)]
