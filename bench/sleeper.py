"""A model that sleeps where others compute: many hosts' computing on few cores."""

import itertools
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Nap(torch.autograd.Function):
    """The identity. A third of its time passes in the forward pass, the rest in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


class SleepyLinear(nn.Linear):
    """A layer that takes `seconds` a sample, times the factor of the model's last forward pass."""

    factor = 1.0

    def __init__(self, inputs: int, outputs: int, seconds: float) -> None:
        super().__init__(inputs, outputs)
        self.seconds = seconds

    def forward(self, rows: Tensor) -> Tensor:
        outputs = super().forward(rows)
        if not torch.is_grad_enabled() or rows.is_meta:
            return outputs
        return Nap.apply(outputs, self.seconds * len(rows) * SleepyLinear.factor)


class Sleeper(nn.Sequential):
    """Each forward pass takes exp(spread * N(0, 1)) times as long, drawn by each rank for itself."""

    spread = 0.0

    def forward(self, rows: Tensor) -> Tensor:
        SleepyLinear.factor = random.lognormvariate(0, self.spread)
        return super().forward(rows)


def sleeper(shape: Sequence[int], classes: int, width: int, depth: int, seconds: float, spread: float = 0.0) -> Sleeper:
    """`depth` layers that take `seconds` a sample together."""
    widths = [math.prod(shape), *[width] * (depth - 1), classes]
    layers = [SleepyLinear(inputs, outputs, seconds / depth) for inputs, outputs in itertools.pairwise(widths)]
    model = Sleeper(*layers)
    model.spread = spread
    random.seed(int(os.environ.get("RANK", 0)))
    return model
