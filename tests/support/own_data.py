"""Data sets of a user, read sample by sample."""

import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from lockstep.data.source import Splits, Tensors
from lockstep.data.vision import Digits
from support.digits import digits

BROKEN = 5  # the sample that `Broken` cannot read


class Points(Dataset):
    """Sample n is a point (4,) in float64. Its class is 0 or 1."""

    def __init__(self, count=23):
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(count, 4, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], int(self.points[index, 0] > 0)


def points(name, change):
    """A class of points, found here by its name, whose samples are change(point, class, number)."""
    read = lambda self, index: change(*Points.__getitem__(self, index), index)  # noqa: E731
    return type(name, (Points,), {"__module__": __name__, "__getitem__": read})


def noisy(point):
    """With noise from all three generators that transforms draw from."""
    return point + torch.rand(1, dtype=torch.float64) + float(np.random.rand()) + random.random()


def readable(point, number):
    if number == BROKEN:
        raise OSError("image file is truncated")
    return point


Noisy = points("Noisy", lambda point, label, n: (noisy(point), label))
Broken = points("Broken", lambda point, label, n: (readable(point, n), label))
# The target is a number, as a data set for regression has it; a text; nothing.
Values = points("Values", lambda point, label, n: (point, float(point.sum())))
BrokenValues = points("BrokenValues", lambda point, label, n: (readable(point, n), float(point.sum())))
NaNValues = points("NaNValues", lambda point, label, n: (point * (torch.nan if n == BROKEN else 1), float(point.sum())))
Words = points("Words", lambda point, label, n: (point, "cat"))
Targetless = points("Targetless", lambda point, label, n: (point, None))
# Samples of other forms.
Triples = points("Triples", lambda point, label, n: (point, label, n))
Pictures = points("Pictures", lambda point, label, n: (Image.new("RGB", (8, 8)), label))
Mirrored = points("Mirrored", lambda point, label, n: (np.asarray(point)[::-1], label))  # torch does not take it
Ragged = points("Ragged", lambda point, label, n: (point.repeat(2)[: 3 + n % 3], label))
Gone = points("Gone", lambda point, label, n: None if n == BROKEN else (point, label))


class Uneven(Points):
    """Three quarters of the noisy points are of class 0, and the first ones weigh most."""

    def __init__(self, count=97):
        super().__init__(count)
        self.targets = [int(number % 4 == 0) for number in range(count)]
        self.weights = torch.linspace(3, 1, count)

    def __getitem__(self, index):
        return noisy(self.points[index]), self.targets[index]


def first_two(samples):
    return torch.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


def mixed(samples):
    """A collate function that mixes the samples of a batch, as torchvision's documentation has MixUp."""
    points, labels = first_two(samples)
    return points.lerp(points[torch.randperm(len(points))], float(np.random.beta(1.0, 1.0))), labels


def twice(samples):
    return first_two([*samples, *samples])


def without_the_first(samples):
    """A collate function that leaves a sample out, as some leave out those that cannot be read."""
    return first_two(samples[1:] or samples)


def random_labels(train):
    data, generator = digits(train), torch.Generator().manual_seed(int(train))
    return Tensors(data.inputs, torch.randint(10, (len(data),), generator=generator))


class StopsInTheTest(Tensors):
    """Test digits that end their reader with a signal, once, when a file `stop` says so and the training is over."""

    def __getitem__(self, index):
        if index == 5 and Path("run/model.pt").exists() and Path("stop").exists():
            number = int(Path("stop").read_text())
            Path("stop").unlink()
            os.kill(os.getpid(), number)
            time.sleep(0.5)  # the thread that reads signals may come late on a busy machine
        return super().__getitem__(index)


class Stopping(Digits):
    def splits(self):
        train, test, _ = super().splits()
        return Splits(train, StopsInTheTest(test.inputs, test.targets))
