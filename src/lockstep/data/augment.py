"""What changes whole batches on the device: each sample alike on any number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config.schema import Count, Whole
from lockstep.data.partition import generator, random_states_kept, seed_all
from lockstep.errors import ConfigError
from lockstep.text import first_line

BLOCK = 2**16  # places of an epoch whose random numbers are drawn at once
FLIPS = 7  # folded into the seed of what alternating flips mirror first


class Places(NamedTuple):
    """Where the samples of a batch stand.

    seed: of the run. start: samples of the epoch before the first global batch. samples: of the data set.
    places: (n,) int64 on the device, of each sample in its epoch. numbers: (n,) of each sample in the data set.
    """

    seed: int
    epoch: int
    start: int
    samples: int
    places: Tensor
    numbers: Tensor


class Draws:
    """Rows of random numbers by the place of a sample in its epoch, made for BLOCK places at once, on the device."""

    def __init__(self, high: Sequence[int]) -> None:
        self.high, self.known = tuple(high), dict[tuple[int, int], Tensor]()

    def __call__(self, where: Places) -> Tensor:
        """(n, len(high)) int64, each column from 0 to below its `high`."""
        first, last = where.start // BLOCK, (where.start + 2 * BLOCK) // BLOCK
        wanted = [(where.epoch, block) for block in range(first, last)]
        self.known = {key: self.known[key] if key in self.known else self._block(where, key[1]) for key in wanted}
        return torch.cat([self.known[key] for key in wanted]).index_select(0, where.places - first * BLOCK)

    def _block(self, where: Places, block: int) -> Tensor:
        draw = generator(where.seed, where.epoch, block)
        columns = [torch.randint(high, (BLOCK,), generator=draw) for high in self.high]
        return torch.stack(columns, 1).to(where.places.device)


@dataclass(kw_only=True)
class ShiftFlip:
    """Random shifts by up to `pad` pixels, and mirror images, of images (N, C, H, W). Beyond the edge pixels are 0.

    flip: "alternating" mirrors half of the images in an epoch and the others in the next, so that two epochs have each
    image both ways (Jordan 2024, arXiv:2404.00498).
    sizes: pixels of a side in equal parts of a training of `epochs` epochs (progressive resizing, Howard 2018).
    """

    epochs: Count
    pad: Whole = 0
    flip: bool | Literal["alternating"] = False
    sizes: list[Count] | None = None

    def __post_init__(self) -> None:
        self.draws = Draws([2 * self.pad + 1, 2 * self.pad + 1, 2])
        self.first: Tensor | None = None  # 1 for images that alternating flips mirror in even epochs

    def __call__(self, images: Tensor, where: Places) -> Tensor:
        """uint8 or float images on the device -> the same, moved."""
        if images.dim() != 4:
            what = f"loader.augment moves images, and a sample has the shape {list(images.shape[1:])}"
            raise ConfigError(f"{what}; type loader.augment=null")
        dy, dx, mirrored = self.draws(where).unbind(1)
        if self.flip == "alternating":
            if self.first is None:
                first = torch.randint(0, 2, (where.samples,), generator=generator(where.seed, FLIPS))
                self.first = first.to(images.device)
            mirrored = self.first.index_select(0, where.numbers) ^ (where.epoch % 2)
        if self.pad:
            _, _, height, width = images.shape
            windows = F.pad(images, [self.pad] * 4).unfold(2, height, 1).unfold(3, width, 1)
            images = windows[torch.arange(len(images), device=images.device), :, dy, dx]
        return torch.where(mirrored.bool()[:, None, None, None], images.flip(3), images) if self.flip else images

    def resized(self, images: Tensor, epoch: int) -> Tensor:
        """Images of floats, in the size of their epoch."""
        if self.sizes is None:
            return images
        size = self.sizes[min(((epoch + 1) * len(self.sizes) - 1) // self.epochs, len(self.sizes) - 1)]
        wide = images.to(torch.promote_types(images.dtype, torch.float32))  # a CPU scales no half numbers
        return F.interpolate(wide, (size, size), mode="bilinear", antialias=True).to(images.dtype)


class BatchWide:
    """A transform of a whole batch, such as torchvision's v2.MixUp and v2.CutMix, alike on all ranks.

    These take one draw for a batch, and mix each sample with the one before it. So all ranks are seeded alike, each
    loads the sample before its part, too, and its row is dropped after the transform. Of several transforms the second
    one mixes in what the first has mixed, and so on.

    before: samples that have to be loaded before a part.
    """

    def __init__(self, transform: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self.transform = transform
        self.before = _leaves(transform)

    def __call__(self, inputs: Any, targets: Any, seed: int) -> tuple[Any, Any]:
        """inputs, targets: of the samples before the part, and of the part."""
        with random_states_kept():
            seed_all(seed)
            try:
                return self.transform(inputs, targets)
            except (TypeError, ValueError) as error:
                what = f"{type(self.transform).__name__} does not take these batches ({first_line(error)})"
                raise ConfigError(f"loader.batch_transforms: {what}; type loader.batch_transforms=[]") from error


def _leaves(transform: Any) -> int:
    """How many transforms this one is at most, as v2.Compose is several."""
    return sum(map(_leaves, getattr(transform, "transforms", ()))) or 1
