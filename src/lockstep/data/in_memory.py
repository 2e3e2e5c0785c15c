"""A data set that is two tensors in memory."""

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
