"""The data of a run, from its config: what the data tells, what is compared, and what is refused."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.data import DataSource, Splits, Tensors
from lockstep.data.build import build_data, completed, prepare_first
from lockstep.data.partition import seed_all
from lockstep.data.vision import Digits
from lockstep.errors import ConfigError
from lockstep.snapshots import fingerprint as fingerprint_module
from lockstep.snapshots.fingerprint import data_fingerprint
from support.configs import composed, with_values
from support.own_data import Points


class Names(Dataset[Any]):
    """As torchvision's: names of classes, and a class of each sample."""

    def __init__(self, names: str = "abc") -> None:
        self.classes, self.targets = list(names), [number % len(names) for number in range(6 * bool(names))]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 4, 4), self.targets[index]


class Words(Points):
    """All targets are there, as words."""

    targets = ("left", "right") * 11 + ("left",)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Points())


numbered = partial(Tensors, torch.zeros(9, 2, 5), torch.arange(9) % 4)
labelled = partial(Tensors, torch.zeros(9, 4), torch.ones(9, 6))
pairs = partial(TensorDataset, torch.zeros(23, 4), torch.arange(23) % 2)


def own(train: str, *words: str, test: str | None = None) -> Any:
    """A config with data sets of this file, which may have arguments."""
    nodes = [f"+dataset.train={{_target_:test_build_data.{train}}}"]
    nodes.append(f"+dataset.test={{_target_:test_build_data.{test or train}}}")
    return composed("dataset=pair", *nodes, "model=mlp", *words)


RESIZED = "loader.transforms=[{_target_:torchvision.transforms.v2.Resize,size:7}]"
# A data set, the shape and the number of classes that it tells, and other words.
TOLD = [
    ("Names", [3, 4, 4], 3, []),
    ("Names", [3, 7, 7], 3, [RESIZED]),
    ("numbered", [2, 5], 4, []),
    ("labelled", [4], 6, ["task=multi_label"]),
    ("pairs", [4], 2, []),
]


def test_the_data_tells_the_shape_and_the_number_of_classes() -> None:
    for name, shape, classes, words in TOLD:
        config = own(name, *words)
        found = completed(config, build_data(config))
        assert (found.model["shape"], found.model["classes"], found.dataset["shape"]) == (shape, classes, shape)
        typed = with_values(config, f"dataset.classes={classes + 3}")
        assert completed(typed, build_data(typed)).model["classes"] == classes + 3


REFUSED = [
    (own("Words"), ConfigError, "model.classes is not known.*; type dataset.classes=<how many>"),
    (own("Names,names:abc", test="Names,names:bc"), ConfigError, "class 0 is a in the training data and b in the test"),
    (own("Names", test="Names,names:abcd"), ConfigError, "class 3 is no class in the training data and d in .*; give"),
    (own("Names,names:''", test="Points"), ConfigError, "the training data has no samples; type dataset=<another one>"),
    (own("Points", test="Names,names:''"), ConfigError, "the test data has no samples"),
    (own("Stream"), TypeError, "has no len"),
]


def test_data_that_cannot_be_used_is_refused_and_what_is_not_needed_may_be_gone() -> None:
    for config, kind, said in REFUSED:
        with pytest.raises(kind, match=said):
            completed(config, build_data(config))
    assert len(build_data(own("Names,names:''", test="Points"), needs_training_data=False).train) == 23
    assert len(build_data(own("Names", test="Names,names:ab")).test) == 6


@dataclass(kw_only=True)
class Waves(DataSource):
    """A source of one's own, which has to be prepared."""

    count: int
    folder: str

    def prepare(self) -> None:
        torch.save(torch.rand(self.count, 2), Path(self.folder, "waves.pt"))

    def splits(self) -> Splits:
        waves, drawn = torch.load(Path(self.folder, "waves.pt"), weights_only=True), torch.rand(self.count, 2)
        return Splits(*(Tensors(one, (one[:, 0] > 0.5).long()) for one in (waves, drawn)))


def test_a_source_of_ones_own_is_prepared_and_what_it_draws_depends_on_the_seed_alone(tmp_path: Path) -> None:
    words = ["dataset=digits", "dataset._target_=test_build_data.Waves", "+dataset.count=7"]
    config = composed(*words, f"+dataset.folder={tmp_path}")
    prepare_first(config)
    first = build_data(config)
    seed_all(9)
    prepare_first(config)
    again, other = build_data(config), build_data(replace(config, seed=4))
    assert again.train.inputs.equal(first.train.inputs)
    assert again.test.inputs.equal(first.test.inputs)
    assert not other.test.inputs.equal(first.test.inputs)
    assert len(first.train) == 7
    said = "the data of test_build_data.Waves cannot be read .*test_build_data.py:.*; type data_dir="
    with pytest.raises(ConfigError, match=said):
        prepare_first(composed(*words, f"+dataset.folder={tmp_path / 'none'}"))


def test_digits_are_those_of_sklearn_in_a_fixed_order() -> None:
    splits, (pixels, labels) = Digits().splits(), load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.cat([splits.train.inputs, splits.test.inputs])
    assert torch.equal(images.flatten(1), torch.from_numpy(pixels * 15).byte()[order])
    assert torch.equal(torch.cat([splits.train.targets, splits.test.targets]), torch.from_numpy(labels)[order])
    assert (len(splits.train), len(splits.test), images.dtype) == (1437, 360, torch.uint8)


# The hash by which ranks and resumed runs see that their data is other data.


def test_one_bit_in_any_row_in_memory_counts_and_of_other_data_the_length_and_all_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, targets = torch.randint(0, 256, (1000, 1, 5, 5), dtype=torch.uint8), torch.arange(1000)
    before = data_fingerprint(Tensors(inputs, targets))
    assert before.endswith(" of all samples and targets")
    assert before == data_fingerprint(Tensors(inputs.clone(), targets.clone()))
    for changed, row in product((0, 1), (0, 500, 999)):
        pair = [inputs.clone(), targets.clone()]
        pair[changed].view(1000, -1)[row, -1] ^= 1
        assert before != data_fingerprint(Tensors(*pair))
    assert before != data_fingerprint(Tensors(inputs, targets, weights=torch.ones(1000)))
    monkeypatch.setattr(fingerprint_module, "LARGEST_TENSOR", 100)
    assert data_fingerprint(Tensors(inputs, targets)).endswith(" of 64 of 1000 samples and targets")
    rows = [(torch.rand(3), number) for number in range(50)]
    assert data_fingerprint(rows) == data_fingerprint(rows[:]) != data_fingerprint([*rows, rows[0]])
    one, same, other = (
        data_fingerprint(TensorDataset(torch.rand(3, 2), torch.tensor([1, 2, last]))) for last in (3, 3, 4)
    )
    assert one.endswith(" of the length and targets")
    assert one == same != other
