"""The nets, as plain functions of the data's shape. Nothing here knows about ranks."""

import math
from collections import OrderedDict

from torch import nn

from lockstep.refusal import Refusal


def convnet(shape, classes):
    """The MNIST tutorial's net: two 5x5 convolutions with batch norm, ReLU and pooling, and one linear layer.

    shape: (channels, height, width), height and width at least 4. (N, *shape) -> (N, classes) logits. Parameters are
    named as the tutorial names them: layer1.0.weight ... fc.bias.
    """
    channels, height, width = _image(shape, "convnet")

    def layer(inputs, outputs):
        # The tutorial's ReLU comes before its pooling. Rising functions and maxima can change places, gradients and all,
        # and after the pooling there is a quarter as much to rectify.
        return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.MaxPool2d(2), nn.ReLU(inplace=True))

    return nn.Sequential(
        OrderedDict(
            layer1=layer(channels, 16),
            layer2=layer(16, 32),
            flatten=nn.Flatten(),
            fc=nn.Linear((height // 4) * (width // 4) * 32, classes),
        )
    )


def linear(shape, classes):
    """One linear layer over the flattened sample, named as torch.nn.Linear names it where there is nothing to flatten."""
    if len(shape) == 1:
        return nn.Linear(shape[0], classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape, classes, width, depth, dropout):
    """`depth` hidden layers of `width` ReLU units, each followed by dropout."""
    layers, inputs = [nn.Flatten()], math.prod(shape)
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def toy_parallel(shape, classes, width):
    """The DDP tutorial's ToyMpModel, two linear layers made to lie on two devices: net1, ReLU, net2."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), net1=nn.Linear(math.prod(shape), width), relu=nn.ReLU(), net2=nn.Linear(width, classes)))


def torchvision_net(name, shape, classes, **options):
    """A classification net of torchvision by name, untrained, its first convolution fitted to the data's channels."""
    from torchvision.models import get_model

    channels, height, _ = _image(shape, name)
    net = get_model(name, weights=None, num_classes=classes, **options)
    if name.startswith("resnet") and (channels != 3 or height < 64):
        # He et al. 2015, section 4.2: small images keep their size in the first layers.
        net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False) if height < 64 else nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        net.maxpool = nn.Identity() if height < 64 else net.maxpool
    return net


def _image(shape, model):
    if len(shape) != 3:
        raise Refusal(f"model={model} wants images and the dataset's samples have shape {list(shape)}; try model=mlp or model=linear")
    return shape
