"""A list of samples as a batch: what torch's default_collate makes of them, and a sentence where it cannot."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.errors import ConfigError

COLLATED = (Tensor, np.ndarray, np.generic, int, float, str, bytes, list)  # values of a batch; lists are of numbers
# A function that makes (inputs, targets) of a list of samples.
COLLATE_ADVICE = "type dataset.collate_fn='{_target_:<module>.<function>,_partial_:true}' as docs/data.md shows"


def collate_samples(samples: list[Any]) -> Any:
    """The batch of samples of one form. A list of numbers becomes a tensor, a tuple stays a tuple of values.

    Raises what default_collate raises for values that it cannot put together.
    """
    batch, first = default_collate(samples), samples[0]
    if isinstance(first, Mapping):
        return {key: _stacked(batch[key], first[key]) for key in batch}
    if isinstance(first, tuple | list):
        return [_stacked(values, value) for values, value in zip(batch, first, strict=True)]
    return batch


def _stacked(values: Any, first: Any) -> Any:
    """`values` of a batch with each list of numbers as one tensor, as in data of a Hugging Face tokenizer.

    default_collate makes a list with a tensor (N,) for each place of the list. first: the value of the first sample.
    """
    if isinstance(first, Mapping):
        return {key: _stacked(values[key], first[key]) for key in values}
    if not isinstance(first, tuple | list) or not isinstance(values, list | tuple):
        return values
    found = [_stacked(value, item) for value, item in zip(values, first, strict=True)]
    shapes = {value.shape if isinstance(value, Tensor) else None for value in found}
    are_numbers = isinstance(first, list) and all(isinstance(item, int | float | list) for item in first)
    return torch.stack(found, dim=1) if are_numbers and len(shapes) == 1 and None not in shapes else found


def require_one_form(numbers: Sequence[int], samples: Sequence[Any], name: str) -> None:
    """Raise ConfigError if one of the samples, which cannot be a batch, is None, has another shape or type, or has a
    value that is no part of a batch.

    numbers: of the samples in the data set, which is called `name`.
    """
    for number, sample in zip(numbers, samples, strict=True):
        if sample is None:
            raise ConfigError(
                f"sample {number} of the {name} is None; return (inputs, target) from __getitem__, or type "
                f"dataset.on_error=skip to leave such samples out"
            )
        first, forms = _forms(samples[0]), _forms(sample)
        pairs = zip(first, forms, strict=False)
        differing = [(place, one, other) for (place, one), (_, other) in pairs if one != other]
        if len(first) != len(forms):
            differing.append(("", f"{len(first)} values", f"{len(forms)} values"))
        for place, one, other in differing[:1]:
            raise ConfigError(
                f"sample {numbers[0]} of the {name} has{place} {one} and sample {number} has {other}, and a batch "
                f"wants one shape; {COLLATE_ADVICE}"
            )
    unknown = [(place, value) for place, value in _values(samples[0]) if not isinstance(value, COLLATED)]
    for place, value in unknown[:1]:
        raise ConfigError(
            f"sample {numbers[0]} of the {name} has{place} an object of {type(value).__name__}, and a tensor, an array "
            f"or a number is wanted; {_advice(value, name)}"
        )


def _advice(value: Any, name: str) -> str:
    """What to type for a value that is no part of a batch."""
    if not hasattr(value, "getbands"):  # no image of Pillow
        return f"return one from __getitem__, or {COLLATE_ADVICE}"
    key = "test_transforms" if name == "test data" else "transforms"
    return f"type dataset.{key}='[{{_target_:torchvision.transforms.v2.ToImage}}]'"


def _forms(sample: Any) -> list[tuple[str, str]]:
    """(place, shape or type) of each value in a sample."""
    return [(place, _form(value)) for place, value in _values(sample)]


def _form(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} numbers"
    return f"the shape {list(value.shape)}" if isinstance(value, Tensor | np.ndarray) else type(value).__name__


def _values(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """(place, value) of each value in a sample. A list of numbers is one."""
    if isinstance(value, Mapping):
        return [found for key in value for found in _values(value[key], f" as {key}")]
    is_numbers = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
    if isinstance(value, tuple | list) and not is_numbers:
        return [found for item in value for found in _values(item, place)]
    return [(place, value)]
