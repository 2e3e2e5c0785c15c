"""What a model can be built for."""

from collections.abc import Sequence

from lockstep.errors import ConfigError


def image_shape(shape: Sequence[int], model: str) -> tuple[int, int, int]:
    """(channels, height, width). Raises ConfigError if the samples are not images."""
    if len(shape) != 3:
        raise ConfigError(
            f"model={model} needs images, and the samples of this data set have shape {list(shape)}; "
            f"type model=mlp or model=linear"
        )
    channels, height, width = shape
    return channels, height, width
