"""Transforms of a whole batch on the device, targets included: MixUp, CutMix, random erasing.

To add one: a class derived from `BatchTransform`, and its node in `dataset.batch_transforms`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.augment import require_images
from lockstep.data.partition import generator
from lockstep.errors import ConfigError

CHOICE = 1  # folded into seeds


class BatchTransform:
    """Changes inputs and targets of a global batch, of which every rank has some samples.

    `plan` draws all random numbers for the global batch, so it is the same on every rank. `__call__` gets this rank's
    samples with their rows of the plan: what happens to a sample must not depend on which others are there.

    mixes: whether a sample is mixed with the one before it in the global batch; the first follows the last. Then
    `__call__` gets one sample more, the one before the first, and returns as many as shall be trained on.
    """

    mixes = False

    def plan(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, values) float64 on the CPU: the random numbers of each of the `count` samples of a global batch."""
        raise NotImplementedError

    def __call__(self, inputs: Tensor, targets: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        """inputs (N, ...) and targets (N, ...) on the device, as the model and the task take them, and their plan."""
        raise NotImplementedError


class MixUp(BatchTransform):
    """Each sample becomes ratio * itself + (1 - ratio) * the one before (Zhang et al. 2018), and its target too.

    ratio is drawn from Beta(alpha, alpha), one for a global batch, as in torchvision. Targets become probabilities
    (N, classes).
    """

    mixes = True

    def __init__(self, alpha: float, classes: int) -> None:
        self.alpha, self.classes = alpha, classes

    def plan(self, count: int, generator: torch.Generator) -> Tensor:
        return draw_beta(self.alpha, generator).expand(count, 1)

    def __call__(self, inputs: Tensor, targets: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            found = f"{inputs.dtype}" if isinstance(inputs, Tensor) else "several inputs"
            raise ConfigError(
                f"MixUp mixes samples that are one tensor of floats, and these are {found}; "
                f"type dataset.batch_transforms=[]"
            )
        ratio = plan[1:, 0].to(inputs.device, inputs.dtype)
        mixed = inputs[:-1].lerp(inputs[1:], like(ratio, inputs))
        return mixed, mix_targets(targets, ratio, self.classes)


class CutMix(BatchTransform):
    """A rectangle of the image before is pasted into each image (Yun et al. 2019); targets are mixed by its area.

    The rectangle is one for a global batch: its area is 1 - ratio of the image, ratio from Beta(alpha, alpha), before
    it is cut at the edges. Images are (N, C, H, W).
    """

    mixes = True

    def __init__(self, alpha: float, classes: int) -> None:
        self.alpha, self.classes = alpha, classes

    def plan(self, count: int, generator: torch.Generator) -> Tensor:
        ratio = draw_beta(self.alpha, generator)
        centre = torch.rand(2, generator=generator, dtype=torch.float64)
        return torch.cat([ratio, centre]).expand(count, 3)

    def __call__(self, inputs: Tensor, targets: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        require_images(inputs, "CutMix", "dataset.batch_transforms=[]")
        ratio, row, column = plan[0].tolist()
        height, width = inputs.shape[2:]
        half = 0.5 * (1 - ratio) ** 0.5
        top, bottom = (min(max(round((row + side) * height), 0), height) for side in (-half, half))
        left, right = (min(max(round((column + side) * width), 0), width) for side in (-half, half))
        mixed = inputs[1:].clone()
        mixed[:, :, top:bottom, left:right] = inputs[:-1, :, top:bottom, left:right]
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        return mixed, mix_targets(targets, inputs.new_full((len(mixed),), kept), self.classes)


class RandomErasing(BatchTransform):
    """With probability p a rectangle of an image becomes 0 (Zhong et al. 2020): the mean of normalised images.

    scale: least and largest area of the rectangle as a share of the image. ratio: of its height to its width.
    """

    def __init__(self, p: float, scale: Sequence[float] = (0.02, 0.33), ratio: Sequence[float] = (0.3, 3.3)) -> None:
        self.p, self.scale, self.ratio = p, scale, ratio

    def plan(self, count: int, generator: torch.Generator) -> Tensor:
        """Of each sample 1 to erase, height, width, top and left as shares of the image."""
        drawn = torch.rand(count, 5, generator=generator, dtype=torch.float64)
        area = self.scale[0] + (self.scale[1] - self.scale[0]) * drawn[:, 1]
        low, high = (torch.tensor(side, dtype=torch.float64).log() for side in self.ratio)
        shape = (low + (high - low) * drawn[:, 2]).exp()
        height, width = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)
        erased = (drawn[:, 0] < self.p).double()
        return torch.stack([erased, height, width, drawn[:, 3] * (1 - height), drawn[:, 4] * (1 - width)], dim=1)

    def __call__(self, inputs: Tensor, targets: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        require_images(inputs, "RandomErasing", "dataset.batch_transforms=[]")
        erased, height, width, top, left = (column[:, None] for column in plan.to(inputs.device).unbind(1))
        rows = (torch.arange(inputs.shape[2], device=inputs.device) + 0.5) / inputs.shape[2]
        columns = (torch.arange(inputs.shape[3], device=inputs.device) + 0.5) / inputs.shape[3]
        in_rows = (rows >= top) & (rows < top + height) & erased.bool()
        in_columns = (columns >= left) & (columns < left + width)
        return inputs.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0), targets


class OneOf(BatchTransform):
    """One of several transforms, drawn for each global batch. Transforms of torchvision's v2 may be among them."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        from lockstep.data.torchvision_batch import as_batch_transforms  # which imports this module

        transforms = as_batch_transforms(transforms)
        if len({transform.mixes for transform in transforms}) != 1:
            raise ConfigError(
                "OneOf wants one transform or more that all mix samples, or that all mix none; "
                "type dataset.batch_transforms=[] or take the others out of it"
            )
        self.transforms, self.mixes = transforms, transforms[0].mixes

    def plan(self, count: int, generator: torch.Generator) -> Tensor:
        """The number of the transform, and its plan."""
        number = int(torch.randint(len(self.transforms), (), generator=generator))
        plan = self.transforms[number].plan(count, generator)
        return torch.cat([plan.new_full((count, 1), number), plan], dim=1)

    def __call__(self, inputs: Tensor, targets: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        if len(plan) == 0:  # a rank without samples; those that mix always have one more
            return inputs, targets
        return self.transforms[int(plan[0, 0])](inputs, targets, plan[:, 1:])


class BatchTransforms:
    """Several transforms, one after the other. Empty: nothing is drawn and nothing is changed."""

    def __init__(self, transforms: Sequence[BatchTransform]) -> None:
        self.transforms = transforms
        self.before = sum(transform.mixes for transform in transforms)

    def __bool__(self) -> bool:
        return bool(self.transforms)

    def with_samples_before(self, positions: Tensor, count: int) -> Tensor:
        """Positions (N,) in a global batch of `count`, and in front of them as many more as mixing needs.

        positions: neighbours, as strategies cut a batch. Without any, those of the first sample stand in.
        """
        if not self.before:
            return positions
        first = int(positions[0]) if len(positions) else 0
        return torch.cat([torch.arange(first - self.before, first) % count, positions])

    def plans(self, count: int, *numbers: int) -> list[Tensor]:
        """The plan of each transform for a global batch. numbers: seed, epoch and place of the batch."""
        return [
            transform.plan(count, generator(*numbers, place + CHOICE))
            for place, transform in enumerate(self.transforms)
        ]

    def __call__(self, inputs: Tensor, targets: Tensor, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """plans: the rows of these samples. Returns the samples without those before them."""
        for transform, plan in zip(self.transforms, plans, strict=True):
            inputs, targets = transform(inputs, targets, plan[len(plan) - len(inputs) :])
        return inputs, targets


def draw_beta(alpha: float, generator: torch.Generator) -> Tensor:
    """(1,) float64 from Beta(alpha, alpha), by the ratio of two gamma variates."""
    gammas = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=generator)
    gammas = gammas.clamp(min=torch.finfo(torch.float64).tiny)  # with a small alpha both can be 0
    return gammas[:1] / gammas.sum()


def mix_targets(targets: Tensor, ratio: Tensor, classes: int) -> Tensor:
    """Targets (N + 1,) or probabilities (N + 1, classes), ratio (N,) -> probabilities (N, classes).

    Raises ConfigError for targets of another form, such as masks.
    """
    if not isinstance(targets, Tensor) or targets.dim() != (2 if targets.is_floating_point() else 1):
        found = f"{targets.dtype} {list(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise ConfigError(
            f"MixUp and CutMix mix class numbers (N,) or probabilities (N, classes), and the targets are {found}; "
            f"type dataset.batch_transforms=[]"
        )
    if targets.dim() == 1:
        targets = _one_hot(targets, classes)
    probabilities = targets.to(ratio.dtype)
    return probabilities[:-1].lerp(probabilities[1:], ratio[:, None])


def _one_hot(targets: Tensor, classes: int) -> Tensor:
    """Raises ConfigError for numbers that are none of the classes, such as the label -100 that a loss leaves out."""
    try:
        return F.one_hot(targets, classes)
    except RuntimeError as error:
        raise ConfigError(
            f"MixUp and CutMix mix the classes 0 to {classes - 1}, and the targets are {int(targets.min())} to "
            f"{int(targets.max())}; type dataset.batch_transforms=[]"
        ) from error


def like(values: Tensor, samples: Tensor) -> Tensor:
    """One number per sample (N,), shaped so that it broadcasts over samples (N, ...)."""
    return values.view(-1, *[1] * (samples.dim() - 1))
