"""The digits of scikit-learn, as two data sets and as data sources with other splits."""

from lockstep.data.source import Splits, Tensors
from lockstep.data.vision import Digits, RandomPairs

FEW = "dataset._target_=support.digits.Few"
FEW_ON_TEST = "dataset._target_=support.digits.FewOnTest"
PAIRS_ON_TEST = "dataset._target_=support.digits.PairsOnTest"
TYPED = "{_target_:support.digits.digits,train:%s}"  # a node of dataset=pair


def digits(train: bool = True) -> Tensors:
    """1437 to train on, or 360 to test: (N, 1, 8, 8) uint8."""
    splits = Digits().splits()
    found: Tensors = splits.train if train else splits.test
    return found


# Not dataclasses: a class with the constructor of one of the project keeps the values of its option.
class Few(Digits):
    """Trains on the 360 test digits."""

    def splits(self) -> Splits:
        return Splits(digits(False), digits(False))


class OnTest(Digits):
    """All training data is trained on, and the test data are the validation data, too."""

    def splits(self) -> Splits:
        return Splits(digits(), digits(False), digits(False))


class FewOnTest(Digits):
    def splits(self) -> Splits:
        return Splits(digits(False), digits(False), digits(False))


class PairsOnTest(RandomPairs):
    def splits(self) -> Splits:
        train, test, _ = super().splits()
        return Splits(train, test, test)
