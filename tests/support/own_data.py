"""Data sets of a user, read sample by sample."""

import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.source import Splits, Tensors
from lockstep.data.vision import Digits
from support.digits import digits

BROKEN = 5  # the sample that `Broken` cannot read


class Points(Dataset[Any]):
    """Sample n is a point (4,) in float64. Its class is 0 or 1."""

    def __init__(self, count: int = 23) -> None:
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(count, 4, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        return self.points[index], int(self.points[index, 0] > 0)


class Noisy(Points):
    """Noise from all three generators that transforms draw from."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point + torch.rand(1, dtype=torch.float64) + float(np.random.rand()) + random.random(), label


class Values(Points):
    """The target is a number, as a data set for regression has it."""

    def __getitem__(self, index: int) -> Any:
        point, _ = super().__getitem__(index)
        return point, float(point.sum())


class Broken(Points):
    def __getitem__(self, index: int) -> Any:
        if index == BROKEN:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


class BrokenValues(Values):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == BROKEN:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


class NaNValues(Values):
    """One sample holds NaN."""

    def __getitem__(self, index: int) -> Any:
        point, value = super().__getitem__(index)
        return point * torch.nan if index == BROKEN else point, value


class Dicts(Points):
    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return {"left": point[:2], "right": point[2:], "labels": label}


class Pair(NamedTuple):
    point: Any
    label: int


class Pairs(Points):
    """The inputs are a tuple."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return (point[:2], point[2:]), label


class Triples(Points):
    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


def first_two(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function for triples."""
    return torch.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


def scaled(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that draws a number for the batch, as one for images of several sizes does."""
    points, labels = first_two(samples)
    return points * torch.rand(()) * float(np.random.rand()) * random.random(), labels


def mixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that mixes the samples of a batch, as torchvision's documentation has MixUp."""
    points, labels = first_two(samples)
    return points.lerp(points[torch.randperm(len(points))], float(np.random.beta(1.0, 1.0))), labels


def twice(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that makes two rows of a sample."""
    return first_two([*samples, *samples])


def without_the_first(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that leaves a sample out, as some leave out those that cannot be read."""
    return first_two(samples[1:] or samples)


def double(sample: Any) -> Any:
    point, label = sample
    return 2 * point, label


class Words(Points):
    """The target is a text."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], "cat"


class Targetless(Points):
    """The target is None."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], None


class Pictures(Points):
    """The inputs are images of Pillow."""

    def __getitem__(self, index: int) -> Any:
        return Image.new("RGB", (8, 8)), super().__getitem__(index)[1]


class Mirrored(Points):
    """Arrays that numpy has mirrored, which torch does not take."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return np.asarray(point)[::-1], label


class Ragged(Points):
    """Points of three to five numbers."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point.repeat(2)[: 3 + index % 3], label


class Gone(Points):
    def __getitem__(self, index: int) -> Any:
        return None if index == BROKEN else super().__getitem__(index)


class Uneven(Noisy):
    """Three quarters of the points are of class 0, and the first ones weigh most."""

    def __init__(self, count: int = 97) -> None:
        super().__init__(count)
        self.targets = [int(number % 4 == 0) for number in range(count)]
        self.weights = torch.linspace(3, 1, count)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], self.targets[index]


def random_labels(train: bool) -> Tensors:
    """The digits, of which nothing can be learned: their labels are drawn."""
    data, generator = digits(train), torch.Generator().manual_seed(int(train))
    return Tensors(data.inputs, torch.randint(10, (len(data),), generator=generator))


class StopsInTheTest(Tensors):
    """Test digits that end their reader with a signal, once, when a file `stop` says so and the training is over."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 5 and Path("run/model.pt").exists() and Path("stop").exists():
            number = int(Path("stop").read_text())
            Path("stop").unlink()
            os.kill(os.getpid(), number)
            time.sleep(0.5)  # the thread that reads signals may come late on a busy machine
        return super().__getitem__(index)


class Stopping(Digits):
    def splits(self) -> Splits:
        train, test, _ = super().splits()
        return Splits(train, StopsInTheTest(test.inputs, test.targets))
