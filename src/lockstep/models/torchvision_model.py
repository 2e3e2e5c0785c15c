"""Classification models of torchvision, untrained."""

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import Classes, ImageShape
from lockstep.errors import ConfigError
from lockstep.models.base import image_shape

SMALL_IMAGE = 64  # pixels; below, a ResNet keeps the image's size in its first layers
RGB = 3
WITH_MORE_OUTPUTS = ("googlenet", "inception_v3")  # in training, unless they are told not to


def torchvision_model(name: str, shape: ImageShape, classes: Classes, **options: Any) -> nn.Module:
    """The model `name` of torchvision.models. (N, *shape) -> (N, classes) logits.

    The first convolution is adapted to the number of channels, and a ResNet to small images. A vision transformer is
    built for the images' size. Raises ConfigError for an unknown name, and for a model that cannot take such images.

    name: any classification model of torchvision.
    options: further arguments of the model.
    """
    from torchvision.models import get_model, list_models

    channels, height, _ = image_shape(shape, name)
    names = list_models()
    if name not in names:
        close = difflib.get_close_matches(name, names, 1) or ["resnet50"]
        raise ConfigError(f"model.name={name} is no model of torchvision; type model.name={close[0]}")
    if name in WITH_MORE_OUTPUTS:
        options = {"aux_logits": False, "init_weights": True} | options
    if name.startswith("vit_"):
        options = {"image_size": height} | options
    try:
        model: nn.Module = get_model(name, weights=None, num_classes=classes, **options)
        if name.startswith("resnet") and height < SMALL_IMAGE:  # its first layers then keep the image's size
            model.set_submodule("conv1", nn.Conv2d(channels, 64, 3, padding=1, bias=False))  # He et al. 2015, 4.2
            model.set_submodule("maxpool", nn.Identity())
        elif channels != RGB:
            _adapt_first_convolution(model, channels)
        require_logits(model, shape, classes)
    except NotImplementedError:  # some need values of their weights, and preflight builds models without
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise cannot_take(name, shape, error) from error
    return model


def cannot_take(name: str, shape: Sequence[int], error: Exception) -> ConfigError:
    """The sentence about images of a shape that the model `name` cannot take."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        f"model.name={name} cannot be used for images of {shape[0]} x {'x'.join(map(str, shape[1:]))} ({reason}); type "
        f"model.name=resnet18, or a Resize in dataset.transforms and dataset.test_transforms, with dataset.shape=null"
    )


def _adapt_first_convolution(model: nn.Module, channels: int) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            same: Any = {key: getattr(layer, key) for key in ("kernel_size", "stride", "padding", "dilation")}
            adapted = nn.Conv2d(channels, layer.out_channels, bias=layer.bias is not None, **same)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, adapted)
            return


def require_logits(model: nn.Module, shape: Sequence[int], classes: int) -> None:
    """Raise ValueError, or an error of the model's own, if it does not make (2, classes) of two samples.

    Shapes alone are computed, on the meta device.
    """
    weights = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad():
        outputs = torch.func.functional_call(model, weights, (torch.empty(2, *shape, device="meta"),))
    if not isinstance(outputs, Tensor):
        raise ValueError(f"its output is a {type(outputs).__name__}")
    if list(outputs.shape) != [2, classes]:
        raise ValueError(f"its outputs have the shape {list(outputs.shape[1:])}, and [{classes}] is wanted")
