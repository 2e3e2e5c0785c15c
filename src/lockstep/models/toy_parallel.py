"""The DDP tutorial's ToyMpModel: two linear layers, made to be on two devices."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


def toy_parallel(shape: Sequence[int], classes: int, width: int) -> nn.Sequential:
    """net1, ReLU, net2. (N, *shape) -> (N, classes)."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            flatten=nn.Flatten(),
            net1=nn.Linear(math.prod(shape), width),
            relu=nn.ReLU(),
            net2=nn.Linear(width, classes),
        )
    )
