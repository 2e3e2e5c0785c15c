"""The data of a run: what it tells, what is held out of it, how its samples are read, and what is refused."""

import ast
from contextlib import nullcontext
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision import tv_tensors

from lockstep import build
from lockstep.build import data_fingerprint
from lockstep.config.check import instantiate
from lockstep.data.build import build_data, completed, reader_of
from lockstep.data.reader import EVALUATION, SampleReader, batches, request_of
from lockstep.data.source import Tensors, tensors_in, unwrapped
from lockstep.data.split import hold_out
from lockstep.errors import ConfigError
from lockstep.failures.record import exception_record
from support import own_data
from support.configs import composed, with_values
from support.digits import digits
from support.own_data import Points


class Names(Dataset):
    def __init__(self, names="abc"):
        self.classes, self.targets = list(names), [number % len(names) for number in range(6 * bool(names))]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.zeros(3, 4, 4), self.targets[index]


class Words(Points):
    targets = ("left", "right") * 11 + ("left",)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Points())


class SizedStream(Stream):
    def __len__(self):
        return 23


numbered = partial(Tensors, torch.zeros(9, 2, 5), torch.arange(9) % 4)
labelled = partial(Tensors, torch.zeros(9, 4), torch.ones(9, 6))
valued = partial(Tensors, torch.zeros(9, 4), torch.ones(9, 1))
pairs = partial(TensorDataset, torch.zeros(23, 4), torch.arange(23) % 2)


def own(train, *words, test=None):
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
    ("valued", [4], 1, ["task=regression"]),
    ("pairs", [4], 2, []),
]


def test_the_data_tells_the_shape_and_the_number_of_classes():
    for name, shape, classes, words in TOLD:
        config = own(name, *words)
        found = completed(config, build_data(config))
        assert (found.model["shape"], found.model["classes"], found.dataset["shape"]) == (shape, classes, shape)
        typed = with_values(config, f"dataset.classes={classes + 3}")
        assert completed(typed, build_data(typed)).model["classes"] == classes + 3
    metric = "+evaluation.metrics.f1={_target_:torchmetrics.F1Score,task:multiclass,num_classes:null}"
    config = own("labelled", metric)
    assert completed(config, build_data(config)).evaluation.metrics["f1"]["num_classes"] == 6


REFUSED = [
    (own("Words"), ConfigError, "model.classes is not known.*; type dataset.classes=<how many>"),
    (own("Names,names:abc", test="Names,names:bc"), ConfigError, "class 0 is a in the training data and b in the test"),
    (own("Names", test="Names,names:abcd"), ConfigError, "class 3 is no class in the training data and d in .*; give"),
    (own("Names,names:''", test="Points"), ConfigError, "the training data has no samples; type dataset=<another one>"),
    (own("Points", test="Names,names:''"), ConfigError, "the test data has no samples"),
    (own("Stream"), ConfigError, "the training data, of Stream, has no __len__ or no __getitem__; give it both, or"),
    (own("SizedStream"), ConfigError, "data, of SizedStream, has no __len__ or no __getitem__; give it both, or"),
]


def test_data_that_cannot_be_used_is_refused_and_what_is_not_needed_may_be_gone():
    for config, kind, said in REFUSED:
        with pytest.raises(kind, match=said):
            completed(config, build_data(config))
    assert len(build_data(own("Names,names:''", test="Points"), needs_training_data=False).train) == 23
    assert len(build_data(own("Names", test="Names,names:ab")).test) == 6


# The hash by which ranks and resumed runs see that their data is other data.


