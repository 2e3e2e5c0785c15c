"""Random shifts and mirror images."""

from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch

from lockstep.data.dataset import InMemoryDataset
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import micro_batch_parts
from lockstep.data.transforms import Augment
from lockstep.errors import ConfigError
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

IMAGES = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_a_shift_moves_zeros_in_and_a_flip_mirrors() -> None:
    shifted = Augment(pad=1)(IMAGES, torch.tensor([[2, 1, 0]] * 12))
    assert torch.equal(shifted[:, :, :-1], IMAGES[:, :, 1:])
    assert not shifted[:, :, -1].any()
    assert torch.equal(Augment(flip=True)(IMAGES, torch.tensor([[0, 0, 1]] * 12)), IMAGES.flip(3))
    assert torch.equal(Augment(pad=2)(IMAGES, torch.tensor([[2, 2, 0]] * 12)), IMAGES)
    some = torch.tensor([[0, 0, number % 2] for number in range(12)])
    expected = torch.stack([image.flip(2) if number % 2 else image for number, image in enumerate(IMAGES)])
    assert torch.equal(Augment(flip=True)(IMAGES, some), expected)


def test_masks_move_with_their_images() -> None:
    """(N, H, W) and (N, C, H, W); numbers and vectors stay."""
    augment, plan = Augment(pad=1, flip=True), torch.tensor([[2, 1, n % 2] for n in range(12)])
    moved = augment(IMAGES, plan)
    assert torch.equal(augment.move_with(IMAGES, IMAGES[:, 0], plan), moved[:, 0])
    assert torch.equal(augment.move_with(IMAGES, {"depth": IMAGES}, plan)["depth"], moved)
    for targets in (torch.arange(12), torch.rand(12, 8), torch.rand(12, 4, 4)):
        assert augment.move_with(IMAGES, targets, plan) is targets


def test_shifts_cover_all_of_pad_and_half_of_the_images_are_mirrored() -> None:
    plan = Augment(pad=2, flip=True).plan(4000, torch.Generator().manual_seed(0))
    for column in (0, 1):
        assert plan[:, column].unique().tolist() == [0, 1, 2, 3, 4]
    assert abs(plan[:, 2].float().mean() - 0.5) < 0.05
    assert not Augment(pad=2).plan(100, torch.Generator())[:, 2].any()
    assert not Augment(flip=True).plan(100, torch.Generator())[:, :2].any()


def first_batch(size: int, epoch: int = 0, augment: Augment | None = None) -> torch.Tensor:
    """The inputs of the first batch of ten, over all ranks."""
    converter = Converter(torch.device("cpu"), torch.float32, torch.contiguous_format, [0.5] * 3, [0.5] * 3)
    dataset = InMemoryDataset(IMAGES, torch.arange(12))
    inputs = []
    for rank in range(size):
        loader = BatchLoader(dataset, converter, rank, size, 0, augment or Augment(2, True))
        parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=size)
        inputs.append(next(loader.epoch(epoch, 10, parts)).parts[0].inputs)
    return torch.cat(inputs)


def test_augmentation_depends_on_the_sample_not_on_the_rank() -> None:
    assert torch.equal(first_batch(1), first_batch(3))
    assert not torch.equal(first_batch(1), first_batch(1, augment=Augment()))


def test_each_epoch_augments_differently() -> None:
    dataset = InMemoryDataset(IMAGES[:1], torch.zeros(1, dtype=torch.long))
    converter = Converter(torch.device("cpu"), torch.float32, torch.contiguous_format, None, None)
    loader = BatchLoader(dataset, converter, 0, 1, 0, Augment(3, True))
    parts = partial(micro_batch_parts, accumulation_steps=1, rank=0, size=1)
    seen = {tuple(next(loader.epoch(epoch, 1, parts)).parts[0].inputs.flatten().tolist()) for epoch in range(20)}
    assert len(seen) > 10


