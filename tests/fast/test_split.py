"""What is held out of the training data: how much of what, that nothing stands on both sides, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.data.build import build_data, reader_of
from lockstep.data.partition import fold_in
from lockstep.data.reader import request_of
from lockstep.data.source import Tensors, of_each_sample, unwrapped
from lockstep.data.split import hold_out
from lockstep.errors import ConfigError
from lockstep.snapshots.fingerprint import data_fingerprint
from support.configs import composed
from support.digits import digits


class Patients(Dataset[tuple[torch.Tensor, int]]):
    """Samples of patients, each of whom has several, and a class for each sample."""

    def __init__(self, samples: int = 240, patients: int = 48) -> None:
        draw = np.random.default_rng(0)
        self.groups = [f"patient {number}" for number in draw.integers(0, patients, samples)]
        self.targets = draw.integers(0, 3, samples).tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), self.targets[index]


def sides(dataset: Any, size: float | None, fold: Any = None, seed: int = 0, groups: str = "auto") -> tuple[Any, Any]:
    """The numbers of the samples on both sides, which together are all, each on one side."""
    parts = hold_out(dataset, size, fold, seed, groups)
    train, val = (unwrapped(part)[1].tolist() for part in parts)  # type: ignore[union-attr]
    assert sorted(train + val) == list(range(len(dataset)))
    assert [len(part) for part in parts] == [len(train), len(val)]
    return train, val


@pytest.mark.parametrize(
    ("size", "count"), [(0.1, 144), (0.25, 359), (100.0, 100), (0.0001, 1), (0.999, 1436), (1436.0, 1436)]
)
def test_a_share_or_a_number_is_held_out_with_the_classes_of_the_rest(size: float, count: int) -> None:
    data = digits(train=True)
    _, val = sides(data, size)
    assert len(val) == count
    of_all, of_val = (torch.bincount(data.targets[rows], minlength=10) for rows in (slice(None), val))
    assert ((of_val - of_all * count / 1437).abs() <= 1).all()


def test_data_without_classes_is_held_out_at_random_and_another_seed_holds_out_other_samples() -> None:
    data = Tensors(torch.rand(50, 2), torch.rand(50, 1))
    first, again, other = (sides(data, 0.2, seed=seed)[1] for seed in (0, 0, 1))
    assert len(first) == len(other) == 10
    assert first == again != other


@pytest.mark.parametrize("kind", ["classes", "values", "groups", "list"])
def test_over_all_folds_each_sample_is_validated_once(kind: str) -> None:
    values, rows = Tensors(torch.rand(53, 2), torch.rand(53, 1)), [(torch.rand(2), number % 3) for number in range(53)]
    data: Any = {"classes": digits(train=True), "values": values, "groups": Patients(), "list": rows}[kind]
    folds = [sides(data, None, (fold, 5), 3)[1] for fold in range(5)]
    assert sorted(number for fold in folds for number in fold) == list(range(len(data)))
    sizes = [len(fold) for fold in folds]
    assert max(sizes) - min(sizes) <= (20 if kind == "groups" else 1)
    if kind == "classes":
        counts = torch.stack([torch.bincount(data.targets[fold], minlength=10) for fold in folds])
        of_sklearn = StratifiedKFold(5).split(data.targets, data.targets)
        theirs = torch.stack([torch.bincount(data.targets[rows], minlength=10) for _, rows in of_sklearn])
        assert (counts.max(0).values - counts.min(0).values).max() <= 1
        assert counts.sort(0).values.equal(theirs.sort(0).values)  # as evenly as scikit-learn


def test_groups_are_folded_as_scikit_learn_does() -> None:
    data = Patients()
    splitter = StratifiedGroupKFold(4, shuffle=True, random_state=fold_in(7) % 2**32)
    numbers = np.unique(data.groups, return_inverse=True)[1]
    for fold, (_, rows) in enumerate(splitter.split(data.targets, data.targets, numbers)):
        assert sides(data, None, (fold, 4), 7)[1] == rows.tolist()


@pytest.mark.parametrize(("size", "fold"), [(0.1, None), (0.3, None), (30.0, None), (0.9, None), (None, (2, 4))])
def test_samples_of_one_group_stay_together(size: float | None, fold: tuple[int, int] | None) -> None:
    data = Patients()
    train, val = ({data.groups[number] for number in side} for side in sides(data, size, fold))
    assert not train & val
    wanted = {0.1: 24, 0.3: 72, 30.0: 30, 0.9: 216, None: 60}[size]
    assert abs(len(sides(data, size, fold)[1]) - wanted) <= 12
    train, val = ({data.groups[number] for number in side} for side in sides(data, size, fold, groups="off"))
    assert train & val


def test_a_part_of_a_data_set_has_the_groups_of_its_samples() -> None:
    part = Subset(Patients(), range(0, 240, 2))
    assert of_each_sample(part, "groups").tolist() == Patients().groups[::2]
    rows = [unwrapped(one)[1] for one in hold_out(part, 0.2, None, 0, "auto")]
    train, val = ({Patients().groups[number] for number in side} for side in rows)  # type: ignore[union-attr]
    assert not train & val


def test_a_torch_data_set_is_held_out_by_the_classes_of_its_tensors() -> None:
    classes = torch.arange(100) % 4
    _, val = sides(TensorDataset(torch.rand(100, 3), classes), 0.2)
    assert torch.bincount(classes[val]).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("data", "size", "fold", "groups", "said"),
    [
        ([1, 2, 3], 3.0, None, "auto", "loader.validation=3, and there are 3 training samples"),
        (
            [1],
            0.1,
            None,
            "auto",
            "loader.validation=0.1, and there are 1 training samples; type loader.validation=null",
        ),
        ([1, 2, 3], None, (0, 5), "auto", "loader.folds=5, and there are 3 training samples; type loader.folds=3"),
        (Patients(20, 2), None, (0, 4), "auto", "has 2 groups.*; type loader.folds=2, or loader.groups=off"),
        (Patients(20, 1), 0.2, None, "auto", "has 1 groups"),
    ],
)
def test_data_of_which_no_part_can_be_taken_is_refused(
    data: Any, size: float | None, fold: Any, groups: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        hold_out(data, size, fold, 0, groups)
    assert "; type " in str(error.value)


# What a run reads.


def test_the_run_s_seed_changes_nothing_in_what_is_held_out_and_split_seed_does() -> None:
    options: list[list[str]] = [[], ["seed=7"], ["loader.split_seed=7"], ["loader.folds=10", "loader.fold=0"]]
    numbers = [build_data(composed(*words, whole=False)).held_out.tolist() for words in options]
    assert numbers[0] == numbers[1]
    assert len({tuple(one) for one in numbers}) == 3


def test_a_part_has_the_hash_of_the_whole_data() -> None:
    data = build_data(composed(whole=False))
    assert data_fingerprint(data.train) == data_fingerprint(data.val) == data_fingerprint(digits(train=True))
    assert (len(data.train), len(data.val), len(data.test)) == (1293, 144, 360)
    whole = build_data(composed("loader.validation=null", whole=False))
    assert (len(whole.train), whole.val, whole.held_out) == (1437, None, None)


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    """Sample n is n."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), index % 2


