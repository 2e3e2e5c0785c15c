"""What changes whole batches on the device: each sample alike on any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config.schema import Count, Whole
from lockstep.data.partition import fold_in
from lockstep.errors import ConfigError

FLIPS = 7  # folded into the seed of what alternating flips mirror first


def drawn_at(places: Tensor, high: Sequence[int], seed: int) -> Tensor:
    """(n, len(high)) int64: random numbers from 0 to below each `high`, which `seed` and the places (n,) alone decide:
    splitmix64 (Steele et al. 2014), so there is no state to keep, and none of a GPU to wait for."""
    values = places[:, None] * len(high) + torch.arange(len(high), device=places.device)
    values = values * -7046029254386353131 + seed
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        values = (values ^ (values >> shift & 2 ** (64 - shift) - 1)) * factor
    columns = (values >> 1 & 2**62 - 1).unbind(1)
    return torch.stack([column % most for column, most in zip(columns, high, strict=True)], 1)


@dataclass(kw_only=True)
class ShiftFlip:
    """Random shifts by up to `pad` pixels, and mirror images, of images (N, C, H, W), which go on mirrored.
    flip: "alternating" mirrors half of the images in an epoch and the others in the next, so that two epochs have each
    image both ways (Jordan 2024, arXiv:2404.00498).
    sizes: pixels of a side in equal parts of a training of `epochs` epochs (progressive resizing, Howard 2018)."""

    epochs: Count
    pad: Whole = 0
    flip: bool | Literal["alternating"] = False
    sizes: list[Count] | None = None

    def __call__(self, images: Tensor, seed: int, epoch: int, places: Tensor, numbers: Tensor) -> Tensor:
        """uint8 or float images on the device -> the same, moved. seed: of the run. places, numbers: (n,) int64 on the
        device: where in the epoch the samples stand, and their numbers in the data set."""
        if images.dim() != 4:
            what = f"loader.augment moves images, and a sample has the shape {list(images.shape[1:])}"
            raise ConfigError(f"{what}; type loader.augment=null")
        most = 2 * self.pad + 1
        dy, dx, mirrored = drawn_at(places, [most, most, 2], fold_in(seed, epoch)).unbind(1)
        if self.flip == "alternating":
            mirrored = drawn_at(numbers, [2], fold_in(seed, 0, FLIPS))[:, 0] ^ (epoch % 2)
        if self.pad:
            _, _, height, width = images.shape
            rows, columns = (_beyond_edges(side, self.pad, images.device) for side in (height, width))
            padded = images.index_select(2, rows).index_select(3, columns)
            windows = padded.unfold(2, height, 1).unfold(3, width, 1)
            images = windows[torch.arange(len(images), device=images.device), :, dy, dx]
        return torch.where(mirrored.bool()[:, None, None, None], images.flip(3), images) if self.flip else images

    def resized(self, images: Tensor, epoch: int) -> Tensor:
        """Images of floats, in the size of their epoch."""
        if self.sizes is None:
            return images
        size = self.sizes[min(((epoch + 1) * len(self.sizes) - 1) // self.epochs, len(self.sizes) - 1)]
        wide = images.to(torch.promote_types(images.dtype, torch.float32))  # a CPU scales no half numbers
        return F.interpolate(wide, (size, size), mode="bilinear", antialias=True).to(images.dtype)


def _beyond_edges(side: int, pad: int, device: torch.device) -> Tensor:
    """(side + 2 pad,) int64: which pixels stand where an image goes on as its mirror image. F.pad takes no bytes."""
    period = max(2 * side - 2, 1)
    places = torch.arange(-pad, side + pad, device=device) % period
    return torch.minimum(places, period - places)


def leaves(transform: Any) -> int:
    """How many transforms a batch-wide one is at most, as v2.Compose is several."""
    return sum(map(leaves, getattr(transform, "transforms", ()))) or 1