def mirrored(epoch: int, size: int) -> list[bool]:
    """Of each sample whether alternating mirror images mirror it."""
    converter = Converter(torch.device("cpu"), torch.float32, torch.contiguous_format, None, None)
    dataset, found = InMemoryDataset(IMAGES, torch.arange(12)), {}
    for rank in range(size):
        loader = BatchLoader(dataset, converter, rank, size, 0, Augment(flip="alternating"))
        parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=size)
        for batch in loader.epoch(epoch, 5, parts):
            for inputs, number in zip(batch.parts[0].inputs, batch.parts[0].targets.tolist(), strict=True):
                found[number] = torch.equal((inputs * 255).round(), IMAGES[number].flip(2).float())
                assert found[number] or torch.equal((inputs * 255).round(), IMAGES[number].float())
    return [found[number] for number in range(12)]


def test_alternating_mirror_images_show_each_image_both_ways_in_two_epochs() -> None:
    even, odd = mirrored(0, 1), mirrored(1, 1)
    assert 0 < sum(even) < 12
    assert odd == [not flipped for flipped in even]
    assert mirrored(2, 1) == mirrored(2, 3) == even


def test_images_grow_with_the_epochs() -> None:
    """[4, 6, 8] over 6 epochs: two of each. The pixels are those of torchvision."""
    from torchvision.transforms import v2

    augment, images = Augment(sizes=[4, 6, 8], epochs=6), IMAGES.double()
    for epoch, size in enumerate((4, 4, 6, 6, 8, 8, 8)):  # a 7th epoch is like the last one
        resized = augment.resized(images, torch.arange(12), epoch)
        expected = v2.functional.resize(images, [size, size], antialias=True)
        assert resized.shape == (12, 3, size, size)
        assert (resized - expected).abs().max() < 1e-12
    few = Augment(sizes=[4, 6, 8], epochs=2)  # the last size is always reached
    assert [len(few.resized(images, torch.arange(12), epoch)[0, 0]) for epoch in (0, 1)] == [6, 8]
    assert [*augment.resized(images.bfloat16(), torch.arange(12), 0).shape] == [12, 3, 4, 4]
    with pytest.raises(ConfigError, match="no masks beside them; type dataset.augment.sizes=null"):
        augment.resized(images, IMAGES[:, 0], 0)
    with pytest.raises(ConfigError, match=r"the samples have the shape \[4\]; type dataset.augment.sizes=null"):
        augment.resized(torch.rand(12, 4), torch.arange(12), 0)


def test_sizes_that_the_model_cannot_take_are_refused(train) -> None:
    sentence = train("model=convnet", "dataset.augment.sizes=[8,6]", code=2).sentence
    assert "sizes has 6, and the model takes no images of 6x6 pixels" in sentence
    assert "type model=resnet18" in sentence


def test_the_options_reach_a_training(tmp_path: Path) -> None:
    still = ["model=linear", "model._target_=support.models.of_any_size", "trainer.precision=fp64", "logger=[]"]
    still += ["trainer.epochs=2", "trainer.batch_size=256"]
    runs = {
        "plain": [],
        "pad": ["dataset.augment.pad=2"],
        "flip": ["dataset.augment.flip=true"],
        "alternating": ["dataset.augment.flip=alternating"],
        "sizes": ["dataset.augment.sizes=[12,8]"],
    }
    for ranks in (1, 2):
        folders = {name: tmp_path / f"{name}{ranks}" for name in runs}
        configs = [composed(f"run_dir={folders[name]}", *still, *more) for name, more in runs.items()]
        in_world(ranks, train_all, configs)
    found = {name: weights(tmp_path / f"{name}1") for name in runs}
    assert min(distance(found[one], found[other]) for one, other in combinations(runs, 2)) > 1e-4
    for name in runs:
        assert distance(found[name], weights(tmp_path / f"{name}2")) < 1e-9, name
