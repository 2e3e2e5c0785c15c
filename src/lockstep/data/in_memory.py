"""A data set that is two tensors in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError


@dataclass(frozen=True, eq=False)
class InMemoryDataset:
    """samples: (N, C, H, W) uint8 images or (N, ...) floats. targets: (N,) int64 classes or (N, ...) floats.

    `BatchLoader` indexes the tensors directly. Any other map-style data set is read through a DataLoader.
    """

    samples: Tensor
    targets: Tensor

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
    """The names of the classes, if the data set has an attribute `classes`, as torchvision's have."""
    return [str(name) for name in getattr(dataset, "classes", ())]


def check_shape(dataset: object, shape: Sequence[int] | None) -> None:
    """Raise ConfigError if the samples of a data set in memory have another shape than the config says."""
    if shape is None or not isinstance(dataset, InMemoryDataset):
        return
    found = list(dataset.samples.shape[1:])
    if found != list(shape):
        said, typed = (",".join(map(str, numbers)) for numbers in (shape, found))
        raise ConfigError(
            f"dataset.shape=[{said}] but the samples have the shape [{typed}]; type dataset.shape=[{typed}]"
        )
