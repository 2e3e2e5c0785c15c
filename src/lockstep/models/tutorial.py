"""The models of the tutorials: (N, *shape) -> (N, classes)."""

import math
from collections import OrderedDict

from torch import nn

from lockstep.config.schema import Classes, Count, Fraction, ImageShape, Shape, Whole
from lockstep.errors import ConfigError


def convnet(shape: ImageShape, classes: Classes) -> nn.Sequential:
    """The net of the MNIST tutorial, with its names of parameters: two 5x5 convolutions with batch norm, ReLU and
    pooling, and a linear layer. Raises ConfigError for images of less than 4x4 pixels."""
    channels, height, width = shape
    if min(height, width) < 4:
        raise ConfigError(f"model=convnet needs images of at least 4x4 pixels, not {height}x{width}; type model=mlp")
    features = (height // 4) * (width // 4) * 32
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            layer1=_convolution(channels, 16),
            layer2=_convolution(16, 32),
            flatten=nn.Flatten(),
            fc=nn.Linear(features, classes),
        )
    )


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    # The tutorial applies ReLU before pooling. ReLU is monotonic, so both orders give the same values and gradients,
    # and after pooling there is a quarter as much to compute.
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.MaxPool2d(2), nn.ReLU(inplace=True)
    )


def linear(shape: Shape, classes: Classes) -> nn.Module:
    """One linear layer. For flat samples it is a plain torch.nn.Linear, with its names of parameters."""
    if len(shape) == 1:
        return nn.Linear(shape[0], classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: Shape, classes: Classes, width: Count, depth: Whole, dropout: Fraction) -> nn.Sequential:
    """`depth` hidden layers of `width` ReLU units, each followed by dropout."""
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = math.prod(shape)
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def toy_parallel(shape: Shape, classes: Classes, width: Count) -> nn.Sequential:
    """The DDP tutorial's ToyMpModel, made to be on two devices: a hidden layer of `width` ReLU units."""
    net1, net2 = nn.Linear(math.prod(shape), width), nn.Linear(width, classes)
    return nn.Sequential(OrderedDict[str, nn.Module](flatten=nn.Flatten(), net1=net1, relu=nn.ReLU(), net2=net2))
