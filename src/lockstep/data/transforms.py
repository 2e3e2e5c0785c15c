"""What changes samples: a transform of one sample, shifts and mirror images, and transforms of whole batches.

`dataset.transforms` change one sample where it is read. `dataset.augment` and `dataset.batch_transforms` change a batch
on the device, targets included. To add one of these: a class derived from `BatchTransform`, and its node in
`dataset.batch_transforms`.
"""

import logging
import sys
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le, Len
from torch import Tensor

from lockstep.compat import is_of_torchvisions_first, moves_pixels, standard_gamma
from lockstep.config.schema import Classes, Positive
from lockstep.data.dataset import (
    TARGET_KEYS,
    TOLERANCE,
    map_tensors,
    on_device,
    parts_of,
    tensors_in,
    values_in,
    with_parts,
)
from lockstep.data.partition import generator, random_states_kept, seed_all
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

PLACES = {  # words in the name of what stands for places in an image: the type in which torchvision moves it
    ("box",): "BoundingBoxes(boxes, format=...",
    ("keypoint", "landmark", "joint", "corner", "polygon", "coord"): "KeyPoints(points",
}
LEAST_SIDE = 5  # of a value that is taken for an image or a mask of another size: smaller ones may be matrices
MASK_MODES = ("1", "L", "P", "I", "I;16")  # of Pillow, with one number for a pixel
CHOICE, FLIPS = 1, 2**20  # folded into seeds
SEEDS = 2**53  # whole numbers that a float64 holds


def apply_transform(transform: Callable[..., Any], sample: Any) -> Any:
    """Apply a transform to one sample: one of torchvision's v2 to all of it, any other one to the inputs.

    One of torchvision's v2 changes what belongs to an image with it, in tuples (named ones too), lists, mappings and
    dataclasses. A tensor or an array of the image's height and width is a mask, but another image if it stands among
    the inputs and has the image's shape and type; an image of Pillow with one number for a pixel beside one of another
    mode is a mask too. Raises ConfigError for what would stay behind: an image that is an array, boxes that are plain
    numbers, values (height, width, channels).

    Any other one gets the inputs alone, or the whole sample if that has names. Of torchvision's first generation, which
    takes an image alone, those that move pixels are refused for a sample of which something would stay behind.
    """
    v2 = sys.modules.get("torchvision.transforms.v2")  # who uses it has imported it
    if v2 is None or not isinstance(transform, v2.Transform):
        if is_of_torchvisions_first(transform):
            if type(transform).__name__ == "Compose":
                for inner in transform.transforms:  # type: ignore[attr-defined]
                    sample = apply_transform(inner, sample)
                return sample
            _require_image_alone(transform, sample)
        if not isinstance(sample, tuple | list):
            return transform(sample)
        parts = parts_of(sample) or {}
        return with_parts(sample, parts | dict.fromkeys([*parts][:1], transform(sample[0])))
    if type(transform) is v2.Compose and all(isinstance(inner, v2.Transform) for inner in transform.transforms):
        for inner in transform.transforms:
            sample = apply_transform(inner, sample)
        return sample
    belongings = Belongings(sample, moves_pixels(transform))
    several = (v2.Compose, v2.RandomApply, v2.RandomChoice, v2.RandomOrder, v2.Lambda)
    is_torchvisions = type(transform).__module__.startswith("torchvision.") and not isinstance(transform, several)
    may_be_left = is_torchvisions and isinstance(belongings.image, np.ndarray)
    try:
        changed = transform(belongings.marked(sample))
        is_left = may_be_left and any(value is belongings.image for value in values_in(changed))
    except TypeError:  # some refuse a sample without an image
        if not may_be_left:
            raise
        is_left = True
    if is_left:
        raise ConfigError(
            f"an image is an array of numpy, which {type(transform).__name__} of torchvision leaves as it is; return "
            f"torch.from_numpy(image) with the shape (C, H, W) from __getitem__, or, for (H, W, C), type "
            f"dataset.transforms='[{{_target_:torchvision.transforms.v2.ToImage}}, ...]'"
        )
    return _as_before(sample, changed)


def _require_image_alone(transform: Callable[..., Any], sample: Any) -> None:
    """Raise ConfigError if a transform of torchvision's first generation cannot take `sample`, or parts it."""
    has_names = parts_of(sample) is not None and not isinstance(sample, tuple | list)
    stays = has_names or (moves_pixels(transform) and Belongings(sample, moves=True).has_others(sample))
    if stays:
        name = type(transform).__name__
        raise ConfigError(
            f"torchvision.transforms.{name} takes an image alone, and a sample is "
            f"{'a ' + type(sample).__name__ if has_names else 'an image with a mask, boxes or another image'}; type "
            f"torchvision.transforms.v2.{name}, which changes all that belongs together"
        )


