"""The data of a run, from its config: what the data tells, what is compared, and what is refused."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torchvision.io import write_jpeg

from lockstep.data import DataSource, Splits, Tensors
from lockstep.data.build import build_data, completed, prepare_first
from lockstep.data.partition import seed_all
from lockstep.data.source import class_count, of_each_sample, require_same_classes
from lockstep.errors import ConfigError
from lockstep.snapshots import fingerprint as fingerprint_module
from lockstep.snapshots.fingerprint import data_fingerprint
from support.configs import composed, with_values
from support.own_data import Points


def own(name: str, *words: str, test: str | None = None, module: str = "support.own_data") -> Any:
    """A config with the data set `name` of a module for both splits."""
    base = ["dataset=pair", f"dataset.train._target_={module}.{name}", f"dataset.test._target_={module}.{test or name}"]
    usual = ["model=mlp", "trainer.precision=fp64", "logger=[]", "trainer.batch_size=6", "trainer.epochs=2"]
    return composed(*base, *usual, "scheduler=constant", *words)


def here(name: str, *words: str, test: str | None = None) -> Any:
    return own(name, *words, test=test, module="test_build_data")


class Names(Dataset[Any]):
    """As torchvision's: names of classes, and a class of each sample."""

    def __init__(self, names: str = "abc", size: int = 6, classes: int | None = None) -> None:
        self.classes, self.size = list(names), size
        self.targets = [number % (classes or len(names)) for number in range(size)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 4, 4), self.targets[index]


def numbered() -> Tensors:
    return Tensors(torch.zeros(9, 2, 5), torch.arange(9) % 4)


def labelled() -> Tensors:
    return Tensors(torch.zeros(9, 4), torch.ones(9, 6))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Points())


class Words(Points):
    """All targets are there, as words."""

    targets = ("left", "right") * 11 + ("left",)


@pytest.mark.parametrize(
    ("config", "shape", "classes"),
    [
        (own("Named"), [4], 2),
        (here("Names"), [3, 4, 4], 3),
        (here("numbered"), [2, 5], 4),
        (here("labelled", "task=multi_label"), [4], 6),
        (own("tensors"), [4], 2),
    ],
)
def test_the_data_tells_the_shape_and_the_number_of_classes(config: Any, shape: list[int], classes: int) -> None:
    found = completed(config, build_data(config))
    assert (found.model["shape"], found.model["classes"], found.dataset["shape"]) == (shape, classes, shape)
    typed = with_values(config, f"dataset.classes={classes + 3}")
    assert completed(typed, build_data(typed)).model["classes"] == classes + 3


def test_what_is_told_is_that_of_transformed_samples() -> None:
    resize = "loader.transforms=[{_target_:torchvision.transforms.v2.Resize,size:7}]"
    config = here("Names", resize)
    assert completed(config, build_data(config)).model["shape"] == [3, 7, 7]


@pytest.mark.parametrize("config", [own("Points"), here("Words")])
def test_classes_that_are_not_known_are_asked_for(config: Any) -> None:
    with pytest.raises(ConfigError, match="model.classes is not known.*; type dataset.classes=<how many>"):
        completed(config, build_data(config))


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("abc", None),
        ("ab", None),
        ("", None),
        ("bc", "^class 0 is a in the training data and b in the test data; type x$"),
        ("abcd", "^class 3 is no class in the training data and d in the test data; type x$"),
    ],
)
def test_classes_are_compared_by_name(test: str, said: str | None) -> None:
    compared: Any = (list("abc"), list(test), "the training data", "the test data", "type x")
    if said is None:
        require_same_classes(*compared)
        return
    with pytest.raises(ConfigError, match=said):
        require_same_classes(*compared)


def test_folders_of_torchvision_with_other_classes_are_refused(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "train/c", "test/b", "test/c"):
        (tmp_path / name).mkdir(parents=True)
        write_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8), str(tmp_path / name / "0.jpg"))
    words = [f"dataset.{split}._target_=torchvision.datasets.ImageFolder" for split in ("train", "test")]
    words += [f"+dataset.{split}.root={tmp_path / split}" for split in ("train", "test")]
    with pytest.raises(ConfigError, match="class 0 is a in the training data and b in the test data; give both"):
        build_data(composed("dataset=pair", *words))


