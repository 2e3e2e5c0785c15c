"""What changes whole batches: shifts, mirror images, sizes, MixUp and CutMix, each sample alike on any ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import Tensor
from torchvision.transforms import v2

from lockstep.config.check import instantiate
from lockstep.data.augment import BatchWide, Places, ShiftFlip, drawn_at
from lockstep.data.build import build_data, completed
from lockstep.data.loader import MIX, Loader
from lockstep.data.partition import fold_in
from lockstep.data.source import Tensors
from support.configs import composed
from support.loaders import SEED, Position, loader

COUNT, BATCH = 23, 8  # the last batch has 7 samples
IMAGES = torch.randint(0, 256, (COUNT, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(COUNT) % 3
Batches = list[tuple[Tensor, Tensor]]


def numbers_for(places: Tensor, pad: int, epoch: int = 0) -> Tensor:
    return drawn_at(places, [2 * pad + 1, 2 * pad + 1, 2], fold_in(SEED, epoch))


def global_batches(read: Callable[..., Loader], size: int = 1, micro: int = 1, epoch: int = 1) -> Batches:
    """(inputs, targets) of the batches of an epoch, put together from all ranks."""
    ranks = [read(rank, size, micro).batches(Position(epoch)) for rank in range(size)]
    found = []
    for _ in range(-(-COUNT // BATCH)):
        loaded = sorted((part for rank in ranks for part in next(rank).parts), key=lambda part: part.number)
        found.append((torch.cat([part.inputs for part in loaded]), torch.cat([part.targets for part in loaded])))
    return found


def reading(augment: Any = None, *transforms: Any) -> Callable[..., Loader]:
    """rank, size, micro-batches -> a loader of float64 pixels from 0 to 1."""

    def read(rank: int, size: int, micro: int) -> Loader:
        options = {"augment": augment, "transforms": [BatchWide(one) for one in transforms], "batch": BATCH}
        found = loader(Tensors(IMAGES, LABELS), rank, size, micro, mean=[0.0], **options)
        found.converter.normalises = False
        return found

    return read


def moved(image: Tensor, pad: int, dy: int, dx: int, mirrored: bool) -> Tensor:
    """One image (C, H, W), as plain torch moves it."""
    _, height, width = image.shape
    window = F.pad(image.float(), [pad] * 4, "reflect").to(image.dtype)[:, dy : dy + height, dx : dx + width]
    return window.flip(2) if mirrored else window


@pytest.mark.parametrize("flip", [True, False])
def test_each_image_is_shifted_and_mirrored_by_its_own_numbers(flip: bool) -> None:
    augment, places = ShiftFlip(epochs=1, pad=2, flip=flip), torch.arange(5, 5 + COUNT)
    found = augment(IMAGES, Places(SEED, 0, places, places))
    for n, (dy, dx, mirrored) in enumerate(numbers_for(places, 2).tolist()):
        assert found[n].equal(moved(IMAGES[n], 2, dy, dx, flip and bool(mirrored)))
    assert found[3:9].equal(augment(IMAGES[3:9], Places(SEED, 0, places[3:9], places[3:9])))  # in any part of a batch


def test_random_numbers_depend_on_place_and_epoch_and_on_nothing_else() -> None:
    places = torch.arange(20_000)
    draws, other = numbers_for(places, 9), numbers_for(places, 9, epoch=1)
    assert draws[5000:5010].equal(numbers_for(places[5000:5010], 9))
    columns = torch.cat([draws[1:], draws[:-1], other[1:]], 1).T.double()  # those of neighbours and of another epoch
    assert (torch.corrcoef(columns) - torch.eye(9)).abs().max() < 0.04
    assert chisquare((draws[:, 0] * 19 + draws[:, 1]).bincount(minlength=361)).pvalue > 1e-3
    assert chisquare(draws[:, 2].bincount(minlength=2)).pvalue > 1e-3


def test_alternating_mirror_images_show_each_image_both_ways_in_two_epochs() -> None:
    augment, shuffled = ShiftFlip(epochs=4, flip="alternating"), torch.randperm(COUNT)

    def mirrored(epoch: int) -> list[bool]:
        found = augment(IMAGES[shuffled], Places(SEED, epoch, torch.arange(COUNT), shuffled))
        flipped = found.eq(IMAGES[shuffled].flip(3)).flatten(1).all(1)
        assert (flipped | found.eq(IMAGES[shuffled]).flatten(1).all(1)).all()
        return flipped[shuffled.argsort()].tolist()

    even, odd = mirrored(0), mirrored(1)
    assert 0 < sum(even) < COUNT
    assert odd == [not one for one in even]
    assert mirrored(2) == even


def test_images_grow_with_the_epochs() -> None:
    """[4, 6, 8] over 6 epochs: two of each. The pixels are those of torchvision."""
    augment, images = ShiftFlip(epochs=6, sizes=[4, 6, 8]), IMAGES.double()
    for epoch, size in enumerate((4, 4, 6, 6, 8, 8, 8)):  # a 7th epoch is like the last one
        expected = v2.functional.resize(images, [size, size], antialias=True)
        torch.testing.assert_close(augment.resized(images, epoch), expected, rtol=0, atol=1e-9)
    few = ShiftFlip(epochs=2, sizes=[4, 6, 8])  # the last size is always reached
    assert [few.resized(images, epoch).shape[-1] for epoch in (0, 1)] == [6, 8]
    assert augment.resized(images.bfloat16(), 0).dtype == torch.bfloat16
    grown = reading(ShiftFlip(epochs=2, sizes=[4, 8]))
    assert [len(global_batches(grown, epoch=epoch)[0][0][0, 0]) for epoch in (0, 1)] == [4, 8]


MIXES = [v2.MixUp(alpha=0.4, num_classes=3), v2.CutMix(alpha=1.0, num_classes=3)]


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 3), (3, 2), (9, 1)])
@pytest.mark.parametrize("transforms", [MIXES[:1], MIXES[1:], MIXES, [v2.Compose(MIXES)], [v2.RandomChoice(MIXES)]])
def test_a_batch_is_what_torchvision_makes_of_the_whole_batch(transforms: Any, size: int, micro: int) -> None:
    found, plain = global_batches(reading(None, *transforms), size, micro), global_batches(reading())
    for number, (one, mixed) in enumerate(zip(found, plain, strict=True)):
        for place, transform in enumerate(transforms):
            torch.manual_seed(fold_in(SEED, 1, number * BATCH, MIX, place))
            mixed = transform(*mixed)
        torch.testing.assert_close(one[0], mixed[0], rtol=0, atol=1e-15)
        torch.testing.assert_close(one[1].double(), mixed[1].double(), rtol=0, atol=1e-7)


def test_classes_of_mixes_are_told_by_the_data() -> None:
    node = "{_target_:torchvision.transforms.v2.MixUp,num_classes:null}"
    choice = f"{{_target_:torchvision.transforms.v2.RandomChoice,transforms:[{node}]}}"
    config = composed(f"loader.batch_transforms=[{node},{choice}]")
    one, two = instantiate(completed(config, build_data(config)).loader.batch_transforms)
    assert [one.num_classes, two.transforms[0].num_classes] == [10, 10]
