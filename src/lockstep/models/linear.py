"""One linear layer."""

import math

from torch import nn

from lockstep.config.schema import Classes, Shape


def linear(shape: Shape, classes: Classes) -> nn.Module:
    """(N, *shape) -> (N, classes). For flat samples it is a plain torch.nn.Linear, with its parameter names."""
    if len(shape) == 1:
        return nn.Linear(shape[0], classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))
