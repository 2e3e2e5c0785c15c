"""MixUp, CutMix and random erasing: what they do to a batch, and that a world of any size does the same."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from lockstep.data.build import batch_transforms
from lockstep.data.dataset import InMemoryDataset
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import micro_batch_parts
from lockstep.data.samples import Samples
from lockstep.data.transforms import Augment, BatchTransform, CutMix, MixUp, OneOf, RandomErasing, as_batch_transforms
from lockstep.errors import ConfigError
from lockstep.tasks.classification import Classification
from support.configs import composed

COUNT, CLASSES, BATCH = 23, 3, 8
IMAGES = torch.rand(COUNT, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(COUNT) % CLASSES

CHAINS: dict[str, list[BatchTransform]] = {
    "mixup": [MixUp(0.4, CLASSES)],
    "cutmix": [CutMix(1.0, CLASSES)],
    "erasing": [RandomErasing(0.7)],
    "one of, twice, and erasing": [
        OneOf([MixUp(0.4, CLASSES), CutMix(1.0, CLASSES)]),
        RandomErasing(0.5),
        MixUp(1.0, CLASSES),
    ],
    "one of two that do not mix": [OneOf([RandomErasing(0.5), v2.RandomHorizontalFlip(0.5)])],
    "torchvision": as_batch_transforms([v2.RandomHorizontalFlip(0.5), v2.RandomErasing(0.5), MixUp(1.0, CLASSES)]),
}


def epoch(
    transforms: list[BatchTransform], size: int = 1, steps: int = 1, skip: int = 0, by_sample: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """(inputs, targets) of each global batch of epoch 1, put together from all ranks."""
    converter = Converter(torch.device("cpu"), torch.float64, torch.contiguous_format, None, None)
    data: Any = InMemoryDataset(IMAGES, LABELS)
    parts_of: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    batches = 0
    for rank in range(size):
        reader = BatchLoader(
            Samples(data) if by_sample else data, converter, rank, size, 5, Augment(1, True), 0, transforms
        )
        parts = partial(micro_batch_parts, accumulation_steps=steps, rank=rank, size=size)
        for batches, batch in enumerate(reader.epoch(1, BATCH, parts, skip), start=1):
            parts_of |= {(batches, part.number): (part.inputs, part.targets) for part in batch.parts}
    found = []
    for number in range(1, batches + 1):
        rows = [parts_of[number, place] for place in range(size * steps)]
        found.append((torch.cat([inputs for inputs, _ in rows]), torch.cat([targets for _, targets in rows])))
    return found


@pytest.mark.parametrize("name", CHAINS)
def test_a_global_batch_is_changed_alike_at_any_world_size_and_after_a_resume(name: str) -> None:
    alone = epoch(CHAINS[name])
    assert [len(inputs) for inputs, _ in alone] == [8, 8, 7]
    for other in (
        epoch(CHAINS[name], 2),
        epoch(CHAINS[name], 9),
        epoch(CHAINS[name], 2, 2),
        epoch(CHAINS[name], by_sample=True),
    ):
        for mine, theirs in zip(alone, other, strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])
    assert torch.equal(epoch(CHAINS[name], 2, skip=BATCH)[0][0], alone[1][0])
    assert not torch.equal(alone[0][0], epoch([])[0][0])


def test_mixup_and_cutmix_mix_each_image_with_the_one_before_it_and_its_target_likewise() -> None:
    plain = epoch([])[0]
    before, labels = plain[0].roll(1, 0), torch.nn.functional.one_hot(plain[1], CLASSES).double()
    mixed, targets = epoch([MixUp(0.4, CLASSES)])[0]
    ratio = ((mixed - before) / (plain[0] - before)).nan_to_num(0.5)[plain[0] != before].median()
    assert 0 < ratio < 1
    torch.testing.assert_close(mixed, ratio * plain[0] + (1 - ratio) * before)
    torch.testing.assert_close(targets, ratio * labels + (1 - ratio) * labels.roll(1, 0))
    pasted, targets = epoch([CutMix(1.0, CLASSES)])[0]
    is_before = (pasted != plain[0]).any(0, keepdim=True).expand_as(pasted)
    assert torch.equal(pasted, torch.where(is_before, before, plain[0]))
    kept = 1 - is_before[0].double().mean()
    assert 0 < kept < 1
    torch.testing.assert_close(targets, kept * labels + (1 - kept) * labels.roll(1, 0))


def test_random_erasing_erases_its_share_of_images_and_of_each_a_rectangle() -> None:
    images, transform = torch.ones(2000, 2, 20, 20), RandomErasing(0.25, scale=(0.1, 0.2), ratio=(0.5, 2.0))
    erased, _ = transform(images, LABELS, transform.plan(2000, torch.Generator().manual_seed(0)))
    holes = erased[:, 0] == 0
    assert torch.equal(holes, erased[:, 1] == 0)
    share = holes.flatten(1).double().mean(1)
    assert (share > 0).double().mean() == pytest.approx(0.25, abs=0.03)
    assert share[share > 0].mean() == pytest.approx(0.15, abs=0.02)
    rows, columns = holes.any(2).sum(1), holes.any(1).sum(1)
    assert torch.equal(rows * columns, holes.sum((1, 2)))


def test_one_of_refuses_transforms_of_both_kinds() -> None:
    with pytest.raises(ConfigError, match="that all mix samples"):
        OneOf([MixUp(0.4, CLASSES), RandomErasing(0.5)])


def test_samples_that_are_no_images_and_targets_that_are_no_classes_are_refused() -> None:
    points, plan = torch.rand(5, 4), torch.full((5, 5), 0.5, dtype=torch.float64)
    for transform in (CutMix(1.0, CLASSES), RandomErasing(0.5)):
        with pytest.raises(ConfigError, match=r"the samples have the shape \[4\]; type loader.batch_transforms=\[\]"):
            transform(points, LABELS[:5], plan)
    with pytest.raises(
        ConfigError, match=r"have the shape \[4\]; type dataset.augment.pad=0 dataset.augment.flip=false"
    ):
        Augment(0, True)(points, plan)
    for targets in (torch.zeros(5, 4, 4, dtype=torch.int64), torch.rand(5)):
        with pytest.raises(ConfigError, match="MixUp and CutMix mix class numbers .*; type loader.batch_transforms="):
            MixUp(0.4, CLASSES)(points, targets, plan)
    with pytest.raises(ConfigError, match="classes 0 to 2, and the targets are -100 to 1; type dataset.batch_tr"):
        MixUp(0.4, CLASSES)(points, torch.tensor([0, 1, -100, 1, 0]), plan)
    for inputs, found in ((torch.arange(20).view(5, 4), "torch.int64"), ((points, points), "several inputs")):
        with pytest.raises(ConfigError, match=f"MixUp mixes .* these are {found}; type loader.batch_transforms="):
            MixUp(0.4, CLASSES)(inputs, LABELS[:5], plan)
    for inputs in (points, (points, points)):
        with pytest.raises(ConfigError, match=r"ColorJitter is for images .*; type loader.batch_transforms=\[\]"):
            as_batch_transforms([v2.ColorJitter(0.5)])[0](inputs, LABELS[:5], plan)


def test_classification_takes_probabilities_and_smooths_labels_as_torch_does() -> None:
    outputs = torch.randn(5, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    task = Classification({"loss": "min", "accuracy": "max"}, "loss", 0.1, None, {}, None)
    classes = LABELS[:5]
    smoothed = torch.nn.functional.one_hot(classes, CLASSES).double() * 0.9 + 0.1 / CLASSES
    expected = -(smoothed * outputs.log_softmax(1)).sum()
    torch.testing.assert_close(task(outputs, classes)[0], expected)
    loss, sums = Classification({"loss": "min", "accuracy": "max"}, "loss", 0.0, None, {}, None)(outputs, smoothed)
    torch.testing.assert_close(loss, expected)
    assert sums["accuracy"] == (outputs.argmax(1) == classes).sum()
    with pytest.raises(ConfigError, match="type task=regression"):
        task(outputs[:, :1], torch.rand(5, 1))


def test_colours_of_normalised_pixels_are_not_changed() -> None:
    jitter = "{_target_: torchvision.transforms.v2.ColorJitter, brightness: 0.5}"
    flip = "{_target_: torchvision.transforms.v2.RandomHorizontalFlip}"
    inside = f"{{_target_: lockstep.data.transforms.OneOf, transforms: [{flip}, {jitter}]}}"
    normalised = ["dataset.mean=[0.5]", "dataset.std=null"]
    for node in (jitter, inside):
        with pytest.raises(ConfigError, match="changes colours from 0 to 1, .* normalised; type loader.transforms="):
            batch_transforms(composed(f"loader.batch_transforms=[{node}]", *normalised))
        assert batch_transforms(composed(f"loader.batch_transforms=[{node}]", "dataset.mean=null", "dataset.std=null"))
    assert batch_transforms(composed(f"loader.batch_transforms=[{flip}]", *normalised))


def test_what_cannot_change_batches_alike_is_refused() -> None:
    said = r"type loader.batch_transforms=\[{_target_: lockstep.data.transforms.CutMix, alpha: 1.0, classes: "
    with pytest.raises(ConfigError, match=f"CutMix of torchvision mixes the samples of one rank.*{said}"):
        as_batch_transforms([v2.CutMix(num_classes=3)])
    with pytest.raises(ConfigError, match="has an object of ReLU, and .*BatchTransform or .* type loader.transforms="):
        as_batch_transforms([torch.nn.ReLU()])