def _as_before(sample: Any, changed: Any) -> Any:
    """What torchvision has changed, in the containers of `sample`: it takes mappings and dataclasses for one value."""
    parts = parts_of(sample)
    if parts is None:
        return changed
    values = parts_of(changed) or {}
    return with_parts(sample, {name: _as_before(part, values[name]) for name, part in parts.items()})


class Belongings:
    """What belongs to the image of a sample, as torchvision's v2 knows it: images and masks that move with it.

    image: the first one among the inputs; None without one.
    moves: whether the transform moves pixels. Then what it would leave behind is refused.
    """

    def __init__(self, sample: Any, moves: bool) -> None:
        self.moves = moves
        inputs = _inputs_of(sample)
        images = [value for value in values_in(inputs) if _is_image(value)]
        flat = [value for value in values_in(inputs) if getattr(value, "ndim", 0) == 2]
        self.image = next(iter(images or flat), None)
        self.has_places = any(hasattr(value, "canvas_size") for value in values_in(sample))  # in torchvision's types

    def marked(self, value: Any, name: str = "", is_target: bool = False, is_top: bool = True) -> Any:
        """`value`, a sample or a part of one called `name`, with what belongs to the image in torchvision's types.

        Mappings and dataclasses become dicts. Raises ConfigError for what would be left behind.
        """
        parts = parts_of(value)
        if self.moves and self.image is not None and not any(hasattr(part, "canvas_size") for part in values_in(value)):
            for words, kind in PLACES.items():
                if any(word in name.lower() for word in words) and any(map(_is_numbers, values_in(value))):
                    self._refuse(name, f"torchvision.tv_tensors.{kind}, canvas_size=(H, W))")
        if parts is None or (isinstance(value, list) and all(isinstance(x, int | float) for x in values_in(value))):
            return self._marked_value(value, name, is_target)
        names_targets = is_top and not isinstance(value, tuple | list)
        marked = {
            key: self.marked(
                part,
                str(key),
                is_target or (key in TARGET_KEYS if names_targets else is_top and place > 0),
                is_top=False,
            )
            for place, (key, part) in enumerate(parts.items())
        }
        return with_parts(value, marked) if isinstance(value, tuple | list) else marked

    def has_others(self, sample: Any) -> bool:
        """Whether a mask, boxes or another image belong to the image."""
        from torchvision import tv_tensors

        found = [
            value
            for value in values_in(self.marked(sample))
            if hasattr(value, "getbands") or isinstance(value, tv_tensors.TVTensor)
        ]
        return self.image is not None and len(found) > 1

    def _marked_value(self, value: Any, name: str, is_target: bool) -> Any:
        from torchvision import tv_tensors

        if value is self.image:  # of plain tensors torchvision changes the first one, which may be another
            return tv_tensors.Image(value) if type(value) is Tensor else value
        if hasattr(value, "getbands"):
            is_mask = value.mode in MASK_MODES and value.mode != getattr(self.image, "mode", None)
            return tv_tensors.Mask(value) if is_mask and _sizes(value)[0] in _sizes(self.image) else value
        is_array = type(value) is Tensor or isinstance(value, np.ndarray)
        if is_array and value.ndim >= 2:
            if not is_target and self._is_twin(value):
                return tv_tensors.Image(value)
            if value.shape[-2:] in _sizes(self.image):
                return tv_tensors.Mask(torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
        if self.moves and self.image is not None and (name.isdigit() or name in TARGET_KEYS):
            self._look_for_places(value)
        if not is_array or value.ndim < 2:
            return value
        last = value.ndim == 3 and tuple(value.shape[:2]) in _sizes(self.image)
        if self.moves and self.image is not None and (last or self._is_scaled(value)):
            what = name if name and not name.isdigit() else "a target"
            form = f"the shape {'(H, W) or (C, H, W)' if last else 'of the image'}"
            self._refuse(f"{what} of the shape {list(value.shape)}", form)
        return value

    def _look_for_places(self, value: Any) -> None:
        """Raise ConfigError, or log a warning, for numbers without a name that may be places in the image."""
        shape = [] if self.has_places else shape_of_places(value)
        if len(shape) > 1:
            self._refuse(
                f"numbers of the shape {shape}, such as boxes or points,",
                'torchvision.tv_tensors.BoundingBoxes or KeyPoints, or numbers of another kind as {"values": ...}',
            )
        if shape:
            warn_of_places(shape[-1], "a transform of torchvision")

    def _refuse(self, what: str, form: str) -> NoReturn:
        raise ConfigError(
            f"a sample has {what} beside its image, which a transform of torchvision moves without it; return {form} "
            f"from __getitem__, or move both there"
        )

    def _is_scaled(self, value: Any) -> bool:
        """Whether a value is larger or smaller than the image, with its sides in the same ratio: a finer image, a
        coarser mask."""
        (height, width), (rows, columns) = _sizes(self.image)[0], value.shape[-2:]
        return bool(min(rows, columns) >= LEAST_SIDE and rows * width == columns * height)

    def _is_twin(self, value: Any) -> bool:
        """Whether a value is a second image, of the first one's shape and type."""
        image = self.image
        if type(value) is not Tensor or not isinstance(image, Tensor) or image.ndim < 3:
            return False
        return value.shape == image.shape and value.dtype == image.dtype


def shape_of_places(value: Any) -> list[int]:
    """The shape of a value if it may be places in an image: (2,), (4,), (N, 2) or (N, 4) that are no probabilities and
    no flags, in a tensor, an array or a list; else []."""
    if not (type(value) is Tensor or isinstance(value, np.ndarray | list)):
        return []
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # rows of several lengths, or an array of objects
        return []
    if numbers.dim() not in (1, 2) or numbers.shape[-1] not in (2, 4) or numbers.is_complex():
        return []
    are_flags = bool(((numbers == 0) | (numbers == 1)).all())
    are_probabilities = bool((numbers >= 0).all() and ((numbers.sum(-1) - 1).abs() < TOLERANCE).all())
    return [] if are_flags or are_probabilities else list(numbers.shape)


@cache
def warn_of_places(numbers: int, what: str) -> None:
    """A line in the log, once."""
    log.warning(
        "a target has %d numbers, and %s moves the pixels of its image: if they are a box or a point, they stay "
        "behind; return torchvision.tv_tensors.BoundingBoxes or KeyPoints, or move both in __getitem__",
        *(numbers, what),
    )


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | int | float)


