"""Transforms of torchvision's v2 on batches: sample by sample on the device, each with random numbers of its own."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.augment import require_images
from lockstep.data.batch_transforms import BatchTransform
from lockstep.data.random_numbers import random_states_kept, seed_all
from lockstep.data.sample_transforms import apply_transform
from lockstep.errors import ConfigError

SEEDS = 2**53  # whole numbers that a float64 holds
OURS = ("MixUp", "CutMix")


class PerSample(BatchTransform):
    """A transform that changes each sample by itself, masks with their images. A loop: dataset.transforms does the same
    in loader workers."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def plan(self, count: int, generator: torch.Generator) -> Tensor:
        """A seed for each sample."""
        return torch.randint(SEEDS, (count, 1), generator=generator).double()

    def __call__(self, inputs: Tensor, targets: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        changed = []
        try:
            with random_states_kept():
                for sample, target, seed in zip(inputs, targets, plan[:, 0].tolist(), strict=True):
                    seed_all(int(seed))
                    changed.append(apply_transform(self.transform, (sample, target)))
        except Exception:  # whatever torchvision raises for samples that are no images
            require_images(inputs, type(self.transform).__name__, "dataset.batch_transforms=[]")
            raise
        if not changed:
            return inputs, targets
        return torch.stack([sample for sample, _ in changed]), torch.stack([target for _, target in changed])


def as_batch_transforms(transforms: Sequence[Any]) -> list[BatchTransform]:
    """What dataset.batch_transforms lists. Raises ConfigError for what cannot change batches alike on all ranks."""
    return [_as_batch_transform(transform) for transform in transforms]


def _as_batch_transform(transform: Any) -> BatchTransform:
    if isinstance(transform, BatchTransform):
        return transform
    name, v2 = type(transform).__name__, sys.modules.get("torchvision.transforms.v2")
    if v2 is None or not isinstance(transform, v2.Transform):
        raise ConfigError(
            f"dataset.batch_transforms has an object of {name}, and lockstep.data.batch_transforms.BatchTransform or a "
            f"transform of torchvision.transforms.v2 is wanted; type dataset.transforms=[...] for what changes a sample"
        )
    if name in OURS:
        raise ConfigError(
            f"{name} of torchvision mixes the samples of one rank, so the number of ranks would change the numbers; "
            f"type dataset.batch_transforms=[{{_target_: lockstep.data.batch_transforms.{name}, alpha: 1.0, "
            f"classes: ${{dataset.classes}}}}]"
        )
    return PerSample(transform)
