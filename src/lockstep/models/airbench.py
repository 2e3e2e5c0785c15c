"""The small convolutional net of airbench, made to be trained in a few epochs (Jordan 2024, arXiv 2404.00498)."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Len
from torch import Tensor, nn

from lockstep.config.schema import Classes, Count, ImageShape
from lockstep.errors import ConfigError

SMALLEST_VARIANCE = 5e-4  # added to that of a patch's direction, so that noise is not blown up
SMALLEST_SIDE = 9  # pixels: the whitening takes one, and each of three blocks halves what is left


class Airbench(nn.Module):
    """Whitening, three blocks, the largest value of each channel, and a linear layer: (N, *shape) -> (N, classes).

    widths: channels of the three blocks. views: of an image, over which an evaluation averages the logits: itself; also
    its mirror image; also both of them one pixel up and left, and down and right.

    Raises ConfigError for images of less than 9x9 pixels.
    """

    samples_wanted = 5000  # for the whitening

    def __init__(
        self,
        shape: ImageShape,
        classes: Classes,
        widths: Annotated[Sequence[Count], Len(3, 3)],
        views: Literal["one", "mirrored", "mirrored_and_shifted"],
    ) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < SMALLEST_SIDE:
            what = f"model=airbench needs images of at least {SMALLEST_SIDE}x{SMALLEST_SIDE} pixels"
            raise ConfigError(f"{what}, not {height}x{width}; type model=mlp")
        self.views = views
        self.whiten = Whitening(channels)
        pairs = pairwise([self.whiten.out_channels, *widths])
        blocks = {f"block{number}": _block(*pair) for number, pair in enumerate(pairs, start=1)}
        pool, flatten = nn.AdaptiveMaxPool2d(1), nn.Flatten()  # of images of any size
        self.blocks = nn.Sequential(OrderedDict[str, nn.Module](gelu=nn.GELU(), **blocks, pool=pool, flatten=flatten))
        self.head = nn.Linear(widths[-1], classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def set_weights_from(self, inputs: Tensor) -> None:
        self.whiten.set_weights_from(inputs)

    def forward(self, images: Tensor) -> Tensor:
        if self.training or self.views == "one":
            return self._logits(images)
        logits = self._mirrored(images)
        if self.views == "mirrored":
            return logits
        padded = F.pad(images, (1, 1, 1, 1), "reflect")
        shifted = self._mirrored(padded[:, :, :-2, :-2]) + self._mirrored(padded[:, :, 2:, 2:])
        return logits / 2 + shifted / 4

    def _mirrored(self, images: Tensor) -> Tensor:
        return (self._logits(images) + self._logits(images.flip(3))) / 2

    def _logits(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.whiten(images))) / self.head.in_features  # type: ignore[no-any-return]


class Whitening(nn.Conv2d):
    """2x2 patches -> their coordinates along the directions in which they vary, of variance 1, and these negated. The
    filters are not trained, the bias is."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 8 * channels, 2)
        self.weight.requires_grad_(False)

    @torch.no_grad()
    def set_weights_from(self, images: Tensor) -> None:
        """images (N, C, H, W), normalised: their mean is taken as 0."""
        total, count = torch.zeros((), dtype=torch.float64, device=images.device), 0
        for some in images.split(500):  # less memory
            patches = F.unfold(some.double(), 2).transpose(1, 2).flatten(0, 1)
            total = total + patches.T @ patches
            count += len(patches)
        variances, directions = torch.linalg.eigh(total / count)
        filters = (directions / (variances + SMALLEST_VARIANCE).sqrt()).T.reshape(-1, *self.weight.shape[1:])
        self.weight.copy_(torch.cat([filters, -filters]))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with batch norm and GELU. Height and width are halved. At first the first outputs of a
    convolution are its inputs, as far as there are that many. The running statistics follow quickly, and of batch norm
    the bias is trained, but not the scale."""
    layers = OrderedDict[str, nn.Module]()
    for number, width in enumerate((inputs, outputs), start=1):
        layers[f"conv{number}"] = convolution = nn.Conv2d(width, outputs, 3, padding=1, bias=False)
        nn.init.dirac_(convolution.weight[:width].detach())
        if number == 1:
            layers["pool"] = nn.MaxPool2d(2)
        layers[f"norm{number}"] = norm = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
        norm.weight.requires_grad_(False)
        layers[f"gelu{number}"] = nn.GELU()
    return nn.Sequential(layers)
