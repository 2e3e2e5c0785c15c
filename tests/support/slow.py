"""Parts of a training that take a known time, for tests of the profiler."""

import time

import torch

from lockstep.models import tutorial as models
from support.digits import Samples


def mlp(shape, classes, **options):
    """The option mlp: a class that is typed gets what is typed of it."""
    return models.mlp(shape, classes, **({"width": 128, "depth": 2, "dropout": 0.0} | options))


class SlowDigits(Samples):
    """64 digits that take 1 ms each."""

    first = 64

    def before(self, index):
        time.sleep(0.001)


class SlowAtFirst(torch.nn.Module):
    """The first forward pass takes 3 s."""

    def __init__(self, shape, classes, **options):
        super().__init__()
        self.net, self.seconds = mlp(shape, classes, **options), 3.0

    def forward(self, inputs):
        time.sleep(self.seconds)
        self.seconds = 0.0
        return self.net(inputs)
