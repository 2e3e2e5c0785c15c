"""Parts of a training that take a known time, for tests of the profiler."""

import os
import time
from typing import Any

import torch
from torch import Tensor

from lockstep.data.builtin import digits
from lockstep.models import tutorial as models


def mlp(shape: list[int], classes: int, **options: Any) -> torch.nn.Module:
    """The option mlp: a class that is typed gets what is typed of it."""
    return models.mlp(shape, classes, **({"width": 128, "depth": 2, "dropout": 0.0} | options))


class SlowDigits(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """64 digits that take 1 ms each."""

    def __init__(self, train: bool) -> None:
        self.data = digits(train)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        return self.data[index]


class SlowBackward(torch.autograd.Function):
    """10 ms on rank 0, 100 ms on rank 1."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.1 if os.environ["RANK"] == "1" else 0.01)
        return gradient


class SlowModel(torch.nn.Module):
    """A forward pass of 15 ms or more."""

    def __init__(self, shape: list[int], classes: int, **options: Any) -> None:
        super().__init__()
        self.net = mlp(shape, classes, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.015)
        return SlowBackward.apply(self.net(inputs))


class SlowSGD(torch.optim.SGD):
    """A step of 20 ms or more."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)
        return super().step(closure)


def compiled_mlp(shape: list[int], classes: int, **options: Any) -> torch.nn.Module:
    """An mlp that dynamo has traced, without a compiler behind it."""
    model = mlp(shape, classes, **options)
    model.compile(backend="eager")
    return model


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
