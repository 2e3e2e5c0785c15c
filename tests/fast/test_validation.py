"""What is held out of the training data: how much of what, that nothing stands on both sides, and what is refused."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.data.build import datasets, prepare, samples
from lockstep.data.builtin import digits
from lockstep.data.dataset import IGNORED, InMemoryDataset, numbers_of
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.split import HeldOut, Split, hold_out
from lockstep.data.text import Text, TextWindows, _windows
from lockstep.errors import ConfigError
from lockstep.modes.train import Train
from lockstep.snapshots.data_fingerprint import data_fingerprint
from support.configs import composed
from support.small_data import write_small_data

TRAIN = 1437  # digits


class Patients(Dataset[tuple[torch.Tensor, int]]):
    """Samples of patients, each of whom has several, and a class for each sample."""

    def __init__(self, samples: int = 240, patients: int = 48, classes: int = 3) -> None:
        random = np.random.default_rng(0)
        self.groups = [f"patient {number}" for number in random.integers(0, patients, samples)]
        self.targets = random.integers(0, classes, samples).tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), self.targets[index]


def both_sides(dataset: Any, held_out: HeldOut) -> tuple[set[int], set[int]]:
    """The numbers of the samples on both sides, which together are all, each on one side."""
    train, val = (set(numbers_of(part).tolist()) for part in (held_out.train, held_out.validation))  # type: ignore[union-attr]
    assert not train & val
    assert train | val == set(range(len(dataset)))
    assert len(train) == len(held_out.train)
    assert len(val) == len(held_out.validation)
    return train, val


@pytest.mark.parametrize(("size", "count"), [(0.1, 144), (0.25, 359), (100.0, 100), (0.0001, 1), (1436.0, 1436)])
def test_a_share_or_a_number_is_held_out_with_the_classes_of_the_rest(size: float, count: int) -> None:
    data = digits(train=True)
    held_out = hold_out(data, Split(size, None, 0, "auto"))
    _, val = both_sides(data, held_out)
    assert len(val) == count
    of_all, of_val = (torch.bincount(data.targets[rows], minlength=10) for rows in (slice(None), sorted(val)))
    assert ((of_val - of_all * count / TRAIN).abs() <= 1).all()


def test_data_without_classes_is_held_out_at_random_and_another_seed_holds_out_other_samples() -> None:
    data = InMemoryDataset(torch.rand(50, 2), torch.rand(50, 1))
    first, again, other = (both_sides(data, hold_out(data, Split(0.2, None, seed, "auto")))[1] for seed in (0, 0, 1))
    assert len(first) == len(other) == 10
    assert first == again != other


@pytest.mark.parametrize("kind", ["classes", "values", "groups", "list"])
def test_over_all_folds_each_sample_is_validated_once(kind: str) -> None:
    values = InMemoryDataset(torch.rand(53, 2), torch.rand(53, 1))
    rows = [(torch.rand(2), number % 3) for number in range(53)]
    data: Any = {"classes": digits(train=True), "values": values, "groups": Patients(), "list": rows}[kind]
    folds = [both_sides(data, hold_out(data, Split(None, (fold, 5), 3, "auto")))[1] for fold in range(5)]
    assert sorted(number for fold in folds for number in fold) == list(range(len(data)))
    sizes = [len(fold) for fold in folds]
    assert max(sizes) - min(sizes) <= (20 if kind == "groups" else 1)
    if kind == "classes":
        counts = torch.stack([torch.bincount(data.targets[sorted(fold)], minlength=10) for fold in folds])
        assert (counts.max(0).values - counts.min(0).values).max() <= 1


@pytest.mark.parametrize(("size", "fold"), [(0.1, None), (0.3, None), (30.0, None), (None, (2, 4))])
def test_samples_of_one_group_stay_together(size: float | None, fold: tuple[int, int] | None) -> None:
    data = Patients()
    train, val = both_sides(data, hold_out(data, Split(size, fold, 0, "on")))
    assert not {data.groups[number] for number in train} & {data.groups[number] for number in val}
    wanted = {0.1: 24, 0.3: 72, 30.0: 30, None: 60}[size]
    assert abs(len(val) - wanted) <= 12
    alone = both_sides(data, hold_out(data, Split(size, fold, 0, "off")))
    assert {data.groups[number] for number in alone[0]} & {data.groups[number] for number in alone[1]}


def windows(tokens: int, block: int) -> TextWindows:
    """A text in which each token is its own place."""
    places = torch.arange(tokens)
    return TextWindows(*_windows(places, block), Text(places, []), places, (tokens - 1) // block)


def tokens_of(part: InMemoryDataset, indices: torch.Tensor) -> tuple[set[int], list[int]]:
    """The tokens that these samples of a text touch, and the targets that count."""
    rows = part.rows(indices)
    inputs, targets = part.samples[rows], part.targets[rows]
    counted = targets != IGNORED
    return set(inputs[counted].tolist()) | set(targets[counted].tolist()), targets[counted].tolist()


@pytest.mark.parametrize(("tokens", "block", "size"), [(5000, 8, 0.1), (5000, 8, 20.0), (900, 16, 0.3), (300, 8, 0.02)])
def test_a_text_is_held_out_in_blocks_that_no_training_window_touches(tokens: int, block: int, size: float) -> None:
    text = windows(tokens, block)
    held_out = hold_out(text, Split(size, None, 0, "auto"))
    train, val = held_out.train, held_out.validation
    trained, _ = tokens_of(train, torch.arange(len(train)))
    validated, targets = tokens_of(val, torch.arange(len(val)))
    assert not trained & validated
    assert len(targets) == len(set(targets))
    blocks = (tokens - 1) // block
    assert len(val) == len(held_out.numbers) == (max(1, round(size * blocks)) if size < 1 else size)
    assert torch.equal(val.samples[:, 0], held_out.numbers)
    assert len(trained) >= tokens - len(validated) - 11 * 2 * block  # but for windows at the edges of the pieces
    assert train.epoch_samples == len(train) // block
    drawn = tokens_of(train, train.epoch_order(torch.Generator().manual_seed(0)))
    assert drawn[0] <= trained
    assert not drawn[0] & validated


def test_over_all_folds_each_token_of_a_text_is_a_target_once() -> None:
    text, targets = windows(2000, 8), list[int]()
    for fold in range(4):
        held_out = hold_out(text, Split(None, (fold, 4), 1, "auto"))
        validated, counted = tokens_of(held_out.validation, torch.arange(len(held_out.validation)))
        assert not validated & tokens_of(held_out.train, torch.arange(len(held_out.train)))[0]
        targets += counted
    assert sorted(targets) == list(range(1, 2000))


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("data", "split", "said"),
    [
        (Stream(), Split(0.1, None, 0, "auto"), "the training data is an IterableDataset, Stream"),
        ([1, 2, 3], Split(3.0, None, 0, "auto"), "loader.validation=3 leaves none of the 3 training samples"),
        ([1], Split(0.1, None, 0, "auto"), "leaves none of the 1 training samples"),
        ([1, 2, 3], Split(None, (0, 5), 0, "auto"), "loader.folds=5 and the training data has 3 samples"),
        ([1, 2, 3], Split(0.5, None, 0, "on"), "has no attribute groups"),
        (Patients(20, 2), Split(None, (0, 4), 0, "on"), "the training data has 2 groups"),
        (windows(20, 9), Split(0.5, None, 0, "auto"), "leaves no 10 tokens side by side of the 20"),
    ],
)
def test_data_of_which_no_part_can_be_taken_is_refused(data: Any, split: Split, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        hold_out(data, split)
    assert "; type " in str(error.value) or "; give it one" in str(error.value)


def test_a_torch_data_set_is_held_out_by_the_classes_of_its_tensors() -> None:
    classes = torch.arange(100) % 4
    held_out = hold_out(TensorDataset(torch.rand(100, 3), classes), Split(0.2, None, 0, "auto"))
    assert torch.bincount(classes[held_out.numbers]).tolist() == [5, 5, 5, 5]


# What a run reads.


def test_the_run_s_seed_changes_nothing_in_what_is_held_out_and_split_seed_does() -> None:
    numbers = [
        str(datasets(composed(*words, whole=False), Train()).held_out)
        for words in ([], ["seed=7"], ["loader.split_seed=7"], ["loader.folds=10", "loader.fold=0"])
    ]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3


def test_a_part_has_the_hash_and_the_classes_of_the_whole_data() -> None:
    data = datasets(composed(whole=False), Train())
    assert data_fingerprint(data.train) == data_fingerprint(data.val) == data_fingerprint(digits(train=True))
    assert (len(data.train), len(data.val), len(data.test)) == (1293, 144, 360)


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    """Sample n is n. `is_random`: with a random number beside it."""

    def __init__(self, is_random: bool = False) -> None:
        self.is_random, self.classes, self.told = is_random, ["even", "odd"], list[int]()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, torch.rand(()).item() if self.is_random else 0.0]), index % 2

    def set_epoch(self, epoch: int) -> None:
        self.told = [*self.told, epoch]


def double(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * 2


OWN = ["dataset.train._target_=test_validation.Numbered", "dataset.test._target_=test_validation.Numbered"]
OWN += ["dataset.shape=[2]", "dataset.classes=2", "dataset.mean=null", "dataset.std=null", "loader.validation=0.25"]


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_samples_of_a_map_style_data_set_get_the_transforms_of_tests(workers: int) -> None:
    cfg = composed(*OWN, "loader.transforms=[{_target_:test_validation.double,_partial_:true}]")
    data = datasets(cfg, Train())
    train, val = (
        BatchLoader(samples(cfg, part, name), Converter(torch.device("cpu")), workers=workers)
        for part, name in ((data.train, "training data"), (data.val, "validation data"))
    )
    held_out = data.held_out.numbers.tolist()  # type: ignore[union-attr]
    for epoch in range(2):
        batches = train.epoch(epoch, 7, lambda batch: [_part(batch)])
        read = torch.cat([part.inputs[:, 0] for batch in batches for part in batch.parts]).tolist()
        assert sorted(read) == [2 * number for number in range(40) if number not in held_out]
        validated = torch.cat([inputs[:, 0] for inputs, _ in val.eval_batches(4)]).tolist()
        assert validated == held_out
        assert len(held_out) == 10
    numbers, inputs, _ = val.read(torch.tensor([3]))
    assert numbers.tolist() == inputs[:, 0].tolist() == [held_out[3]]
    if workers == 0:  # the data set is told the epochs of the training, whatever is evaluated in between
        assert train.samples.dataset.dataset.told == [0, 1]
    train.close()
    val.close()


def _part(batch: torch.Tensor) -> Any:
    from lockstep.data.partition import Part

    return Part(0, 0, batch)


@pytest.mark.parametrize("is_random", [False, True])
def test_a_data_set_that_draws_in_getitem_is_told(is_random: bool, caplog: pytest.LogCaptureFixture) -> None:
    cfg = composed(*OWN, f"+dataset.train.is_random={is_random}")
    with caplog.at_level(logging.WARNING):
        samples(cfg, datasets(cfg, Train()).val, "validation data")
    assert ("draws in __getitem__" in caplog.text) == is_random


def test_with_on_error_skip_no_validation_sample_takes_the_place_of_a_broken_one() -> None:
    cfg = composed(
        "loader.on_error=skip", "loader.transforms=[{_target_:test_validation.broken,_partial_:true}]", *OWN
    )
    data = datasets(cfg, Train())
    train = BatchLoader(samples(cfg, data.train, "training data"), Converter(torch.device("cpu")))
    read = {
        int(number)
        for batch in train.epoch(0, 7, lambda batch: [_part(batch)])
        for part in batch.parts
        for number in part.inputs[:, 0]
    }
    assert not read & set(data.held_out.numbers.tolist())  # type: ignore[union-attr]


def broken(inputs: torch.Tensor) -> torch.Tensor:
    if inputs[0] % 3 == 0:
        raise ValueError("it cannot be read")
    return inputs


@pytest.mark.parametrize("option", ["image_folder", "image_csv"])
@pytest.mark.parametrize("cache", ["auto", "off"])
def test_images_of_a_folder_val_are_taken_as_they_are(tmp_path: Path, option: str, cache: str) -> None:
    write_small_data(tmp_path)
    words = [f"dataset={option}", f"data_dir={tmp_path}", "dataset.size=8", f"dataset.cache={cache}"]
    words += ["loader.validation=auto"]
    without = datasets(composed(*words), Train())
    assert (len(without.train), len(without.val), len(without.test)) == (22, 2, 8)
    for name in ("cat", "dog"):
        _save(tmp_path / "val" / name / "a.jpg")
    with (tmp_path / "labels.csv").open("a") as file:
        file.writelines(f"val/{name}/a.jpg,{name},val\n" for name in ("cat", "dog"))
    cfg = composed(*words)
    prepare(cfg)
    found = datasets(cfg, Train())
    assert (len(found.train), len(found.val), len(found.test), found.held_out) == (24, 2, 8, None)
    assert [path.parent.parent.name for path, _ in found.val.source.files] == ["val", "val"]
    assert isinstance(found.val, InMemoryDataset) == (cache == "auto")  # decoded as the others
    drawn = datasets(composed(*words[:-1], "loader.validation=0.25"), Train())
    assert (len(drawn.train), len(drawn.val)) == (18, 6)


def test_a_node_reads_validation_data_of_its_own() -> None:
    cfg = composed("loader.validation={_target_:lockstep.data.builtin.digits,train:false}")
    data = datasets(cfg, Train())
    assert (len(data.train), len(data.val), data.held_out) == (TRAIN, 360, None)


def _save(path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 30)).save(path)
