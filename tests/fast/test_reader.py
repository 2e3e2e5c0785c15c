"""Samples that are read one by one: their random numbers, their forms, their targets, and those that cannot be read."""

import ast
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torchvision import tv_tensors

from lockstep.config.check import instantiate
from lockstep.data.build import reader_of
from lockstep.data.reader import EVALUATION, SampleReader, batches, request_of
from lockstep.errors import ConfigError
from lockstep.failures.record import exception_record
from support import own_data
from support.configs import composed

SEED = 3


def reader(dataset: Any, check: Any = None, **options: Any) -> SampleReader:
    return SampleReader(dataset, "training data", SEED, check=check, **options)


def read(
    dataset: Any, numbers: Any = range(23), epoch: int = 0, start: int = 0, workers: int = 0, **options: Any
) -> tuple[Any, Any]:
    """(inputs, targets) of these samples in one batch, each at the place of its number."""
    request = request_of([*numbers], epoch)._replace(start=start)
    (found,) = batches(reader(dataset, **options), iter([request]), workers, pin_memory=False)
    return found


def shaken(sample: Any) -> Any:
    return sample[0] + torch.rand(4, dtype=torch.float64) + np.random.rand(), sample[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_are_those_of_the_epoch_and_of_the_place_in_it(workers: int) -> None:
    noisy, options = own_data.Noisy(), {"transforms": [shaken], "workers": workers}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    whole = read(noisy, epoch=1, **options)[0]
    assert read(noisy, [7, 3], epoch=1, start=50, **options)[0].equal(whole[[7, 3]])  # with whom it is read is nothing
    noise = [(read(noisy, epoch=epoch)[0] - noisy.points)[:, 0] for epoch in (0, 1, EVALUATION, EVALUATION)]
    assert noise[2].equal(noise[3])
    assert len(set(torch.cat(noise).tolist())) == 3 * 23
    again = reader(noisy).read(request_of([4, 4])._replace(places=np.array([8, 9])))[0]  # drawn twice in an epoch
    assert not again[0].equal(again[1])
    assert torch.equal(torch.get_rng_state(), states[0])  # those of the rank stay
    assert np.random.get_state()[1].tolist() == states[1]


def test_what_a_collate_function_draws_depends_on_the_batch_alone() -> None:
    points = own_data.Points()
    batches_of = [(range(5), 5), (range(3), 5), (range(5), 10)]
    read_all = [read(points, some, start=start, collate_fn=own_data.scaled)[0] for some, start in batches_of]
    factors = [found / points.points[: len(found)] for found in read_all]
    torch.testing.assert_close(factors[0][:3], factors[1])  # another part of the same batch, on another rank
    assert abs(factors[2][0, 0] - factors[0][0, 0]) > 1e-6


@pytest.mark.parametrize("kind", [lambda mask: mask, tv_tensors.Mask, lambda mask: tv_tensors.Mask(mask[None])])
@pytest.mark.parametrize("key", ["transforms", "test_transforms"])
def test_a_mask_moves_with_its_image_in_a_segmentation(kind: Any, key: str) -> None:
    image, mask = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2), torch.arange(4).reshape(2, 2)
    node = "{_target_:torchvision.transforms.v2.RandomHorizontalFlip,p:1.0}"
    config = composed("task=segmentation", "dataset.classes=4", f"loader.{key}=[{node}]")
    found = reader_of(config, [(image, kind(mask))], "train", key == "transforms").read(request_of([0]))
    assert found[0][0].equal(image.flip(2))
    assert found[1].squeeze().equal(mask.flip(1))


def test_samples_that_make_no_batch_or_other_targets_than_samples_are_refused_and_named() -> None:
    check = partial(instantiate(composed().task).check_targets, classes=2)
    said = r"samples \[0, 1, 2, 3\] of the training data make no batch.*; give all .*type loader.collate_fn="
    for name in ("Ragged", "Targetless", "Pictures", "Mirrored", "Gone", "Triples"):
        with pytest.raises(ConfigError, match=said):
            read(getattr(own_data, name)(), range(6), workers=int(name == "Gone"), check=check)
    for collate, count in ((own_data.twice, 46), (own_data.without_the_first, 22)):
        said = f"in the training data, loader.collate_fn makes {count} targets of 23 samples, .*; type task._target_="
        with pytest.raises(ConfigError, match=said):
            read(own_data.Points(), collate_fn=collate, check=check)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    data = Subset(own_data.Broken(), range(3, 23))  # its number is that in the whole data
    with pytest.raises(RuntimeError) as raised:
        read(data, [0, 1, 2], workers=workers)
    said = exception_record(raised.value)["message"]
    assert "sample 5 of the training data cannot be read (OSError: image file is truncated)" in said
    assert "Traceback" not in said


# The task | targets of samples 10 to 13 | what is said
TARGETS = r"""
classification | 0, 1, 2, 1 |
classification | 0, 1, 3, 1 | sample 12 has the target 3, and the classes are 0 to 2; type dataset.classes=4
classification | 0, 1, 1, -1 | sample 13 has the target -1, .*; type its target as 0 to 2
classification | [.5, .5, 0.], [.5, .5, 0.], [1., 0., 0.], [0., 0., 1.] |
segmentation | [[0, 1], [2, -100]], [[0, 0], [0, 1]], [[0, 0], [0, 1]], [[2, 2], [0, 1]] |
segmentation | [[0, 1], [0, 0]], [[0, 0], [255, 0]], [[0, 0], [0, 1]], [[0, 0], [0, 1]] | sample 11 .* 255 at .1, 0.
language_modelling | [0, 1, -100], [0, 1, 2], [0, 1, 2], [0, 1, 2] |
language_modelling | [0, 1, 7], [0, 1, 2], [0, 1, 2], [0, 1, 2] | sample 10 has the target 7 at \[2\]
multi_label | [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 0, 1] |
multi_label | [0, 1, 1], [1, 1, 1], [0, 0, 0], [0, -1, 1] | sample 13 .* \[0, -1, 1\], and its labels are 0 or 1
multi_label | [0., 2., 1.], [0., 0., 1.], [0., 0., 1.], [0., 0., 1.] | sample 10 has the target
regression | [-3.], [2.], [9.], [.5] |
"""


def test_targets_that_the_task_does_not_take_are_named_with_their_sample() -> None:
    for row in TARGETS.strip().splitlines():
        task, given, said = (part.strip() for part in row.split("|"))
        targets = [torch.tensor(target) for target in ast.literal_eval(f"[{given}]")]
        check = partial(instantiate(composed(f"task={task}", "dataset.classes=3").task).check_targets, classes=3)
        data = Subset([(torch.zeros(1), target) for target in targets[:1] * 10 + targets], range(10, 14))
        with pytest.raises(ConfigError, match=f"^in the training data, {said}") if said else nullcontext():
            read(data, range(4), check=check)
