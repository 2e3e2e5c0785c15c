"""What mode=check says of data that breaks no promise: what an iterable costs, and what cannot be pickled."""

import io
import multiprocessing.reduction
from typing import Any

import numpy as np
import torch

from lockstep.data.loader import BatchLoader


def notes(loader: BatchLoader) -> list[str]:
    """Lines about what breaks no promise here."""
    found = []
    if loader.is_stream:
        found.append("iterable:  samples come in the data set's own order, and every rank reads all of them")
    if loader.reader is None:
        return found
    read = loader.samples
    parts: dict[str, Any] = {
        "the training data": read.dataset,
        "dataset.transforms": read.transforms,
        "collate_fn": read.collate_fn,
    }
    for name, part in parts.items():
        reason = not_picklable(part, name, set())
        if reason is not None:
            found.append(f"pickling:  {reason}; only loader workers off Linux need it: there type dataset.workers=0")
    return found


class _Sizeless(multiprocessing.reduction.ForkingPickler):
    """Pickles everything but the values of tensors and arrays."""

    def reducer_override(self, value: Any) -> Any:
        return (str, ()) if isinstance(value, torch.Tensor | np.ndarray) else NotImplemented


def not_picklable(value: Any, name: str, seen: set[int]) -> str | None:
    """The innermost attribute or item of `value` that cannot be pickled, and why. None if all can be.

    seen: ids of the objects around it, to which its attributes may lead back.
    """
    if id(value) in seen:
        return None
    seen.add(id(value))
    try:
        _Sizeless(io.BytesIO()).dump(value)
    except Exception as error:  # of any class: __reduce__ and __getstate__ may be the user's
        items = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        inside = items if isinstance(items, dict) else getattr(value, "__dict__", {})
        for key, part in inside.items():
            found = not_picklable(part, f"{name}.{key}", seen)
            if found is not None:
                return found
        return f"{name} cannot be pickled ({' '.join(str(error).split())})"
    return None
