"""What silently gave other numbers: shared files, what belongs to an image, values and names of classes, draws."""

import random
import zipfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import transforms, tv_tensors
from torchvision.transforms import v2

from lockstep.data import build as build_data
from lockstep.data.dataset import Labels, copied, require_same_classes, without_samples
from lockstep.data.image_files import class_folders
from lockstep.data.images import UndecodedImages
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import micro_batch_parts, seed_all, seeded
from lockstep.data.samples import EVALUATION, Samples
from lockstep.data.text import TextWindows, training_text
from lockstep.data.transforms import Augment, warn_of_places
from lockstep.errors import ConfigError
from lockstep.modes.predict import files_of, table
from lockstep.modes.train import Train
from lockstep.strategies.base import forward
from support.configs import composed
from support.small_data import write_small_data

RECORDS = 600
FLIP = v2.RandomHorizontalFlip(1.0)
IMAGE, MASK = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2), torch.arange(4).reshape(2, 2)


class Records(Dataset[Any]):
    """Record n of a file that is opened when it is first needed holds the number n, 1000 times."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None
        np.arange(RECORDS).repeat(1000).tofile(path)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> Any:
        if self.file is None:
            self.file: Any = open(self.path, "rb")  # noqa: SIM115  # it stays open, as a user's does
        self.file.seek(number * 8000)
        return torch.frombuffer(bytearray(self.file.read(8000)), dtype=torch.int64), number


class Zipped(Records):
    """The same in a zip file, opened where the data set is made."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for number in range(RECORDS):
                file.writestr(str(number), np.full(1000, number).tobytes())
        self.opened = zipfile.ZipFile(path)

    def __getitem__(self, number: int) -> Any:
        return torch.frombuffer(bytearray(self.opened.read(str(number))), dtype=torch.int64), number


@pytest.mark.parametrize("kind", [Records, Zipped])
def test_workers_do_not_share_the_position_in_a_file_that_was_opened_before_them(kind: Any, tmp_path: Path) -> None:
    data = kind(tmp_path / "records")
    data[0]
    loader = BatchLoader(data, Converter(torch.device("cpu")), workers=3)
    with closing(loader):
        for values, numbers in loader.eval_batches(8):
            assert torch.equal(values, numbers[:, None].expand(-1, 1000))
    assert data[7][0].tolist() == [7] * 1000  # and this process reads on


class Pair(NamedTuple):
    image: Any
    target: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    target: Any


