"""Applies one transform to one sample: one of torchvision's v2 to all of it, any other one to the inputs."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError

MASK_MODES = ("1", "L", "P", "I", "I;16")  # of Pillow, with one number for a pixel


def apply_transform(transform: Callable[..., Any], sample: Any) -> Any:
    """A transform of torchvision's v2 gets the whole sample, and changes masks and boxes with their image. A tensor or
    an array of the image's height and width is a mask, and so is an image of Pillow with one number for a pixel beside
    one of another mode. Raises ConfigError for an image that is an array if the transform would leave it as it is.

    Any other one gets the inputs alone, or the whole sample if that is a dict.
    """
    v2 = sys.modules.get("torchvision.transforms.v2")  # who uses it has imported it
    if not isinstance(sample, tuple | list):
        return transform(sample)
    if v2 is None or not isinstance(transform, v2.Transform):
        return (transform(sample[0]), *sample[1:])
    image, *others = sample
    if isinstance(image, np.ndarray) and _leaves_arrays(transform, v2):
        name = type(transform).__name__
        raise ConfigError(
            f"an image is an array of numpy, which {name} of torchvision leaves as it is; return "
            f"torch.from_numpy(image) with the shape (C, H, W) from __getitem__, or, for (H, W, C), type "
            f"dataset.transforms='[{{_target_:torchvision.transforms.v2.ToImage}}, ...]'"
        )
    return transform((image, *(_as_mask(value, image) for value in others)))


def _leaves_arrays(transform: Any, v2: Any) -> bool:
    """Whether it is one of torchvision's that change tensors and images of Pillow only."""
    takes = getattr(type(transform), "_transformed_types", None)
    several = (v2.Compose, v2.RandomApply, v2.RandomChoice, v2.RandomOrder, v2.Lambda)
    is_theirs = type(transform).__module__.startswith("torchvision.")
    return is_theirs and not isinstance(transform, several) and takes == v2.Transform._transformed_types


def _as_mask(value: Any, image: Any) -> Any:
    """What has an image's height and width as a mask: torchvision changes no other values with their image."""
    if hasattr(value, "getbands"):
        is_mask = value.mode in MASK_MODES and value.mode != getattr(image, "mode", None)
    else:
        is_mask = (type(value) is Tensor or isinstance(value, np.ndarray)) and value.ndim >= 2
    if not is_mask or not any(size in _sizes(image) for size in _sizes(value)[:1]):
        return value
    from torchvision.tv_tensors import Mask

    return Mask(torch.from_numpy(value) if isinstance(value, np.ndarray) else value)


def _sizes(image: Any) -> list[tuple[int, ...]]:
    """(height, width). Of an array with three dimensions both that it may have: the channels come first or last."""
    if hasattr(image, "getbands"):
        width, height = image.size
        return [(height, width)]
    shape = tuple(getattr(image, "shape", ()))
    is_array = isinstance(image, np.ndarray) and len(shape) == 3
    return [shape[-2:], shape[:2]] if is_array else [shape[-2:]]