def test_one_bit_in_any_row_in_memory_counts_and_of_other_data_the_length_and_all_targets(monkeypatch):
    inputs, targets = torch.randint(0, 256, (1000, 1, 5, 5), dtype=torch.uint8), torch.arange(1000)
    before = data_fingerprint(Tensors(inputs, targets))
    assert before.endswith(" of all samples and targets")
    assert before == data_fingerprint(Tensors(inputs.clone(), targets.clone()))
    for changed, row in product((0, 1), (0, 500, 999)):
        pair = [inputs.clone(), targets.clone()]
        pair[changed].view(1000, -1)[row, -1] ^= 1
        assert before != data_fingerprint(Tensors(*pair))
    assert before != data_fingerprint(Tensors(inputs, targets, weights=torch.ones(1000)))
    monkeypatch.setattr(build, "LARGEST_TENSOR", 100)
    assert data_fingerprint(Tensors(inputs, targets)).endswith(" of 64 of 1000 samples and targets")
    rows = [(torch.rand(3), number) for number in range(50)]
    assert data_fingerprint(rows) == data_fingerprint(rows[:]) != data_fingerprint([*rows, rows[0]])
    one, same, other = (
        data_fingerprint(TensorDataset(torch.rand(3, 2), torch.tensor([1, 2, last]))) for last in (3, 3, 4)
    )
    assert one.endswith(" of the length and targets")
    assert one == same != other


class Patients(Dataset):
    def __init__(self, samples=240, patients=48):
        draw = np.random.default_rng(0)
        self.groups = [f"patient {number}" for number in draw.integers(0, patients, samples)]
        self.targets = draw.integers(0, 3, samples).tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        assert type(index) is int  # numpy's overflow where a data set multiplies them
        return torch.tensor([float(index)]), index % 2


def sides(dataset, size, fold=None, seed=0, groups="auto"):
    """The numbers of the samples on both sides, which together are all, each on one side."""
    train, val = (unwrapped(part)[1].tolist() for part in hold_out(dataset, size, fold, seed, groups))
    assert sorted(train + val) == list(range(len(dataset)))
    return train, val


@pytest.mark.parametrize(("size", "count"), [(0.1, 144), (100.0, 100), (0.0001, 1), (0.999, 1436)])
def test_a_share_or_a_number_is_held_out_with_the_classes_of_the_rest(size, count):
    data, of_seeds = digits(train=True), [sides(digits(), size, seed=seed)[1] for seed in (0, 0, 1)]
    assert of_seeds[0] == of_seeds[1] != of_seeds[2]
    assert len(of_seeds[0]) == count
    of_all, of_val = (torch.bincount(data.targets[rows], minlength=10) for rows in (slice(None), of_seeds[0]))
    assert ((of_val - of_all * count / 1437).abs() <= 1).all()


DIVIDED = {
    "classes": digits(),
    "tensors": TensorDataset(torch.rand(53, 3), torch.arange(53) % 4),
    "values": Tensors(torch.rand(53, 2), torch.rand(53, 1)),
    "groups": Patients(),
    "list": [(torch.rand(2), number % 3) for number in range(53)],
}


def test_over_all_folds_each_sample_is_validated_once():
    for kind, data in DIVIDED.items():
        folds = [sides(data, None, (fold, 5), 3)[1] for fold in range(5)]
        assert sorted(number for fold in folds for number in fold) == list(range(len(data)))
        sizes = [len(fold) for fold in folds]
        assert max(sizes) - min(sizes) <= (20 if kind == "groups" else 1)
        if kind == "classes":
            counts = torch.stack([torch.bincount(data.targets[fold], minlength=10) for fold in folds])
            assert (counts.max(0).values - counts.min(0).values).max() <= 1


def test_samples_of_one_group_stay_together():
    data = Patients()
    for size, fold, count in ((0.1, None, 24), (30.0, None, 30), (0.9, None, 216), (None, (2, 4), 60)):
        for groups in ("auto", "off"):
            rows = sides(data, size, fold, groups=groups)
            train, val = ({data.groups[number] for number in side} for side in rows)
            assert bool(train & val) == (groups == "off")
            assert abs(len(rows[1]) - count) <= 12


