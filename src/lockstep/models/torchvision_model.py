"""Classification models of torchvision, untrained."""

import difflib
from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.errors import ConfigError
from lockstep.models.shapes import image_shape

SMALL_IMAGE = 64  # pixels; below, a ResNet keeps the image's size in its first layers


def torchvision_model(name: str, shape: Sequence[int], classes: int, **options: Any) -> nn.Module:
    """The model `name` of torchvision.models. (N, *shape) -> (N, classes) logits.

    A ResNet's first convolution is adapted to the number of channels. Raises ConfigError for an unknown name.
    """
    from torchvision.models import get_model, list_models

    channels, height, _ = image_shape(shape, name)
    names = list_models()
    if name not in names:
        close = difflib.get_close_matches(name, names, 1) or ["resnet50"]
        raise ConfigError(f"model.name={name} is no model of torchvision; type model.name={close[0]}")
    model: nn.Module = get_model(name, weights=None, num_classes=classes, **options)
    if name.startswith("resnet") and (channels != 3 or height < SMALL_IMAGE):
        _adapt_resnet(model, channels, small=height < SMALL_IMAGE)
    return model


def _adapt_resnet(model: nn.Module, channels: int, small: bool) -> None:
    """Small images keep their size in the first layers (He et al. 2015, section 4.2)."""
    if small:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
