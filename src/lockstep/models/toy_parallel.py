"""The DDP tutorial's ToyMpModel: two linear layers, made to be on two devices."""

import math
from collections import OrderedDict

from torch import nn

from lockstep.config.schema import Classes, Count, Shape


def toy_parallel(shape: Shape, classes: Classes, width: Count) -> nn.Sequential:
    """net1, ReLU, net2. (N, *shape) -> (N, classes).

    width: units of the hidden layer.
    """
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            flatten=nn.Flatten(),
            net1=nn.Linear(math.prod(shape), width),
            relu=nn.ReLU(),
            net2=nn.Linear(width, classes),
        )
    )