# Data, size, fold, and what is said.
UNDIVIDED = [
    ([1, 2, 3], 3.0, None, "loader.validation=3, and there are 3 training samples; type "),
    ([1], 0.1, None, "loader.validation=0.1, and there are 1 training samples; type loader.validation=null"),
    ([1, 2, 3], None, (0, 5), "loader.folds=5, and there are 3 training samples; type loader.folds=3"),
    (Patients(20, 2), None, (0, 4), "has 2 groups.*; type loader.folds=2, or loader.groups=off"),
    (Patients(20, 1), 0.2, None, "has 1 groups.*; type "),
]


def test_data_of_which_no_part_can_be_taken_is_refused():
    for data, size, fold, said in UNDIVIDED:
        with pytest.raises(ConfigError, match=said):
            hold_out(data, size, fold, 0, "auto")


def double(sample):
    return sample[0] * 2, sample[1]


PATIENTS = "{_target_:test_build_data.Patients,samples:40}"
PAIR = ["dataset=pair", f"+dataset.train={PATIENTS}", f"+dataset.test={PATIENTS}", "loader.groups=off"]
VALIDATION = f"+dataset.validation={PATIENTS}"


def test_validation_samples_get_the_transforms_of_tests():
    doubled = "loader.transforms=[{_target_:test_build_data.double,_partial_:true}]"
    config = composed(*PAIR, "loader.validation=0.25", doubled)
    data, request = build_data(config), request_of(range(10))
    validated = reader_of(config, data.val, "val", False)
    assert validated.read(request)[0].flatten().tolist() == validated.indices.tolist()
    trained = reader_of(config, data.train, "train", True).read(request_of(range(30)))[0].flatten() / 2
    assert sorted([*trained.tolist(), *validated.indices.tolist()]) == list(range(40))


def test_validation_data_of_its_own_is_taken_in_place_of_a_part():
    data = build_data(composed(*PAIR, VALIDATION, whole=False))
    assert (len(data.train), len(data.val)) == (40, 40)
    assert build_data(composed(*PAIR, VALIDATION, "loader.validation=null", whole=False)).val is None
    assert len(build_data(composed("trainer.final=train+val", whole=False)).train) == 1437
    said = "trainer.final=train.val trains on what is held out, .* are other data; type trainer.final=null"
    with pytest.raises(ConfigError, match=said):
        build_data(composed(*PAIR, VALIDATION, "trainer.final=train+val", whole=False))


SEED = 3


def reader(dataset, check=None, **options):
    return SampleReader(dataset, "training data", SEED, check=check, **options)


def read(dataset, numbers=range(23), epoch=0, workers=0, **options):
    """(inputs, targets) of these samples in one batch, each at the place of its number."""
    (found,) = batches(reader(dataset, **options), iter([request_of([*numbers], epoch)]), workers, pin_memory=False)
    return found


def test_random_numbers_are_those_of_the_epoch_and_of_the_place_in_it():
    noisy, states = own_data.Noisy(), (torch.get_rng_state(), np.random.get_state()[1].tolist())
    noise = [(read(noisy, epoch=epoch)[0] - noisy.points)[:, 0] for epoch in (0, 1, EVALUATION, EVALUATION)]
    assert noise[2].equal(noise[3])
    assert len(set(torch.cat(noise).tolist())) == 3 * 23
    again = reader(noisy).read(request_of([4, 4])._replace(places=np.array([8, 9])))[0]  # drawn twice in an epoch
    assert not again[0].equal(again[1])
    assert torch.equal(torch.get_rng_state(), states[0])  # those of the rank stay
    assert np.random.get_state()[1].tolist() == states[1]


WITH_MASK = [
    lambda image, mask: (image, mask),
    lambda image, mask: (image, tv_tensors.Mask(mask)),
    lambda image, mask: (image, tv_tensors.Mask(mask[None])),
    lambda image, mask: (image, {"mask": mask}),
    lambda image, mask: {"label": mask, "image": image},
]


