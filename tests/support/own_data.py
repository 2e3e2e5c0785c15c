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


class Labelled(Points):
    """Each sample has four labels of 0 and 1."""

    def __getitem__(self, index: int) -> Any:
        point, _ = super().__getitem__(index)
        return point, (point > 0).long()


class OwnNumbers(Points):
    """Noise from a generator of its own, as MONAI's transforms have it."""

    numbers = np.random.RandomState(0)

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point + float(self.numbers.rand()), label


class Changed(Points):
    """Changes what it keeps."""

    def __getitem__(self, index: int) -> Any:
        self.points[index] *= 0.5
        return super().__getitem__(index)


class OfEpoch(Points):
    """A point is moved by the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point + 100 * self.epoch, label


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


class AllBroken(Points):
    def __getitem__(self, index: int) -> Any:
        raise OSError("no such disk")


class Dicts(Points):
    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return {"left": point[:2], "right": point[2:], "labels": label}


class DictsOfOne(Points):
    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return {"pixel_values": point.numpy(), "label": np.int64(label)}


class Arrays(Points):
    """The inputs are arrays that the data set keeps."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point.numpy(), label


class Pair(NamedTuple):
    point: Any
    label: int


class NamedPairs(Points):
    """Samples are named tuples of what the data set keeps."""

    def __getitem__(self, index: int) -> Any:
        return Pair(*super().__getitem__(index))


class Nested(Points):
    """The sample is a dict, with the target beside the inputs."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return {"point": point, "label": label}


class Pairs(Points):
    """The inputs are a tuple."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return (point[:2], point[2:]), label


class Triples(Points):
    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


class WrongLabel(Points):
    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point, 7 if index == BROKEN else label


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


def noisy(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that draws a number for each sample."""
    points, labels = first_two(samples)
    return points + torch.rand(len(points), 1), labels


def twice(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that makes two rows of a sample."""
    return first_two([*samples, *samples])


def of_several_sizes(samples: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """A collate function with a list of boxes for each sample."""
    points, labels = first_two(samples)
    return points, [torch.zeros(2 + int(label), 4) for label in labels]


def without_the_first(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that leaves a sample out, as some leave out those that cannot be read."""
    return first_two(samples[1:] or samples)


class TwoWords(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fails_in_two_lines(samples: list[Any]) -> Any:
    raise ValueError("one\n\ntwo")


def fails_oddly(samples: list[Any]) -> Any:
    raise TwoWords("one", "two")


def double(sample: Any) -> Any:
    point, label = sample
    return 2 * point, label


def add_in_place(sample: Any) -> Any:
    """Noise, added to the point itself."""
    point, _ = sample
    point += np.random.rand()
    return sample


def shake(sample: Any) -> Any:
    point, label = sample
    return point + torch.rand(4, dtype=torch.float64), label


class Named(Points):
    """Says how many classes it has, as the data sets of torchvision do."""

    classes = ("left", "right")


class NamedTargets(Points):
    """All targets are there, as words."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = ["left", "right"]


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


def counts(most: int) -> Tensors:
    """Points, each with a whole number from -3 to `most`."""
    points = Points().points.float()
    return Tensors(points, torch.arange(len(points)) % (most + 4) - 3)


class Mirrored(Points):
    """Arrays that numpy has mirrored, which torch does not take."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return np.asarray(point)[::-1], label


class BigEndian(Points):
    """Arrays in the byte order of another machine."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return np.asarray(point).astype(">f4"), label


class OfTokenizer(Points):
    """Lists of numbers, as a tokenizer of Hugging Face gives them."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [index, 1, 2], "attention_mask": [[1, 0], [0, 1]], "label": index % 2}


class Ragged(Points):
    """Points of three to five numbers."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point.repeat(2)[: 3 + index % 3], label


class Gone(Points):
    def __getitem__(self, index: int) -> Any:
        return None if index == BROKEN else super().__getitem__(index)


class Empty(Points):
    def __len__(self) -> int:
        return 0


def tensors(count: int = 23) -> torch.utils.data.TensorDataset:
    points = Points(count)
    return torch.utils.data.TensorDataset(points.points, (points.points[:, 0] > 0).long())


class PointStream(torch.utils.data.IterableDataset[Any]):
    """The points in the order of their numbers, turned by the epoch, with noise. `missing` of them never come."""

    def __init__(self, missing: int = 0) -> None:
        self.points, self.missing, self.first = Noisy(), missing, 0

    def __len__(self) -> int:
        return len(self.points)

    def set_epoch(self, epoch: int) -> None:
        self.first = epoch

    def __iter__(self) -> Any:
        for number in range(len(self) - self.missing):
            yield self.points[(number + self.first) % len(self)]


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
