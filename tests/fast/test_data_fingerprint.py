"""The hash of a data set: what it covers, and that a change there is seen."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.io import write_jpeg

from lockstep.data.dataset import InMemoryDataset
from lockstep.data.image_files import class_folders
from lockstep.data.images import UndecodedImages
from lockstep.snapshots import data_fingerprint as module
from lockstep.snapshots.data_fingerprint import data_fingerprint


@pytest.mark.parametrize("row", [0, 1, 500, 999])
def test_one_bit_in_any_row_in_memory_counts(row: int) -> None:
    samples, targets = torch.randint(0, 256, (1000, 1, 5, 5), dtype=torch.uint8), torch.arange(1000)
    before = data_fingerprint(InMemoryDataset(samples, targets))
    assert before.endswith(" of all samples and targets")
    assert before == data_fingerprint(InMemoryDataset(samples.clone(), targets.clone()))
    assert before != data_fingerprint(InMemoryDataset(samples.view(1000, 5, 1, 5), targets))
    other = samples.clone()
    other[row, 0, 4, 4] ^= 1
    assert before != data_fingerprint(InMemoryDataset(other, targets))
    other_targets = targets.clone()
    other_targets[row] ^= 1
    assert before != data_fingerprint(InMemoryDataset(samples, other_targets))


def test_of_tensors_that_are_too_large_rows_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_TENSOR", 100)
    samples, targets = torch.zeros(1000, 2), torch.zeros(1000)
    before = data_fingerprint(InMemoryDataset(samples, targets))
    assert before.endswith(" of 64 of 1000 samples and targets")
    samples = samples.clone()
    samples[0] = 1
    assert before != data_fingerprint(InMemoryDataset(samples, targets))


def test_windows_that_overlap_count_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_TENSOR", 8 * 1000)  # bytes of the text, not of all its windows
    text = torch.arange(1000)

    def fingerprint() -> str:
        return data_fingerprint(InMemoryDataset(text[:-1].unfold(0, 64, 1), text[1:].unfold(0, 64, 1)))

    before = fingerprint()
    assert before.endswith(" of all samples and targets")
    for place in (0, 500, 999):
        text[place] += 1
        after = fingerprint()
        assert before != after
        before = after


def test_names_sizes_and_classes_of_a_folder_of_images_count_and_times_apart(tmp_path: Path) -> None:
    def folder(root: Path) -> UndecodedImages:
        return UndecodedImages(class_folders(str(root), True, "test", 2, None), 8)

    for root in (tmp_path / "one", tmp_path / "two"):
        for number, name in enumerate(("cat", "dog")):
            (root / "train" / name).mkdir(parents=True)
            write_jpeg(torch.full((3, 8, 8), number, dtype=torch.uint8), str(root / "train" / name / "0.jpg"))
    one, other = tmp_path / "one", tmp_path / "two" / "train" / "cat" / "0.jpg"
    same = data_fingerprint(folder(one))
    assert same.endswith(" of the names of 2 files and the sizes of 2")
    assert same == data_fingerprint(folder(tmp_path / "two"))
    os.utime(one / "train" / "cat" / "0.jpg", (1e9, 1e9))
    assert same == data_fingerprint(folder(one))
    other.write_bytes(other.read_bytes() + b"0")
    assert same != data_fingerprint(folder(tmp_path / "two"))
    (one / "train" / "cat" / "0.jpg").rename(one / "train" / "cat" / "1.jpg")
    assert same != data_fingerprint(folder(one))


def test_of_other_data_targets_are_sampled() -> None:
    pairs = [(torch.rand(3), float(number)) for number in range(50)]
    assert data_fingerprint(pairs).endswith(" of the length and 16 targets")
    assert data_fingerprint(pairs) == data_fingerprint(pairs[:])
    assert data_fingerprint(pairs) != data_fingerprint([(sample, target + 1) for sample, target in pairs])
    assert data_fingerprint(pairs) != data_fingerprint([*pairs, pairs[0]])
    for kind in (np.int64, np.float32, np.array, torch.tensor, lambda target: torch.tensor([target])):
        typed = [(sample, kind(target)) for sample, target in pairs]
        assert data_fingerprint(typed) == data_fingerprint(pairs)
    assert data_fingerprint([{"x": sample, "label": target} for sample, target in pairs]) == data_fingerprint(pairs)
