"""A data set that is two tensors in memory."""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError


@dataclass(frozen=True, eq=False)
class InMemoryDataset:
    """samples: (N, C, H, W) uint8 images or (N, ...) floats. targets: (N,) int64 classes or (N, ...) floats.

    `BatchLoader` indexes the tensors directly. Any other map-style data set is read through a DataLoader. Raises
    ConfigError for anything else than tensors, and for another number of targets than of samples.
    """

    samples: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("targets", self.targets)):
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise ConfigError(
                    f"the {name} of an InMemoryDataset are {_described(value)}, and a tensor with a row for each "
                    f"sample is wanted; type torch.as_tensor(<{name}>) where the data set is made"
                )
        if len(self.samples) != len(self.targets):
            raise ConfigError(
                f"an InMemoryDataset has {len(self.samples)} samples and {len(self.targets)} targets, and each sample "
                f"wants one; type InMemoryDataset(samples, targets) with tensors of one length"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index], self.targets[index]

    @property
    def epoch_samples(self) -> int:
        """How many samples an epoch has."""
        return len(self)

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        """The indices (epoch_samples,) of an epoch's samples. They depend on `generator` alone."""
        return torch.randperm(len(self), generator=generator)

    def to(self, device: torch.device) -> "InMemoryDataset":
        """This data set, copied if it is on another device."""
        if self.samples.device == device:
            return self
        return InMemoryDataset(self.samples.to(device), self.targets.to(device))


def class_names(dataset: object) -> list[str]:
    """The names of the classes, if the data set has an attribute `classes` with them, as torchvision's have."""
    names: Any = getattr(dataset, "classes", None)
    if isinstance(names, str) or not (isinstance(names, Sized) and isinstance(names, Iterable)):
        return []
    return [str(name) for name in names]


def check_shape(dataset: InMemoryDataset, inputs: object, shape: Sequence[int] | None) -> None:
    """Raise ConfigError if the samples have another shape than the config says.

    inputs: some of them as a batch, after the transforms of training. They may have the shape, or those of the data,
    which tests may be about: many nets take images of any size.
    """
    if shape is None or not isinstance(inputs, Tensor):
        return
    found = list(inputs.shape[1:])
    if list(shape) not in (found, list(dataset.samples.shape[1:])):
        said, typed = (",".join(map(str, numbers)) for numbers in (shape, found))
        raise ConfigError(
            f"dataset.shape=[{said}] but the samples have the shape [{typed}]; type dataset.shape=[{typed}]"
        )


def _described(value: object) -> str:
    return "one number" if isinstance(value, Tensor) else f"an object of {type(value).__name__}"
