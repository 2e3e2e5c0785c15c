"""Random shifts and mirror images."""

from functools import partial
from pathlib import Path

import torch

from lockstep.data.dataset import InMemoryDataset
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import micro_batch_parts
from lockstep.data.transforms import Augment
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


def test_the_options_reach_a_training(tmp_path: Path) -> None:
    still = ["model=linear", "trainer.max_steps=2", "trainer.precision=fp64", "logger=[tensorboard]"]
    runs = {"plain": [], "pad": ["dataset.augment.pad=2"], "flip": ["dataset.augment.flip=true"]}
    in_world(1, train_all, [composed(f"run_dir={tmp_path / name}", *still, *more) for name, more in runs.items()])
    plain, pad, flip = (weights(tmp_path / name) for name in runs)
    assert min(distance(plain, pad), distance(plain, flip), distance(pad, flip)) > 1e-4
