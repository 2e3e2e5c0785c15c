"""Random shifts and mirror images of a whole batch at once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.data.nested import map_tensors
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Augment:
    """Random shifts by up to `pad` pixels and, with `flip`, random mirror images.

    The random numbers are drawn for the global batch and cut like it, so a sample is augmented alike at any world size.
    """

    pad: int = 0
    flip: bool = False

    @property
    def enabled(self) -> bool:
        return bool(self.pad or self.flip)

    def plan(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, 3) int64: vertical shift, horizontal shift, and 1 for a mirror image, of each sample."""
        shifts = torch.randint(0, 2 * self.pad + 1, (count, 2), generator=generator)
        flips = torch.randint(0, 2, (count, 1), generator=generator) * int(self.flip)
        return torch.cat([shifts, flips], dim=1)

    def __call__(self, images: Tensor, plan: Tensor) -> Tensor:
        """images (N, C, H, W) and their plan (N, 3), on one device -> images. Pixels from beyond the edge are 0.

        Raises ConfigError for samples that are no images.
        """
        require_images(images, "dataset.augment", "dataset.augment.pad=0 dataset.augment.flip=false")
        if not self.pad:  # whole rows are copied, which takes a twentieth of the time of looking up each pixel
            as_they_are_and_flipped = torch.cat([images, images.flip(3)])
            return as_they_are_and_flipped.index_select(0, plan[:, 2] * len(images) + _numbers(images))
        _, _, height, width = images.shape
        rows = plan[:, 0, None] + torch.arange(height, device=images.device)
        columns = plan[:, 1, None] + torch.arange(width, device=images.device)
        columns = torch.where(plan[:, 2, None].bool(), columns.flip(1), columns)
        padded = torch.nn.functional.pad(images, [self.pad] * 4)
        picked = padded[_numbers(images)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2)

    def move_with(self, images: Tensor, targets: Any, plan: Tensor) -> Any:
        """Targets with the height and width of their images, such as masks (N, H, W), are changed as `__call__` changes
        the images; others stay as they are. Beyond the edge masks are 0, as in torchvision.
        """

        def moved(target: Tensor) -> Tensor:
            if target.dim() < 3 or target.shape[-2:] != images.shape[-2:]:
                return target
            return self(target.flatten(1, -3) if target.dim() > 3 else target[:, None], plan).reshape(target.shape)

        return map_tensors(moved, targets)


def require_images(inputs: Any, what: str, advice: str) -> None:
    """Raise ConfigError if `inputs` are not one tensor (N, C, H, W). what: is for images. advice: what to type."""
    if isinstance(inputs, Tensor) and inputs.dim() == 4:
        return
    found = f"the shape {list(inputs.shape[1:])}" if isinstance(inputs, Tensor) else "several inputs"
    raise ConfigError(f"{what} is for images (channels, height, width), and the samples have {found}; type {advice}")


def _numbers(images: Tensor) -> Tensor:
    return torch.arange(len(images), device=images.device)