FORMS = {
    "tuple": lambda image, mask: (image, mask),
    "list": lambda image, mask: [image, mask],
    "dict": lambda image, mask: {"image": image, "target": mask},
    "number first": lambda image, mask: {"number": torch.tensor([1, 2]), "image": image, "target": mask},
    "named tuple": Pair,
    "mapping": lambda image, mask: MappingProxyType({"image": image, "target": mask}),
    "dataclass": Sample,
    "targets in a dataclass": lambda image, mask: (image, Sample(torch.tensor(1), mask)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transform", [FLIP, v2.Compose([v2.ToDtype(torch.float64), FLIP])])
def test_a_mask_moves_with_its_image_in_any_container(form: str, transform: Any) -> None:
    given = FORMS[form](IMAGE, MASK)
    sample = Samples([given], transforms=[transform]).read([(0, 0)]).samples[0]
    assert type(sample) is (dict if form == "mapping" else type(given))
    inputs, targets = Samples([given], transforms=[transform]).one()
    targets = targets["target"] if isinstance(targets, dict) else targets
    inputs = inputs["image"] if isinstance(inputs, dict) else inputs
    assert inputs[0].tolist() == IMAGE.flip(2).tolist()
    assert targets[0].tolist() == MASK.flip(1).tolist()


def test_two_images_move_together() -> None:
    inputs, _ = Samples([{"left": IMAGE, "right": IMAGE + 1, "label": 1}], transforms=[FLIP]).one()
    assert inputs["left"][0].tolist() == IMAGE.flip(2).tolist()
    assert inputs["right"][0].tolist() == (IMAGE + 1).flip(2).tolist()


BOXES = torch.tensor([[0.0, 0.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"boxes": BOXES}, r"has boxes beside its image, .* return torchvision.tv_tensors.BoundingBoxes"),
        ({"bbox": BOXES[0]}, r"has bbox beside its image, .* return torchvision.tv_tensors.BoundingBoxes"),
        ({"boxes": [[0, 0, 1, 1]], "label": 1}, "has boxes beside its image"),
        ({"pose": {"keypoints": np.zeros((3, 2))}}, r"has keypoints .* return torchvision.tv_tensors.KeyPoints"),
        (BOXES + 1, r"has numbers of the shape \[1, 4\], such as boxes or points, .*BoundingBoxes or KeyPoints"),
        ([BOXES + 1, 1], r"has numbers of the shape \[1, 4\]"),
        ([[3, 4, 5, 9], [1, 2, 4, 4]], r"has numbers of the shape \[2, 4\]"),
        ({"target": np.ones((5, 2)) / 3}, r"has numbers of the shape \[5, 2\]"),
        (torch.zeros(2, 2, 1), r"has a target of the shape \[2, 2, 1\] .* return the shape \(H, W\)"),
        (np.zeros((2, 2, 1)), r"has a target of the shape \[2, 2, 1\]"),
    ],
)
def test_what_would_stay_behind_its_image_is_refused(target: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Samples([(IMAGE, target)], transforms=[v2.RandomApply([FLIP])]).one()
    Samples([(IMAGE, target)], transforms=[v2.ToDtype(torch.float32)]).one()


@pytest.mark.parametrize(
    ("sample", "moved", "said"),
    [
        ((IMAGE, 1), True, ""),
        ((IMAGE, MASK), True, "an image with a mask, boxes or another image"),
        ((IMAGE, {"class": 1, "mask": MASK}), True, "an image with a mask"),
        ((IMAGE, IMAGE + 1), True, "an image with a mask"),
        ((Image.new("RGB", (2, 2)), Image.new("L", (2, 2))), True, "an image with a mask"),
        ((Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2))), True, "an image with a mask"),
        ((IMAGE, {"boxes": BOXES}), True, "has boxes beside its image"),
        ((IMAGE, MASK), False, ""),
        ({"image": IMAGE, "target": 1}, False, "a sample is a dict"),
    ],
)
def test_torchvisions_first_transforms_move_no_image_without_what_belongs_to_it(
    sample: Any, moved: bool, said: str
) -> None:
    flip, blur = transforms.RandomHorizontalFlip(1.0), transforms.GaussianBlur(1)
    for transform in [flip, transforms.Compose([blur, flip])] if moved else [blur, transforms.Compose([blur])]:
        samples = Samples([sample], transforms=[transform])
        if said:
            with pytest.raises(ConfigError, match=f"{said}.*(v2|tv_tensors)"):
                samples.read([(0, 0)])
        else:
            samples.read([(0, 0)])


@pytest.mark.parametrize("shape", [(3, 32, 32), (8, 8)])
def test_a_finer_image_or_a_coarser_mask_is_not_left_behind(shape: tuple[int, ...]) -> None:
    samples = [(torch.zeros(3, 16, 16), torch.zeros(shape))]
    with pytest.raises(ConfigError, match="a target of the shape .* beside its image.*the shape of the image"):
        Samples(samples, transforms=[FLIP]).one()
    Samples(samples, transforms=[v2.ToDtype(torch.float32)]).one()
    Samples([(torch.zeros(3, 16, 16), {"pose": torch.eye(4)})], transforms=[FLIP]).one()


