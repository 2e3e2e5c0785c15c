"""A multi-layer perceptron."""

import math
from collections.abc import Sequence

from torch import nn


def mlp(shape: Sequence[int], classes: int, width: int, depth: int, dropout: float) -> nn.Sequential:
    """`depth` hidden layers of `width` ReLU units, each followed by dropout. (N, *shape) -> (N, classes)."""
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = math.prod(shape)
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
