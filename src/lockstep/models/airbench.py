"""The small convolutional net of airbench, made to be trained in a few epochs (Jordan 2024, arXiv 2404.00498)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Len
from torch import Tensor, nn

from lockstep.config.schema import Classes, Count, ImageShape
from lockstep.errors import ConfigError
from lockstep.models.base import image_shape

WHITENED = 5000  # training images that the whitening layer is computed from
AT_ONCE = 500  # images whose patches are in memory together
SMALLEST_VARIANCE = 5e-4  # added to that of a patch's direction, so that noise is not blown up
SMALLEST_SIDE = 9  # pixels: the whitening takes one, and each of three blocks halves what is left


def airbench(
    shape: ImageShape,
    classes: Classes,
    widths: Annotated[Sequence[Count], Len(3, 3)],
    views: Literal["one", "mirrored", "mirrored_and_shifted"],
) -> nn.Module:
    """(N, *shape) images -> (N, classes) logits. Raises ConfigError for images of less than 9x9 pixels.

    widths: channels of the three blocks.
    views: views of an image that an evaluation averages the logits over: the image itself; also its mirror image; also
        both of them one pixel up and left, and down and right.
    """
    channels, height, width = image_shape(shape, "airbench")
    if min(height, width) < SMALLEST_SIDE:
        wanted = f"{SMALLEST_SIDE}x{SMALLEST_SIDE}"
        raise ConfigError(
            f"model=airbench needs images of at least {wanted} pixels, not {height}x{width}; type model=mlp"
        )
    return Airbench(channels, classes, widths, views)


class Airbench(nn.Module):
    """Whitening, three blocks, the largest value of each channel, and a linear layer. See `airbench`."""

    samples_wanted = WHITENED

    def __init__(self, channels: int, classes: int, widths: Sequence[int], views: str) -> None:
        super().__init__()
        first, second, third = widths
        self.views = views
        self.whiten = Whitening(channels)
        self.blocks = nn.Sequential(
            OrderedDict[str, nn.Module](
                gelu=nn.GELU(),
                block1=_block(self.whiten.out_channels, first),
                block2=_block(first, second),
                block3=_block(second, third),
                pool=nn.AdaptiveMaxPool2d(1),  # of images of any size
                flatten=nn.Flatten(),
            )
        )
        self.head = nn.Linear(third, classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def set_weights_from(self, inputs: Tensor) -> None:
        """Compute the whitening from training images (N, C, H, W) as the net gets them."""
        self.whiten.set_weights_from(inputs)

    def forward(self, images: Tensor) -> Tensor:
        if self.training or self.views == "one":
            return self._logits(images)
        logits = self._mirrored(images)
        if self.views == "mirrored":
            return logits
        height, width = images.shape[2:]
        padded = F.pad(images, (1, 1, 1, 1), "reflect")
        shifted = self._mirrored(padded[:, :, :height, :width]) + self._mirrored(padded[:, :, 2:, 2:])
        return logits / 2 + shifted / 4

    def _mirrored(self, images: Tensor) -> Tensor:
        return (self._logits(images) + self._logits(images.flip(3))) / 2

    def _logits(self, images: Tensor) -> Tensor:
        features = self.blocks(self.whiten(images))
        logits: Tensor = self.head(features) / features.shape[1]
        return logits


class Whitening(nn.Conv2d):
    """2x2 patches -> their coordinates along the directions in which they vary, of variance 1, and these negated.

    The filters are not trained, the bias is.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 8 * channels, 2)
        self.weight.requires_grad_(False)

    @torch.no_grad()
    def set_weights_from(self, images: Tensor) -> None:
        """images (N, C, H, W), normalised: their mean is taken as 0."""
        total, count = torch.zeros((), dtype=torch.float64, device=images.device), 0
        for some in images.split(AT_ONCE):
            patches = F.unfold(some.double(), 2).transpose(1, 2).flatten(0, 1)
            total = total + patches.T @ patches
            count += len(patches)
        variances, directions = torch.linalg.eigh(total / count)
        filters = (directions / (variances + SMALLEST_VARIANCE).sqrt()).T.reshape(-1, *self.weight.shape[1:])
        self.weight.copy_(torch.cat([filters, -filters]))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with batch norm and GELU. Height and width are halved."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=_convolution(inputs, outputs),
            pool=nn.MaxPool2d(2),
            norm1=_norm(outputs),
            gelu1=nn.GELU(),
            conv2=_convolution(outputs, outputs),
            norm2=_norm(outputs),
            gelu2=nn.GELU(),
        )
    )


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """At first the first outputs are the inputs, as far as there are that many."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight[:inputs].detach())
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    """Running statistics that follow quickly, and a bias but no scale that is trained."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer
