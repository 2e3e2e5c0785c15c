"""Classification models of torchvision and timm, untrained, for the channels and classes of the data.

Nothing is downloaded: `parameters.init=<file>` begins with other weights. (N, *shape) -> (N, classes).
"""

from difflib import get_close_matches
from typing import Any

from torch import nn

from lockstep.config.schema import Classes, ImageShape
from lockstep.errors import ConfigError, first_line

REFUSALS = AssertionError, RuntimeError, TypeError, ValueError  # of a library: another option, or a value of it
SMALL_IMAGE = 64  # pixels; below, a ResNet keeps the image's size in its first layers


def torchvision_model(name: str, shape: ImageShape, classes: Classes, **options: Any) -> nn.Module:
    """The model `name` of torchvision.models, with `options` of its own, such as image_size of a vision transformer."""
    from torchvision import models

    channels, height, _ = shape
    known = models.list_models(module=models)  # others do not classify images, and download a part of themselves
    if name not in known:
        near = get_close_matches(name.lower(), known, 1, 0)[0]
        raise ConfigError(f"torchvision classifies images with no net model.name={name}; type model.name={near}")
    # In training these would return the logits of further heads, too.
    fixed: Any = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **fixed | options)
    except REFUSALS as error:
        what = f"torchvision makes no model.name={name} with these options ({first_line(error)})"
        raise ConfigError(f"{what}; type model.name=resnet18, or ~model.<option>") from error
    if name.startswith("resnet") and height < SMALL_IMAGE:
        model.set_submodule("conv1", nn.Conv2d(channels, 64, 3, padding=1, bias=False))  # He et al. 2015, 4.2
        model.set_submodule("maxpool", nn.Identity())
        return model
    path, first = next((path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    if first.in_channels != channels:
        same: Any = {key: getattr(first, key) for key in ("kernel_size", "stride", "padding", "dilation")}
        model.set_submodule(path, nn.Conv2d(channels, first.out_channels, bias=first.bias is not None, **same))
    return model


def timm_model(model_name: str, shape: ImageShape, classes: Classes, **options: Any) -> nn.Module:
    """timm.create_model(model_name, **options), such as img_size of a vision transformer."""
    try:
        import timm

        fixed: Any = {"pretrained": False, "in_chans": shape[0], "num_classes": classes}
        model: nn.Module = timm.create_model(model_name, **fixed, **options)
    except ImportError:
        raise ConfigError("model=timm needs timm; type pip install timm, or model=resnet18") from None
    except REFUSALS as error:  # or another name
        what = f"timm makes no model.model_name={model_name} with these options ({first_line(error)})"
        raise ConfigError(f"{what}; type model.model_name=resnet18, or ~model.<option>") from error
    return model
