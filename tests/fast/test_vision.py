"""Small data sets in memory: their tensors."""

import pytest
import torch
import torchvision
from sklearn.datasets import load_digits

from lockstep.data.build import prepare_first
from lockstep.data.vision import Digits, RandomPairs
from lockstep.errors import ConfigError
from support.configs import composed


def test_digits_are_those_of_sklearn_in_a_fixed_order():
    splits, (pixels, labels) = Digits().splits(), load_digits(return_X_y=True)
    images = torch.cat([splits.train.inputs, splits.test.inputs])
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert torch.equal(images.flatten(1), torch.from_numpy(pixels * 15).byte()[order])
    assert torch.equal(torch.cat([splits.train.targets, splits.test.targets]), torch.from_numpy(labels)[order])
    assert (len(splits.train), len(splits.test), images.dtype) == (1437, 360, torch.uint8)


def test_pairs_differ_between_splits_and_seeds_alone():
    one, again, other = (RandomPairs(samples=5, features=3, seed=seed).splits() for seed in (1, 1, 2))
    assert torch.equal(one.train.inputs, again.train.inputs)
    assert len({split.inputs.sum().item() for split in (one.train, one.test, other.train, other.test)}) == 4


def test_missing_images_that_cannot_be_downloaded_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(ConfigError, match="TorchvisionImages cannot be read .*Error downloading.*; type data_dir="):
        prepare_first(composed("dataset=mnist", f"data_dir={tmp_path}"))
