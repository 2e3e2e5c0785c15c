"""A data set that is two tensors in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def check_classes(dataset: object, classes: int) -> None:
    """Raise ConfigError if a data set in memory has a class number that a model of `classes` outputs does not know."""
    if not isinstance(dataset, InMemoryDataset) or dataset.targets.is_floating_point() or not len(dataset.targets):
        return
    largest = int(dataset.targets.max())
    if largest >= classes:
        raise ConfigError(
            f"dataset.classes={classes} but the data has classes 0 to {largest}; type dataset.classes={largest + 1}"
        )


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
