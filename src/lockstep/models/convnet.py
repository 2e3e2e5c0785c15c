"""The convolutional net of the MNIST tutorial."""

from collections import OrderedDict

from torch import nn

from lockstep.config.schema import Classes, ImageShape
from lockstep.errors import ConfigError
from lockstep.models.base import image_shape


def convnet(shape: ImageShape, classes: Classes) -> nn.Sequential:
    """Two 5x5 convolutions with batch norm, ReLU and pooling, and one linear layer.

    (N, *shape) -> (N, classes) logits. Parameters are named as the tutorial names them: layer1.0.weight ... fc.bias.

    shape: (channels, height, width), height and width at least 4; null: from the data.
    """
    channels, height, width = image_shape(shape, "convnet")
    if min(height, width) < 4:
        raise ConfigError(f"model=convnet needs images of at least 4x4 pixels, not {height}x{width}; type model=mlp")
    features = (height // 4) * (width // 4) * 32
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            layer1=_layer(channels, 16),
            layer2=_layer(16, 32),
            flatten=nn.Flatten(),
            fc=nn.Linear(features, classes),
        )
    )


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    # The tutorial applies ReLU before pooling. ReLU is monotonic, so both orders give the same values and gradients,
    # and after pooling there is a quarter as much to compute.
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 5, padding=2),
        nn.BatchNorm2d(outputs),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
    )