def double(sample: Any) -> Any:
    return sample[0] * 2, sample[1]


OWN = ["dataset=pair", "dataset.train._target_=test_split.Numbered", "dataset.test._target_=test_split.Numbered"]
VALIDATION = "dataset.validation={_target_:test_split.Numbered}"


def test_validation_samples_get_the_transforms_of_tests() -> None:
    config = composed(*OWN, "loader.validation=0.25", "loader.transforms=[{_target_:test_split.double,_partial_:true}]")
    data, request = build_data(config), request_of(range(10))
    assert reader_of(config, data.val, "val", False).read(request)[0].flatten().tolist() == data.held_out.tolist()
    trained = reader_of(config, data.train, "train", True).read(request_of(range(30)))[0].flatten() / 2
    assert sorted([*trained.tolist(), *data.held_out.tolist()]) == list(range(40))


def test_validation_data_of_its_own_is_taken_in_place_of_a_part() -> None:
    data = build_data(composed(*OWN, VALIDATION, whole=False))
    assert (len(data.train), len(data.val), data.held_out) == (40, 40, None)
    data = build_data(composed(*OWN, VALIDATION, "loader.validation=null", whole=False))
    assert (len(data.train), data.val) == (40, None)


def test_a_final_training_takes_what_was_held_out_and_refuses_other_validation_data() -> None:
    assert len(build_data(composed("trainer.final=train+val", whole=False)).train) == 1437
    said = "trainer.final=train.val trains on what is held out, .* are other data; type trainer.final=null"
    with pytest.raises(ConfigError, match=said):
        build_data(composed(*OWN, VALIDATION, "trainer.final=train+val", whole=False))


def test_one_training_sample_that_is_left_gets_a_line_and_a_mode_of_the_tests_needs_none(caplog: Any) -> None:
    assert len(build_data(composed("loader.validation=0.999", whole=False)).train) == 1
    assert "one training sample is left" in caplog.text
    config = composed(*OWN, "loader.validation=40", whole=False)
    with pytest.raises(ConfigError, match="loader.validation=40, and there are 40 training samples"):
        build_data(config)
    assert (len(build_data(config, needs_training_data=False).test), build_data(config, False).val) == (40, None)
