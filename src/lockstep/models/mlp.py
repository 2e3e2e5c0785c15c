"""A multi-layer perceptron."""

import math

from torch import nn

from lockstep.config.schema import Classes, Count, Fraction, Shape, Whole


def mlp(shape: Shape, classes: Classes, width: Count, depth: Whole, dropout: Fraction) -> nn.Sequential:
    """Hidden layers of ReLU units, each followed by dropout. (N, *shape) -> (N, classes).

    width: units of a hidden layer.
    depth: hidden layers.
    dropout: share of the units that are dropped.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = math.prod(shape)
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