@pytest.mark.parametrize(
    ("target", "warns"),
    [
        (torch.tensor([0.2, 0.1, 0.9, 0.7]), True),
        ([10, 20, 30, 40], True),
        (torch.tensor([0.2, 0.1, 0.3, 0.4]), False),  # probabilities
        (torch.tensor([0, 1, 1, 1]), False),  # labels
        (3, False),
        ({"values": torch.ones(5, 4) * 3}, False),
        ((1, tv_tensors.BoundingBoxes(BOXES, format="XYXY", canvas_size=(2, 2)), BOXES + 1), False),  # type: ignore
    ],
)
def test_four_numbers_beside_an_image_may_be_a_box(target: Any, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_places.cache_clear()
    samples = Samples([(IMAGE, target)] * 2, transforms=[FLIP])
    samples.read([(0, 0), (0, 1)])
    said = [text for text in caplog.messages if "they stay behind; return torchvision.tv_tensors.BoundingBoxes" in text]
    assert len(said) == int(warns)


def test_boxes_of_torchvision_move_and_arrays_in_dicts_are_refused() -> None:
    boxes = tv_tensors.BoundingBoxes(BOXES, format="XYXY", canvas_size=(2, 2))  # type: ignore[call-overload]
    moved = Samples([(IMAGE, {"boxes": boxes})], transforms=[FLIP]).one()
    assert moved[1]["boxes"].tolist() == [[[1.0, 0.0, 2.0, 1.0]]]
    with pytest.raises(ConfigError, match="an image is an array of numpy"):
        Samples([{"image": IMAGE.numpy(), "target": MASK.numpy()}], transforms=[FLIP]).one()


def test_augmentation_refuses_masks_with_the_channels_last() -> None:
    augment, images = Augment(flip=True), torch.zeros(2, 3, 4, 4)
    plan = augment.plan(2, torch.Generator())
    with pytest.raises(ConfigError, match=r"the targets have the shape \[4, 4, 1\], with the channels last"):
        augment.move_with(images, torch.zeros(2, 4, 4, 1), plan)


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_in_any_container_is_copied_before_it_is_changed_in_place(form: str) -> None:
    image = torch.zeros(1, 2, 2)

    def add(sample: Any) -> Any:
        image = sample if isinstance(sample, Tensor) else getattr(sample, "image", None)
        (sample["image"] if image is None else image).add_(1)
        return sample

    samples = Samples([FORMS[form](image, MASK)], transforms=[add], collate_fn=lambda samples: (torch.zeros(1), MASK))
    samples.read([(0, 0)])
    assert image.sum() == 0
    assert copied(FORMS[form](image, MASK)) is not None


def test_a_block_that_is_seeded_draws_the_same_whatever_ran_before_and_leaves_no_trace() -> None:
    def drawn() -> list[float]:
        with seeded(5):
            return [float(torch.rand(())), float(np.random.rand()), random.random()]

    first = drawn()
    seed_all(1)
    expected = [float(torch.rand(())), float(np.random.rand()), random.random()]
    seed_all(1)
    assert drawn() == first
    assert [float(torch.rand(())), float(np.random.rand()), random.random()] == expected


class Drawn(Dataset[Any]):
    """Points that are drawn where the data set is made."""

    def __init__(self, count: int = 4) -> None:
        self.points = torch.from_numpy(np.random.rand(count, 2)) + torch.rand(count, 2) + random.random()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, number: int) -> Any:
        return self.points[number], number % 2


def test_what_a_data_set_draws_depends_on_the_seed_alone() -> None:
    cfg = composed("seed=3", *(f"dataset.{half}._target_={__name__}.Drawn" for half in ("train", "test")))
    first, _, test, _ = build_data.datasets(cfg, Train())
    seed_all(9)
    assert torch.equal(build_data.datasets(cfg, Train())[0].points, first.points)
    assert not torch.equal(test.points, first.points)
    cfg = cfg.changed({"seed": 4})
    assert not torch.equal(build_data.datasets(cfg, Train())[0].points, first.points)


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (["a", "b", "c"], None),
        (["a", "b"], None),
        ([], None),
        (["b", "c"], "^class 0 is a in the training data and b in the test data; type x$"),
        (["a", "b", "c", "d"], "^class 3 is none of the training data, which has 3, and d in the test data; type x$"),
    ],
)
def test_classes_are_compared_by_name(test: list[str], said: str | None) -> None:
    compared: Any = (["a", "b", "c"], test, "the training data", "the test data", "type x")
    if said is None:
        require_same_classes(*compared)
    else:
        with pytest.raises(ConfigError, match=said):
            require_same_classes(*compared)


