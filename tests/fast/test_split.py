"""What is held out of the training data: how much of what, that nothing stands on both sides, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lockstep.data.build import build_data, reader_of
from lockstep.data.reader import request_of
from lockstep.data.source import Tensors, unwrapped
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
        return torch.tensor([float(index)]), index % 2


def sides(dataset: Any, size: float | None, fold: Any = None, seed: int = 0, groups: str = "auto") -> tuple[Any, Any]:
    """The numbers of the samples on both sides, which together are all, each on one side."""
    train, val = (unwrapped(part)[1].tolist() for part in hold_out(dataset, size, fold, seed, groups))  # type: ignore
    assert sorted(train + val) == list(range(len(dataset)))
    return train, val


@pytest.mark.parametrize(("size", "count"), [(0.1, 144), (100.0, 100), (0.0001, 1), (0.999, 1436)])
def test_a_share_or_a_number_is_held_out_with_the_classes_of_the_rest(size: float, count: int) -> None:
    data, of_seeds = digits(train=True), [sides(digits(), size, seed=seed)[1] for seed in (0, 0, 1)]
    assert of_seeds[0] == of_seeds[1] != of_seeds[2]
    assert len(of_seeds[0]) == count
    of_all, of_val = (torch.bincount(data.targets[rows], minlength=10) for rows in (slice(None), of_seeds[0]))
    assert ((of_val - of_all * count / 1437).abs() <= 1).all()


KINDS: dict[str, Any] = {
    "classes": digits(),
    "tensors": TensorDataset(torch.rand(53, 3), torch.arange(53) % 4),
    "values": Tensors(torch.rand(53, 2), torch.rand(53, 1)),
    "groups": Patients(),
    "list": [(torch.rand(2), number % 3) for number in range(53)],
}


def test_over_all_folds_each_sample_is_validated_once() -> None:
    for kind, data in KINDS.items():
        folds = [sides(data, None, (fold, 5), 3)[1] for fold in range(5)]
        assert sorted(number for fold in folds for number in fold) == list(range(len(data)))
        sizes = [len(fold) for fold in folds]
        assert max(sizes) - min(sizes) <= (20 if kind == "groups" else 1)
        if kind == "classes":
            counts = torch.stack([torch.bincount(data.targets[fold], minlength=10) for fold in folds])
            assert (counts.max(0).values - counts.min(0).values).max() <= 1


def test_samples_of_one_group_stay_together() -> None:
    data = Patients()
    for size, fold, count in ((0.1, None, 24), (30.0, None, 30), (0.9, None, 216), (None, (2, 4), 60)):
        for groups in ("auto", "off"):
            rows = sides(data, size, fold, groups=groups)
            train, val = ({data.groups[number] for number in side} for side in rows)
            assert bool(train & val) == (groups == "off")
            assert abs(len(rows[1]) - count) <= 12


# Data, size, fold, and what is said.
REFUSED: list[tuple[Any, float | None, Any, str]] = [
    ([1, 2, 3], 3.0, None, "loader.validation=3, and there are 3 training samples; type "),
    ([1], 0.1, None, "loader.validation=0.1, and there are 1 training samples; type loader.validation=null"),
    ([1, 2, 3], None, (0, 5), "loader.folds=5, and there are 3 training samples; type loader.folds=3"),
    (Patients(20, 2), None, (0, 4), "has 2 groups.*; type loader.folds=2, or loader.groups=off"),
    (Patients(20, 1), 0.2, None, "has 1 groups.*; type "),
]


def test_data_of_which_no_part_can_be_taken_is_refused() -> None:
    for data, size, fold, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            hold_out(data, size, fold, 0, "auto")


def test_split_seed_alone_says_what_is_held_out() -> None:
    options: list[list[str]] = [[], ["seed=7"], ["loader.split_seed=7"], ["loader.folds=10", "loader.fold=0"]]
    found = [build_data(composed(*words, whole=False)) for words in options]
    numbers = [data.held_out.tolist() for data in found]
    assert numbers[0] == numbers[1]
    assert len({tuple(one) for one in numbers}) == 3
    assert [len(split) for split in found[0][:3]] == [1293, 144, 360]
    assert data_fingerprint(found[0].train) == data_fingerprint(found[0].val) == data_fingerprint(digits())


def double(sample: Any) -> Any:
    return sample[0] * 2, sample[1]


PATIENTS = "{_target_:test_split.Patients,samples:40}"
OWN = ["dataset=pair", f"+dataset.train={PATIENTS}", f"+dataset.test={PATIENTS}", "loader.groups=off"]
VALIDATION = f"+dataset.validation={PATIENTS}"


def test_validation_samples_get_the_transforms_of_tests() -> None:
    config = composed(*OWN, "loader.validation=0.25", "loader.transforms=[{_target_:test_split.double,_partial_:true}]")
    data, request = build_data(config), request_of(range(10))
    assert reader_of(config, data.val, "val", False).read(request)[0].flatten().tolist() == data.held_out.tolist()
    trained = reader_of(config, data.train, "train", True).read(request_of(range(30)))[0].flatten() / 2
    assert sorted([*trained.tolist(), *data.held_out.tolist()]) == list(range(40))


def test_validation_data_of_its_own_is_taken_in_place_of_a_part() -> None:
    data = build_data(composed(*OWN, VALIDATION, whole=False))
    assert (len(data.train), len(data.val), data.held_out) == (40, 40, None)
    assert build_data(composed(*OWN, VALIDATION, "loader.validation=null", whole=False)).val is None
    assert len(build_data(composed("trainer.final=train+val", whole=False)).train) == 1437
    said = "trainer.final=train.val trains on what is held out, .* are other data; type trainer.final=null"
    with pytest.raises(ConfigError, match=said):
        build_data(composed(*OWN, VALIDATION, "trainer.final=train+val", whole=False))


def test_one_training_sample_that_is_left_gets_a_line_and_a_mode_of_the_tests_needs_none(caplog: Any) -> None:
    assert len(build_data(composed("loader.validation=0.999", whole=False)).train) == 1
    assert "one training sample is left" in caplog.text
    config = composed(*OWN, "loader.validation=40", whole=False)
    assert (len(build_data(config, needs_training_data=False).test), build_data(config, False).val) == (40, None)