def _inputs_of(sample: Any) -> Any:
    parts = parts_of(sample)
    if parts is None:
        return sample
    if isinstance(sample, tuple | list):
        return next(iter(parts.values()), None)
    return {name: part for name, part in parts.items() if name not in TARGET_KEYS}


def _is_image(value: Any) -> bool:
    return hasattr(value, "getbands") or (isinstance(value, Tensor | np.ndarray) and value.ndim >= 3)


def _sizes(image: Any) -> list[tuple[int, ...]]:
    """(height, width). Of an array with three dimensions both that it may have: the channels come first or last."""
    if hasattr(image, "getbands"):
        width, height = image.size
        return [(height, width)]
    shape = tuple(getattr(image, "shape", ()))
    is_array = isinstance(image, np.ndarray) and len(shape) == 3
    return [shape[-2:], shape[:2]] if is_array else [shape[-2:]]


def require_images(inputs: Any, what: str, advice: str) -> None:
    """Raise ConfigError if `inputs` are not one tensor (N, C, H, W). what: is for images. advice: what to type."""
    if isinstance(inputs, Tensor) and inputs.dim() == 4:
        return
    found = f"the shape {list(inputs.shape[1:])}" if isinstance(inputs, Tensor) else "several inputs"
    raise ConfigError(f"{what} is for images (channels, height, width), and the samples have {found}; type {advice}")


