"""A hash of a data set: another run, another rank or a resumed run shall see that its data is another one."""

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lockstep.data.source import Tensors, of_each_sample, unwrapped
from lockstep.training.replicas import digest

LARGEST_TENSOR = 2**30  # bytes; a larger one may be a file that is mapped into memory, and is sampled
TENSOR_ROWS = 64  # sampled of such a tensor

_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def data_fingerprint(dataset: Any) -> str:
    """A hash of a data set, and what it covers: "0123456789abcdef of all samples and targets".

    In memory every bit counts, or of more than `LARGEST_TENSOR` bytes some rows. A data set may have it as its
    attribute `fingerprint`. Elsewhere the length counts, and the attributes `files` and `targets`: random transforms
    change the samples. The hash of a part is that of the whole.
    """
    try:
        known = _known.get(dataset)
        if known is None:
            known = _known[dataset] = _fingerprint(unwrapped(dataset)[0])
        return known
    except TypeError:  # a list
        return _fingerprint(unwrapped(dataset)[0])


def _fingerprint(dataset: Any) -> str:
    weights = of_each_sample(dataset, "weights")
    more = "" if weights is None else f", weights {_hash(np.asarray(weights, np.float64).tobytes())}"
    if isinstance(own := getattr(dataset, "fingerprint", None), str):
        return own + more
    if isinstance(dataset, Tensors):
        return _of_tensors(dataset) + more
    found = {"files": getattr(dataset, "files", None), "targets": of_each_sample(dataset, "targets")}
    kept = {name: each for name, each in found.items() if isinstance(each, np.ndarray) and each.dtype.kind != "O"}
    covers = " and ".join(["the length", *kept])
    return f"{_hash(len(dataset), [(name, each.tobytes()) for name, each in kept.items()])} of {covers}{more}"


def _hash(*content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _of_tensors(dataset: Tensors) -> str:
    tensors = [dataset.inputs.detach(), dataset.targets.detach()]
    described = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
    held = [_held_once(tensor) for tensor in tensors]
    covers, length = "all samples and targets", len(dataset.targets)
    if max(tensor.nbytes for tensor in held) > LARGEST_TENSOR:
        count = min(TENSOR_ROWS, length)
        rows = torch.tensor([index * length // count for index in range(count)], dtype=torch.int64)
        held = [tensor[rows.to(tensor.device)] for tensor in tensors]
        covers = f"{count} of {length} samples and targets"
    return f"{_hash(described, [int(digest(tensor)) for tensor in held])} of {covers}"


def _held_once(tensor: torch.Tensor) -> torch.Tensor:
    """The values (n,) behind rows that overlap in memory, such as windows of a text: a copy of the rows takes 64 times
    the memory there. Any other tensor as it is."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)) if 0 < span < tensor.numel() else tensor
