"""What a data set says of itself, so that its config need not: the shape of a sample, and how many classes it has."""

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from lockstep.data.in_memory import InMemoryDataset
from lockstep.data.labels import is_class_numbers
from lockstep.data.samples import Samples
from lockstep.errors import ConfigError


def require_samples(dataset: Any, name: str, key: str) -> None:
    """Raise ConfigError for a data set without samples. key: its node in the config."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"the {name} is a {type(dataset).__name__} without __len__ and __getitem__, and samples are read by their "
            f"number; type {key}._target_=<module>.<class> of a map-style data set"
        )
    if len(dataset) == 0:
        raise ConfigError(f"the {name} has no samples; check the keys of {key}, or type dataset=<another data set>")


def first_sample(data: InMemoryDataset | Samples) -> tuple[Any, Any]:
    """(inputs, targets) of the first sample, as a batch of one. Raises ConfigError if it has another form."""
    if isinstance(data, InMemoryDataset):
        return data.samples[:1], data.targets[:1]
    return data.one()


def sample_shape(inputs: Any) -> list[int]:
    """The shape of a sample. inputs: a batch. Raises ConfigError if a sample has several inputs."""
    if isinstance(inputs, Tensor):
        return list(inputs.shape[1:])
    raise ConfigError(
        "the samples have several inputs, and this model has a key for one shape; "
        "type model._target_=<module>.<class> for a model that takes them, or dataset.shape=[<numbers>]"
    )


def class_count(dataset: Any, targets: Any) -> int:
    """How many outputs a model needs: classes, or numbers in a target. targets: of some samples.

    The data set has an attribute `classes` with their names, or `targets` with all of them, as those of torchvision
    have. Raises ConfigError if it has neither.
    """
    if isinstance(targets, Tensor) and not is_class_numbers(targets) and targets.dim() <= 2:
        return targets[:1].numel()
    names = getattr(dataset, "classes", None)
    if isinstance(names, Sized):
        return len(names)
    stored = dataset.tensors[-1] if isinstance(dataset, torch.utils.data.TensorDataset) else dataset
    numbers = stored if isinstance(stored, Tensor) else getattr(dataset, "targets", None)
    try:
        return int(torch.as_tensor(numbers).max()) + 1
    except (TypeError, ValueError, RuntimeError):  # there are none, or they are no numbers, such as names
        raise ConfigError(
            "the data set does not say how many classes it has; type dataset.classes=<how many>, "
            "or give it an attribute `classes` with their names"
        ) from None
