"""The data sets themselves."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.builtin import cifar10, digits, mnist, random_pairs
from lockstep.data.dataset import InMemoryDataset, Labels, check_shape, class_names
from lockstep.errors import ConfigError
from support.small_data import write_idx


def test_digits_are_the_real_ones_and_split_once() -> None:
    train, test = digits(train=True), digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    assert (train.samples.dtype, tuple(train.samples.shape[1:])) == (torch.uint8, (1, 8, 8))
    counts = torch.cat([train.targets, test.targets]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(train.samples.max()) == 240


def test_idx_files_are_read_as_images_and_classes(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    write_idx(folder, train=3, test=2)
    data = mnist(str(tmp_path), "MNIST", train=False)
    assert data.samples.shape == (2, 1, 28, 28)
    stored = (folder / "t10k-images-idx3-ubyte").read_bytes()
    assert bytes(data.samples.flatten().tolist()) == stored[16:]
    assert data.targets.tolist() == [0, 1]


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST lies")
def test_mnist_equals_torchvisions_reading() -> None:
    import torchvision

    data_dir = os.environ["LOCKSTEP_DATA"]
    ours, theirs = mnist(data_dir, "MNIST", train=False), torchvision.datasets.MNIST(data_dir, train=False)
    assert torch.equal(ours.samples[:, 0], theirs.data)
    assert torch.equal(ours.targets, theirs.targets)


def test_cifar10_images_have_their_channels_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").touch()  # it was downloaded
    images = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).view(2, 32, 32, 3)
    asked = []

    def stored(data_dir: str, train: bool) -> SimpleNamespace:
        asked.append((data_dir, train))
        return SimpleNamespace(data=images.numpy(), targets=[9, 1])

    monkeypatch.setitem(sys.modules, "torchvision.datasets", SimpleNamespace(CIFAR10=stored))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=sys.modules["torchvision.datasets"]))
    data = cifar10(str(tmp_path), train=False)
    assert torch.equal(data.samples, images.permute(0, 3, 1, 2))
    assert data.samples.is_contiguous()
    assert (data.targets.tolist(), asked) == ([9, 1], [(str(tmp_path), False)])


def test_random_pairs_depend_on_the_seed_and_the_split() -> None:
    one, again, test, other = (
        random_pairs(9, 4, seed, train) for seed, train in [(1, True), (1, True), (1, False), (2, True)]
    )
    assert (one.samples.shape, one.targets.shape) == ((9, 4), (9, 1))
    assert torch.equal(one.samples, again.samples)
    assert torch.equal(one.targets, again.targets)
    assert not any(torch.equal(one.samples, different.samples) for different in (test, other))
    assert 0 <= float(one.samples.min()) < float(one.samples.max()) <= 1


def test_a_class_that_the_model_does_not_know_is_refused_with_its_sample() -> None:
    def check(classes: int, targets: list[float], is_signed: bool = False) -> None:
        Labels("test data", classes, is_signed).check(range(3), torch.tensor(targets))

    check(5, [0, 4, 1])
    with pytest.raises(ConfigError, match="sample 1 of the test data has the target 4, .*; type dataset.classes=5"):
        check(4, [0, 4, 1])
    with pytest.raises(ConfigError, match="sample 2 of the test data has the target -1, and the classes are 0 to 4"):
        check(5, [0, -100, -1])
    check(5, [0, 4, -1], is_signed=True)
    check(1, [0.0, 4.0, 1.0])  # regression
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16):
        Labels("test data", 70000).check(range(2), torch.tensor([0, 100], dtype=dtype))
    with pytest.raises(ConfigError, match="sample 1 of the test data has the target 255, .*; type dataset.classes=256"):
        Labels("test data", 255).check(range(2), torch.tensor([0, 255], dtype=torch.uint8))

    with pytest.raises(ConfigError, match="sample 7 of the test data has the target -100, and a classi"):
        Labels("test data", None, ignored=None).check([6, 7], torch.tensor([0, -100]))


@pytest.mark.parametrize("wrong", [[-0.5, 1.5, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [float("nan"), 1.0, 0.0]])
def test_numbers_that_are_no_probabilities_are_refused_with_their_sample(wrong: list[float]) -> None:
    targets = torch.tensor([[0.2, 0.8, 0.0], wrong])
    said = (
        r"^sample 5 of the test data has the target \[.*\], which are no probabilities .* type task=regression, or task"
    )
    with pytest.raises(ConfigError, match=said):
        Labels("test data", None, are_probabilities=True).check([4, 5], targets)
    Labels("test data", None).check([4, 5], targets)  # for a task of the user's


@pytest.mark.parametrize("wrong", [[-1.0, 0.0], [2.0, 0.0], [float("nan"), 1.0], [[0, 1], [0, 3]]])
def test_labels_that_are_neither_0_nor_1_are_refused_with_their_sample(wrong: list[Any]) -> None:
    values = torch.tensor(wrong)
    targets = torch.stack([torch.zeros_like(values), values])
    with pytest.raises(ConfigError, match=r"^sample 5 of the test data has the target \[.*\], and the labels"):
        Labels("test data", None, are_flags=True).check([4, 5], targets)
    Labels("test data", None, are_flags=True).check([4, 5], torch.tensor([[True, False], [False, True]]))


def test_a_shape_that_is_not_the_samples_is_refused() -> None:
    data, cropped = InMemoryDataset(torch.zeros(2, 1, 8, 8), torch.zeros(2)), torch.zeros(1, 1, 6, 6)
    for fitting in (None, [1, 8, 8], [1, 6, 6]):
        check_shape(data, cropped, fitting)
    with pytest.raises(ConfigError, match=r"the samples have the shape \[1,6,6\]; type dataset.shape=\[1,6,6\]"):
        check_shape(data, cropped, [2, 28, 4])


@pytest.mark.parametrize(
    ("samples", "targets", "said"),
    [
        (torch.zeros(4, 2), torch.zeros(3), "has 4 samples and 3 targets, and each sample must have one; type "),
        (
            np.zeros((4, 2)),
            torch.zeros(4),
            r"samples .* an object of ndarray, .*; type torch.as_tensor\(<samples>\)",
        ),
        (torch.zeros(4, 2), torch.tensor(1), r"the targets .* are one number, .*; type torch.as_tensor\(<targets>\)"),
    ],
)
def test_data_in_memory_that_is_no_tensors_of_one_length_is_refused(samples: Any, targets: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        InMemoryDataset(samples, targets)


def test_names_of_classes_are_a_collection_of_names() -> None:
    for stored, names in ((("a", "b"), ["a", "b"]), ({"a": 0}, ["a"]), (2, []), (None, []), ("ab", [])):
        assert class_names(SimpleNamespace(classes=stored)) == names
    assert class_names([]) == []
