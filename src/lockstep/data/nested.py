"""Inputs and targets: one tensor, or a tuple or dict of tensors whose first dimension counts samples."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to each of its tensors. Lists become tuples; other values stay as they are."""
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map_tensors(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def count_samples(value: Any) -> int:
    """How many samples a batch has."""
    return len(next(tensors_in(value)))


def copied(value: Any) -> Any:
    """`value` with copies of its tensors and arrays. Containers of other types than tuple, list and dict stay."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else value  # a mapped file may be large
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(copied, value))
    return value