def test_splits_without_samples_are_refused_and_training_data_that_is_not_needed_is_not() -> None:
    for words, said in (
        ({"test": "Points"}, "the training data has no samples"),
        ({}, "the training data has no samples; type dataset=<another one>, or correct its folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_data(own("Empty", **words))
    with pytest.raises(ConfigError, match="the test data has no samples"):
        build_data(own("Points", test="Empty"))
    with pytest.raises(TypeError, match="has no len"):
        build_data(here("Stream"))
    assert len(build_data(own("Empty", test="Points"), needs_training_data=False).train) == 23


@dataclass(kw_only=True)
class Waves(DataSource):
    """A source of one's own, which has to be prepared."""

    count: int
    folder: str

    def prepare(self) -> None:
        torch.save(torch.rand(self.count, 2), Path(self.folder, "waves.pt"))

    def splits(self) -> Splits:
        waves = torch.load(Path(self.folder, "waves.pt"), weights_only=True)
        return Splits(*(Tensors(waves, (waves[:, 0] > 0.5).long()) for _ in range(2)))


WAVES = ["dataset=digits", "dataset._target_=test_build_data.Waves", "dataset.shape=null", "dataset.classes=null"]
WAVES += ["dataset.mean=null", "dataset.std=null"]


def test_a_source_of_ones_own_is_prepared(tmp_path: Path) -> None:
    words = [*WAVES, f"+dataset.folder={tmp_path}"]
    config = composed(*words, "+dataset.count=7")
    prepare_first(config)
    first = build_data(config).train.inputs
    prepare_first(config)
    assert build_data(config).train.inputs.equal(first)  # what it draws depends on the seed alone
    assert len(first) == 7
    missing = composed(*WAVES, f"+dataset.folder={tmp_path / 'none'}", "+dataset.count=7")
    with pytest.raises(
        ConfigError, match="the data of test_build_data.Waves cannot be read .*test_build_data.py:.*; type data_dir="
    ):
        prepare_first(missing)


class Drawn(Dataset[Any]):
    """Points that are drawn where the data set is made."""

    def __init__(self) -> None:
        self.points = torch.rand(4, 2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        return self.points[number], number % 2


def test_what_a_data_set_draws_depends_on_the_seed_alone() -> None:
    config = here("Drawn", "seed=3")
    first = build_data(config)
    seed_all(9)
    assert build_data(config).train.points.equal(first.train.points)
    assert not first.test.points.equal(first.train.points)
    assert not build_data(replace(config, seed=4)).train.points.equal(first.train.points)


def test_attributes_of_samples_have_one_value_for_each() -> None:
    assert of_each_sample(TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1])), "targets").tolist() == [0, 1, 1]
    assert class_count(Tensors(torch.zeros(4, 1), torch.tensor([0, 0, 6, 1])), torch.tensor(0)) == 7
    assert of_each_sample(Points(), "groups") is None


# The hash by which ranks and resumed runs see that their data is other data.


@pytest.mark.parametrize("row", [0, 1, 500, 999])
def test_one_bit_in_any_row_in_memory_counts(row: int) -> None:
    inputs, targets = torch.randint(0, 256, (1000, 1, 5, 5), dtype=torch.uint8), torch.arange(1000)
    before = data_fingerprint(Tensors(inputs, targets))
    assert before.endswith(" of all samples and targets")
    assert before == data_fingerprint(Tensors(inputs.clone(), targets.clone()))
    assert before != data_fingerprint(Tensors(inputs.view(1000, 5, 1, 5), targets))
    for changed in (0, 1):
        pair = [inputs.clone(), targets.clone()]
        pair[changed].view(1000, -1)[row, -1] ^= 1
        assert before != data_fingerprint(Tensors(*pair))
    assert before != data_fingerprint(Tensors(inputs, targets, weights=torch.ones(1000)))


def test_of_tensors_that_are_too_large_rows_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_module, "LARGEST_TENSOR", 100)
    before = data_fingerprint(Tensors(torch.zeros(1000, 2), torch.zeros(1000)))
    assert before.endswith(" of 64 of 1000 samples and targets")
    assert before != data_fingerprint(Tensors(torch.eye(1000)[:, :2], torch.zeros(1000)))


def test_of_other_data_the_length_and_all_targets_count() -> None:
    pairs = [(torch.rand(3), number) for number in range(50)]
    assert data_fingerprint(pairs) == data_fingerprint(pairs[:])
    assert data_fingerprint(pairs) != data_fingerprint([*pairs, pairs[0]])

    def of(*targets: int) -> str:
        return data_fingerprint(TensorDataset(torch.rand(3, 2), torch.tensor(targets)))

    assert of(1, 2, 3).endswith(" of the length and targets")
    assert of(1, 2, 3) == of(1, 2, 3) != of(1, 2, 4)
