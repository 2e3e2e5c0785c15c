"""Parts of a training that take a known time, for tests of the profiler."""

import time
from typing import Any

import torch
from torch import Tensor

from lockstep.models import tutorial as models
from support.digits import Samples


def mlp(shape: list[int], classes: int, **options: Any) -> torch.nn.Module:
    """The option mlp: a class that is typed gets what is typed of it."""
    return models.mlp(shape, classes, **({"width": 128, "depth": 2, "dropout": 0.0} | options))


class SlowDigits(Samples):
    """64 digits that take 1 ms each."""

    first = 64

    def before(self, index: int) -> None:
        time.sleep(0.001)


class SlowAtFirst(torch.nn.Module):
    """The first forward pass takes 3 s."""

    def __init__(self, shape: list[int], classes: int, **options: Any) -> None:
        super().__init__()
        self.net, self.seconds = mlp(shape, classes, **options), 3.0

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.seconds = 0.0
        outputs: Tensor = self.net(inputs)
        return outputs
