"""Classification models of timm, untrained. timm is imported when a model is built: it is no requirement."""

import difflib
import importlib.util
from typing import Any

from torch import nn

from lockstep.config.schema import Classes, ImageShape
from lockstep.errors import ConfigError
from lockstep.models.base import image_shape
from lockstep.models.torchvision_model import cannot_take, require_logits


def timm_model(name: str, shape: ImageShape, classes: Classes, **options: Any) -> nn.Module:
    """The model `name` of timm. (N, *shape) -> (N, classes) logits.

    A model that is built for one size of images is built for that of the data. Nothing is downloaded:
    `parameters.init=<file>` starts from other weights. Raises ConfigError for an unknown name, and for a model that
    cannot take such images.
    """
    if importlib.util.find_spec("timm") is None:
        raise ConfigError("model=timm needs timm; type pip install timm, or model=resnet18")
    import timm

    channels, height, width = image_shape(shape, name)
    names = timm.list_models()
    if name not in names:
        close = difflib.get_close_matches(name, names, 1) or ["resnet18"]
        raise ConfigError(f"model.name={name} is no model of timm; type model.name={close[0]}")
    if options.pop("pretrained", False):
        raise ConfigError(
            "model.pretrained=true would download weights; type parameters.init=<a file of weights> "
            "parameters.new_layers=[...]"
        )
    made = {"num_classes": classes, "in_chans": channels, **options}
    try:
        try:
            model: nn.Module = timm.create_model(name, **{"img_size": (height, width), **made})
        except TypeError:  # most convolutional nets take any size, and no such argument
            model = timm.create_model(name, **made)
        require_logits(model, shape, classes)
    except NotImplementedError:  # some need values of their weights, and preflight builds models without
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise cannot_take(name, shape, error) from error
    return model