@dataclass(frozen=True)
class Augment:
    """Random shifts by up to `pad` pixels and, with `flip`, random mirror images; smaller images in early epochs.

    The random numbers are drawn for the global batch and cut like it, so a sample is augmented alike at any world size.

    flip: "alternating" mirrors half of the images in an epoch and the others in the next, so that two epochs have each
    image both ways (Jordan 2024, arXiv:2404.00498).
    sizes: pixels of an image's sides in equal parts of a training of `epochs` epochs (progressive resizing, Howard
    2018); None: images keep their size.
    """

    pad: int = 0
    flip: bool | Literal["alternating"] = False
    sizes: Sequence[int] | None = None
    epochs: int = 1

    @property
    def moves(self) -> bool:
        """Whether `plan` and `__call__` do anything."""
        return bool(self.pad or self.flip)

    def plan(self, count: int, generator: torch.Generator, epoch: int = 0) -> Tensor:
        """(count, 3) int64: vertical shift, horizontal shift, and 1 for a mirror image, of each sample.

        With alternating mirror images the last is 1 in odd epochs: `first_flips` tells what even ones mirror.
        """
        shifts = torch.randint(0, 2 * self.pad + 1, (count, 2), generator=generator)
        flips = torch.randint(0, 2, (count, 1), generator=generator) * bool(self.flip)
        return torch.cat([shifts, flips.fill_(epoch % 2) if self.flip == "alternating" else flips], dim=1)

    def first_flips(self, dataset: Sized, seed: int) -> Tensor | None:
        """(samples,) int64: 1 for those that alternating mirror images mirror in even epochs; None of other ones."""
        if self.flip != "alternating":
            return None
        return torch.randint(0, 2, (len(dataset),), generator=generator(seed, FLIPS))

    def resized(self, images: Tensor, targets: Any, epoch: int) -> Tensor:
        """images (N, C, H, W) of floats, in the size of their epoch. Raises ConfigError for what has no such size."""
        if self.sizes is None:
            return images
        advice = "dataset.augment.sizes=null"
        require_images(images, "dataset.augment.sizes", advice)
        if any(target.dim() > 2 for target in tensors_in(targets)):
            raise ConfigError(f"dataset.augment.sizes is for images that have no masks beside them; type {advice}")
        place = ((epoch + 1) * len(self.sizes) - 1) // self.epochs  # the last epoch has the last size
        size = self.sizes[min(place, len(self.sizes) - 1)]
        if images.shape[2:] == (size, size):
            return images
        wide = images.to(torch.promote_types(images.dtype, torch.float32))  # a CPU scales no half numbers
        return F.interpolate(wide, (size, size), mode="bilinear", antialias=True).to(images.dtype)

    def __call__(self, images: Tensor, plan: Tensor) -> Tensor:
        """images (N, C, H, W) and their plan (N, 3), on one device -> images. Pixels from beyond the edge are 0.

        Raises ConfigError for samples that are no images.
        """
        require_images(images, "dataset.augment", "dataset.augment.pad=0 dataset.augment.flip=false")
        numbers = torch.arange(len(images), device=images.device)
        if not self.pad:  # whole rows are copied, which takes a twentieth of the time of looking up each pixel
            return torch.cat([images, images.flip(3)]).index_select(0, plan[:, 2] * len(images) + numbers)
        _, _, height, width = images.shape
        rows = plan[:, 0, None] + torch.arange(height, device=images.device)
        columns = plan[:, 1, None] + torch.arange(width, device=images.device)
        columns = torch.where(plan[:, 2, None].bool(), columns.flip(1), columns)
        padded = F.pad(images, [self.pad] * 4)
        picked = padded[numbers[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2)

    def move_with(self, images: Tensor, targets: Any, plan: Tensor) -> Any:
        """Targets with the height and width of their images, such as masks (N, H, W), are changed as `__call__` changes
        the images; others stay as they are. Beyond the edge masks are 0, as in torchvision.
        """

        def moved(target: Tensor) -> Tensor:
            if target.dim() == 4 and target.shape[1:3] == images.shape[-2:] != target.shape[-2:]:
                raise ConfigError(
                    f"the targets have the shape {list(target.shape[1:])}, with the channels last, and "
                    f"dataset.augment moves masks (H, W) or (C, H, W); return these from __getitem__, or type "
                    f"dataset.augment.pad=0 dataset.augment.flip=false"
                )
            if target.dim() < 3 or target.shape[-2:] != images.shape[-2:]:
                shape = shape_of_places(target[0]) if len(target) else []
                if shape:
                    warn_of_places(shape[-1], "dataset.augment")
                return target
            return self(target.flatten(1, -3) if target.dim() > 3 else target[:, None], plan).reshape(target.shape)

        return map_tensors(moved, targets)


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

    alpha: the share of an image is drawn from Beta(alpha, alpha).
    """

    mixes = True

    def __init__(self, alpha: Positive, classes: Classes) -> None:
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
        ratio = on_device(plan[1:, 0].to(inputs.dtype), inputs.device)
        mixed = inputs[:-1].lerp(inputs[1:], ratio.view(-1, *[1] * (inputs.dim() - 1)))
        return mixed, mix_targets(targets, ratio, self.classes)


class CutMix(BatchTransform):
    """A rectangle of the image before is pasted into each image (Yun et al. 2019); targets are mixed by its area.

    The rectangle is one for a global batch: its area is 1 - ratio of the image, ratio from Beta(alpha, alpha), before
    it is cut at the edges. Images are (N, C, H, W).

    alpha: the share of an image is drawn from Beta(alpha, alpha).
    """

    mixes = True

    def __init__(self, alpha: Positive, classes: Classes) -> None:
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

    p: probability that a rectangle is erased.
    scale: least and largest area, as a share of the image.
    ratio: least and largest height over width.
    """

    def __init__(
        self,
        p: Annotated[float, Ge(0), Le(1)],
        scale: Annotated[Sequence[Annotated[float, Ge(0), Le(1)]], Len(2, 2)] = (0.02, 0.33),
        ratio: Annotated[Sequence[Positive], Len(2, 2)] = (0.3, 3.3),
    ) -> None:
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
        erased, height, width, top, left = (column[:, None] for column in on_device(plan, inputs.device).unbind(1))
        rows = (torch.arange(inputs.shape[2], device=inputs.device) + 0.5) / inputs.shape[2]
        columns = (torch.arange(inputs.shape[3], device=inputs.device) + 0.5) / inputs.shape[3]
        in_rows = (rows >= top) & (rows < top + height) & erased.bool()
        in_columns = (columns >= left) & (columns < left + width)
        return inputs.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0), targets


