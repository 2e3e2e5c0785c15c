"""The data sets themselves, and a map-style one through DataLoader workers."""

import os

import pytest
import torch
from PIL import Image

from conftest import TORCHRUN, TRAIN
from lockstep import datasets


@pytest.fixture
def pictures(tmp_path):
    """37 training and 11 test pictures of two classes, light and dark, of uneven sizes."""
    for split, count in (("train", 37), ("test", 11)):
        for number in range(count):
            kind = ("dark", "light")[number % 2]
            folder = tmp_path / "pictures" / split / kind
            folder.mkdir(parents=True, exist_ok=True)
            shade = 40 + 150 * (number % 2) + number
            Image.new("RGB", (30 + number, 50), (shade, shade, shade)).save(folder / f"{number}.jpg")
    return tmp_path / "pictures"


def test_digits_are_the_real_ones_and_split_once():
    train, test = datasets.digits(train=True), datasets.digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    assert (train.samples.dtype, tuple(train.samples.shape[1:])) == (torch.uint8, (1, 8, 8))
    assert torch.cat([train.targets, test.targets]).bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST lies")
def test_mnist_equals_torchvisions_reading():
    import torchvision

    data_dir = os.environ["LOCKSTEP_DATA"]
    ours, theirs = datasets.mnist(data_dir, "MNIST", train=False), torchvision.datasets.MNIST(data_dir, train=False)
    assert torch.equal(ours.samples[:, 0], theirs.data)
    assert torch.equal(ours.targets, theirs.targets)


def test_image_folder_gives_the_same_numbers_on_one_and_three_ranks(train, start, pictures):
    # batches of 9 leave a last one of 1: two ranks have nothing to do there
    folder = ["dataset=image_folder", f"dataset.root={pictures}", "dataset.classes=2", "dataset.size=16", "dataset.workers=1",
              "trainer.batch_size=9", "trainer.epochs=2", "sync_bn=on", "optimizer.lr=0.01"]  # fmt: skip
    alone = train(*folder, "hydra.run.dir=alone")
    three = start(*TORCHRUN, "--standalone", "--nproc_per_node=3", TRAIN, *folder, "hydra.run.dir=three").finish()
    assert "37 training and 11 test samples" in alone.output
    assert three.epochs == alone.epochs


def test_image_folder_says_what_is_wrong(train, pictures):
    assert "type dataset.root=" in train("dataset=image_folder", "dataset.classes=2", code=2).output
    assert "type dataset.classes=2" in train("dataset=image_folder", f"dataset.root={pictures}", "dataset.classes=3", code=2).output
