"""What a transform of torchvision's v2 changes in a sample: images of any form, and their masks."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lockstep.data.samples import Samples
from lockstep.errors import ConfigError

PIXELS, NUMBERS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2), np.arange(4).reshape(2, 2)


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        (torch.from_numpy(PIXELS), NUMBERS),
        (Image.fromarray(PIXELS.transpose(1, 2, 0).copy()), Image.fromarray(NUMBERS.astype(np.uint8))),
        (Image.fromarray(PIXELS.transpose(1, 2, 0).copy()), Image.fromarray(NUMBERS.astype(np.uint8)).convert("P")),
    ],
)
def test_arrays_and_images_are_changed_with_their_masks(image: Any, mask: Any) -> None:
    to_tensor = [v2.ToImage()] if isinstance(image, Image.Image) else []
    flipped = Samples([(image, mask)], transforms=[v2.RandomHorizontalFlip(1.0), *to_tensor]).one()
    assert flipped[0][0].tolist() == PIXELS[:, :, ::-1].tolist()
    assert flipped[1].squeeze().tolist() == NUMBERS[:, ::-1].tolist()


@pytest.mark.parametrize("form", ["dict", "dict with the label first", "dict of targets"])
def test_masks_in_dicts_move_with_their_image(form: str) -> None:
    image, mask = torch.from_numpy(PIXELS), torch.from_numpy(NUMBERS)
    sample = {
        "dict": {"image": image, "target": mask},
        "dict with the label first": {"label": mask, "image": image},
        "dict of targets": (image, {"mask": mask}),
    }[form]
    inputs, targets = Samples([sample], transforms=[v2.RandomHorizontalFlip(1.0)]).one()
    assert inputs[0].tolist() == PIXELS[:, :, ::-1].tolist()
    assert (targets["mask"] if isinstance(targets, dict) else targets)[0].tolist() == NUMBERS[:, ::-1].tolist()


@pytest.mark.parametrize("transform", [v2.RandomHorizontalFlip(1.0), v2.Resize(3), v2.RandomErasing(1.0)])
def test_an_array_that_a_transform_would_leave_as_it_is_is_refused(transform: v2.Transform) -> None:
    with pytest.raises(ConfigError, match=f"{type(transform).__name__} of torchvision leaves as it is; return torch"):
        Samples([(PIXELS, NUMBERS)], transforms=[transform]).one()
    made = Samples([(PIXELS, 3)], transforms=[v2.Compose([v2.Lambda(lambda image: image + 1)])]).one()
    assert (made[0] == PIXELS + 1).all()


def test_class_numbers_of_a_mask_are_not_mixed_and_arrays_with_channels_last_become_images() -> None:
    picture, mask = Image.new("RGB", (8, 8)), Image.fromarray(np.eye(8, dtype=np.uint8) * 7)
    resized = Samples([(picture, mask)], transforms=[v2.Resize(3), v2.ToImage()]).one()
    assert set(resized[1].flatten().tolist()) <= {0, 7}
    last = Samples(
        [(PIXELS.transpose(1, 2, 0), NUMBERS)], transforms=[v2.ToImage(), v2.RandomHorizontalFlip(1.0)]
    ).one()
    assert last[0][0].tolist() == PIXELS[:, :, ::-1].tolist()
    assert last[1].squeeze().tolist() == NUMBERS[:, ::-1].tolist()