class OneOf(BatchTransform):
    """One of several transforms, drawn for each global batch. Transforms of torchvision's v2 may be among them."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        transforms = as_batch_transforms(transforms)
        if len({transform.mixes for transform in transforms}) != 1:
            raise ConfigError(
                "OneOf takes one transform or more that all mix samples, or that all mix none; "
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


class PerSample(BatchTransform):
    """One of torchvision's v2, which changes each sample by itself, masks with their images, with random numbers of its
    own. A loop: dataset.transforms does the same in loader workers.
    """

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
    v2, ours = sys.modules.get("torchvision.transforms.v2"), list[BatchTransform]()
    for transform in transforms:
        name = type(transform).__name__
        if isinstance(transform, BatchTransform):
            ours.append(transform)
        elif v2 is None or not isinstance(transform, v2.Transform):
            raise ConfigError(
                f"dataset.batch_transforms has an object of {name}, and lockstep.data.transforms.BatchTransform or a "
                f"transform of torchvision.transforms.v2 is wanted; type dataset.transforms=[...] for what changes a "
                f"sample"
            )
        elif name in (MixUp.__name__, CutMix.__name__):
            raise ConfigError(
                f"{name} of torchvision mixes the samples of one rank, so the number of ranks would change the "
                f"numbers; type dataset.batch_transforms=[{{_target_: lockstep.data.transforms.{name}, alpha: 1.0, "
                f"classes: ${{dataset.classes}}}}]"
            )
        else:
            ours.append(PerSample(transform))
    return ours


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
    gammas = standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator)
    gammas = gammas.clamp(min=torch.finfo(torch.float64).tiny)  # with a small alpha both can be 0
    return gammas[:1] / gammas.sum()


def mix_targets(targets: Tensor, ratio: Tensor, classes: int) -> Tensor:
    """Targets (N + 1,) or probabilities (N + 1, classes), ratio (N,) -> probabilities (N, classes).

    Raises ConfigError for targets of another form, such as masks, and for numbers that are none of the classes, such as
    the label -100 that a loss leaves out.
    """
    if not isinstance(targets, Tensor) or targets.dim() != (2 if targets.is_floating_point() else 1):
        found = f"{targets.dtype} {list(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise ConfigError(
            f"MixUp and CutMix mix class numbers (N,) or probabilities (N, classes), and the targets are {found}; "
            f"type dataset.batch_transforms=[]"
        )
    if targets.dim() == 1:
        try:
            targets = ratio.new_zeros(len(targets), classes).scatter_(1, targets[:, None], 1)
        except RuntimeError as error:
            raise ConfigError(
                f"MixUp and CutMix mix the classes 0 to {classes - 1}, and the targets are {int(targets.min())} to "
                f"{int(targets.max())}; type dataset.batch_transforms=[]"
            ) from error
    probabilities = targets.to(ratio.dtype)
    return probabilities[:-1].lerp(probabilities[1:], ratio[:, None])