def test_labels_beyond_the_classes_are_named_in_masks_and_texts() -> None:
    labels = Labels("training data", 3, are_dense=True, ignored=255)
    masks = torch.zeros(4, 2, 2, dtype=torch.uint8)
    masks[2, 1, 0] = 255
    labels.check([10, 11, 12, 13], masks)
    for wrong in (3, 200):
        masks[3, 0, 1] = wrong
        said = rf"sample 13 of the training data has the target {wrong} at \[0, 1\], and the classes are 0 to 2; type"
        with pytest.raises(ConfigError, match=said):
            labels.check([10, 11, 12, 13], masks)
    with pytest.raises(ConfigError, match=r"has the target -1 at \[1\]"):
        Labels("test data", 5, are_dense=True).check([0], torch.tensor([[-100, -1]]))


@pytest.mark.parametrize(("high", "refused"), [(255, True), (1, False)])
def test_masks_of_0_and_the_ignored_label_are_refused(high: int, refused: bool) -> None:
    masks = torch.zeros(4, 2, 2, dtype=torch.uint8)
    masks[:, 0] = high
    labels = Labels("training data", 2, are_dense=True, ignored=255)
    if refused:
        with pytest.raises(ConfigError, match="the first 4 samples of the training data hold only 0 and 255, which is"):
            labels.check_masks(masks)
    else:
        labels.check_masks(masks)


@pytest.mark.parametrize("value", [-1, 2])
def test_labels_of_several_classes_are_0_or_1(value: int) -> None:
    with pytest.raises(ConfigError, match=f"sample 4 of the training data has the target .0, {value}., and the labels"):
        Labels("training data", 2, are_flags=True).check([3, 4], torch.tensor([[0, 1], [0, value]]))


def test_an_evaluation_of_the_training_data_is_of_its_whole_and_plain(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("abcdefghij" * 20)
    windows = training_text(str(text), "characters", 8, 3)
    assert isinstance(windows, TextWindows)
    loader = BatchLoader(windows, Converter(torch.device("cpu")))
    targets = torch.cat([targets for _, targets in loader.eval_batches(4)]).flatten()
    assert torch.equal(targets, windows.tokens[1 : 1 + len(targets)])
    assert len(windows.tokens) - 1 - len(targets) < 8
    points = [(torch.tensor([1.0]), 0)]
    samples = Samples(
        points, transforms=[lambda point: point + torch.rand(1)], plain_transforms=[lambda point: 2 * point]
    )
    assert samples.one()[0].tolist() == [[2.0]]
    assert samples.one(epoch=0)[0].tolist() != [[2.0]]
    assert samples.read([(EVALUATION, 0)]).samples[0][0].tolist() == [2.0]


def test_a_part_of_a_batch_does_not_keep_the_whole_batch() -> None:
    data = [(torch.zeros(1), 0)] * 64
    loader = BatchLoader(data, Converter(torch.device("cpu")), rank=1, size=8)
    (batch,) = loader.epoch(0, 64, lambda batch: micro_batch_parts(batch, 1, 1, 8))
    assert batch.parts[0].indices.untyped_storage().nbytes() == 8 * 8


def test_a_number_for_the_whole_batch_stays_in_a_batch_of_no_samples() -> None:
    batch = without_samples((torch.zeros(3, 2), torch.tensor(5.0)))
    assert batch[0].shape == (0, 2)
    assert batch[1].item() == 5


def test_a_model_takes_a_number_for_the_whole_batch_beside_its_samples() -> None:
    class Scaled(nn.Module):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return inputs["image"].flatten(1) * inputs["scale"]

    for count in (3, 0):
        inputs = {"image": torch.ones(count, 1, 2, 2), "scale": torch.tensor(2.0)}
        assert torch.equal(forward(Scaled(), inputs), torch.full((count, 4), 2.0))


def test_predictions_of_a_folder_of_images_name_its_files(tmp_path: Path) -> None:
    folder = write_small_data(tmp_path)
    loader = BatchLoader(
        UndecodedImages(class_folders(str(folder), False, "test", None, None), 8), Converter(torch.device("cpu"))
    )
    rows = list(table({"prediction": torch.zeros(8, dtype=torch.int64)}, ["cat", "dog"], files_of(loader)))
    assert rows[:2] == ["index,file,prediction\n", "0,cat/0.jpg,cat\n"]
    assert rows[8] == "7,dog/3.jpg,cat\n"
