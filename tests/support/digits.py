"""The digits of scikit-learn, as two data sets and as data sources with other splits."""

import time

import torch

from lockstep.data.source import Splits
from lockstep.data.vision import Digits, RandomPairs

FEW = "dataset._target_=support.digits.Few"
FEW_ON_TEST = "dataset._target_=support.digits.FewOnTest"
PAIRS_ON_TEST = "dataset._target_=support.digits.PairsOnTest"


def digits(train=True):
    """1437 to train on, or 360 to test: (N, 1, 8, 8) uint8."""
    splits = Digits().splits()
    found = splits.train if train else splits.test
    return found


# Not dataclasses: a class with the constructor of one of the project keeps the values of its option.
class Few(Digits):
    def splits(self):
        return Splits(digits(False), digits(False))


class OnTest(Digits):
    """All training data is trained on, and the test data are the validation data, too."""

    def splits(self):
        return Splits(digits(), digits(False), digits(False))


class FewOnTest(Digits):
    def splits(self):
        return Splits(digits(False), digits(False), digits(False))


class PairsOnTest(RandomPairs):
    def splits(self):
        train, test, _ = super().splits()
        return Splits(train, test, test)


class Samples(torch.utils.data.Dataset):
    """The digits, or the `first` of them, one by one."""

    first = None

    def __init__(self, train):
        self.data, self.train, self.reads = digits(train), train, 0
        self.targets = self.data.targets[: self.first]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        self.reads += 1
        self.before(index)
        return self.data[index]

    def before(self, index):
        """Called before each access."""


class SlowDigits(Samples):
    first = 64

    def before(self, index):
        time.sleep(0.001)