@pytest.mark.parametrize("sample", WITH_MASK)
@pytest.mark.parametrize("key", ["transforms", "test_transforms"])
def test_a_mask_moves_with_its_image_in_a_segmentation(sample, key):
    image, mask = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2), torch.arange(4).reshape(2, 2)
    node = "{_target_:torchvision.transforms.v2.RandomHorizontalFlip,p:1.0}"
    config = composed("task=segmentation", "dataset.classes=4", f"loader.{key}=[{node}]")
    found = reader_of(config, [sample(image, mask)], "train", key == "transforms").read(request_of([0]))
    assert found[0][0].equal(image.flip(2))
    assert tensors_in(found[1])[0].squeeze().equal(mask.flip(1))


def test_samples_that_make_no_batch_or_other_targets_than_samples_are_refused_and_named():
    check = partial(instantiate(composed().task).check_targets, classes=2)
    odd = dict.fromkeys(("Targetless", "Pictures", "Mirrored", "Triples"), "0") | {"Ragged": "0, 1", "Gone": "0, 5"}
    for name, numbers in odd.items():
        said = rf"samples \[{numbers}\] of the training data make no batch.*; give all .*type loader.collate_fn="
        with pytest.raises(ConfigError, match=said):
            read(getattr(own_data, name)(), range(6), workers=int(name == "Gone"), check=check)
    for collate, count in ((own_data.twice, 46), (own_data.without_the_first, 22)):
        said = f"in the training data, loader.collate_fn makes {count} targets of 23 samples, .*; type task._target_="
        with pytest.raises(ConfigError, match=said):
            read(own_data.Points(), collate_fn=collate, check=check)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers):
    data = Subset(own_data.Broken(), range(3, 23))  # its number is that in the whole data
    with pytest.raises(RuntimeError) as raised:
        read(data, [0, 1, 2], workers=workers)
    said = exception_record(raised.value)["message"]
    assert "sample 5 of the training data cannot be read (OSError: image file is truncated)" in said
    assert "Traceback" not in said


# The task | targets of samples 10 to 13 | what is said
TARGETS = r"""
classification | 0, 1, 2, 1 |
classification | 0, 1, 3, 1 | sample 12 has the target 3, and the classes are 0 to 2; type dataset.classes=4
classification | 0, 1, 1, -1 | sample 13 has the target -1, .*; type its target as 0 to 2
classification | [.5, .5, 0.], [.5, .5, 0.], [1., 0., 0.], [0., 0., 1.] |
segmentation | [[0, 1], [2, -100]], [[0, 0], [0, 1]], [[0, 0], [0, 1]], [[2, 2], [0, 1]] |
segmentation | [[0, 1], [0, 0]], [[0, 0], [255, 0]], [[0, 0], [0, 1]], [[0, 0], [0, 1]] | sample 11 .* 255 .*type its
language_modelling | [0, 1, -100], [0, 1, 2], [0, 1, 2], [0, 1, 2] |
language_modelling | [0, 1, 7], [0, 1, 2], [0, 1, 2], [0, 1, 2] | sample 10 has the target 7 at \[2\]
multi_label | [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 0, 1] |
multi_label | [0, 1, 1], [1, 1, 1], [0, 0, 0], [0, -1, 1] | sample 13 .* \[0, -1, 1\], and its labels are 0 or 1
multi_label | [0., 2., 1.], [0., 0., 1.], [0., 0., 1.], [0., 0., 1.] | sample 10 has the target
regression | [-3.], [2.], [9.], [.5] |
"""


def test_targets_that_the_task_does_not_take_are_named_with_their_sample():
    for row in TARGETS.strip().splitlines():
        task, given, said = (part.strip() for part in row.split("|"))
        targets = [torch.tensor(target) for target in ast.literal_eval(f"[{given}]")]
        check = partial(instantiate(composed(f"task={task}", "dataset.classes=3").task).check_targets, classes=3)
        data = Subset([(torch.zeros(1), target) for target in targets[:1] * 10 + targets], range(10, 14))
        with pytest.raises(ConfigError, match=f"^in the training data, {said}") if said else nullcontext():
            read(data, range(4), check=check)
