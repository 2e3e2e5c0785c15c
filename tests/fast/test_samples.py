"""Samples that are read one by one: their random numbers, their forms, and those that cannot be read."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from lockstep.data.dataset import Labels, tensors_in
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import micro_batch_parts
from lockstep.data.samples import EVALUATION, SampleError, Samples, require_stream
from lockstep.errors import ConfigError
from lockstep.failures.record import exception_record
from support import own_data

SEED = 3


def loader(dataset: Any, rank: int = 0, size: int = 1, workers: int = 0, **options: Any) -> BatchLoader:
    converter = Converter(torch.device("cpu"), torch.float64, torch.contiguous_format, None, None)
    samples = Samples(dataset, "training data", SEED, **options)
    return BatchLoader(samples, converter, rank, size, SEED, workers=workers)


def trained_on(dataset: Any, epoch: int, size: int = 1, workers: int = 0, skip: int = 0, **options: Any) -> Tensor:
    """The inputs of an epoch over all ranks, in the order of the global batches."""
    ranks = []
    for rank in range(size):
        parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=size)
        with closing(loader(dataset, rank, size, workers, **options)) as reader:  # workers ignore SIGTERM
            ranks.append([batch.parts[0].inputs for batch in reader.epoch(epoch, 5, parts, skip)])
    return torch.cat([part for batch in zip(*ranks, strict=True) for part in batch])


def evaluated(dataset: Any, **options: Any) -> tuple[Tensor, Tensor]:
    batches = list(loader(dataset, **options).eval_batches(4))
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


def test_random_transforms_are_alike_in_all_ranks_and_workers_and_after_a_resume() -> None:
    noisy, transforms = own_data.Noisy(), [own_data.shake]
    alone = trained_on(noisy, 1, transforms=transforms)
    assert torch.equal(trained_on(noisy, 1, size=2, transforms=transforms), alone)
    assert torch.equal(trained_on(noisy, 1, workers=2, transforms=transforms), alone)
    assert torch.equal(trained_on(noisy, 1, size=3, workers=1, transforms=transforms), alone)
    assert torch.equal(trained_on(noisy, 1, size=2, skip=10, transforms=transforms), alone[10:])


@pytest.mark.parametrize("data", [own_data.Points(), own_data.Arrays(), own_data.Nested(), own_data.NamedPairs()])
def test_a_transform_that_works_in_place_does_not_change_the_data(data: Any) -> None:
    before = trained_on(data, 1)
    trained = trained_on(data, 1, transforms=[own_data.add_in_place])
    assert not torch.equal(trained, before)
    assert torch.equal(trained_on(data, 1, size=2, transforms=[own_data.add_in_place]), trained)
    assert torch.equal(trained_on(data, 1), before)


def test_random_transforms_differ_from_sample_to_sample_and_from_epoch_to_epoch() -> None:
    noisy = own_data.Noisy()
    noise = [trained_on(noisy, epoch)[:, 0] - trained_on(own_data.Points(), epoch)[:, 0] for epoch in (0, 1)]
    assert len(set(torch.cat(noise).tolist())) == 2 * len(noisy)


def test_an_evaluation_draws_the_same_numbers_each_time_and_leaves_the_ranks_generators_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = evaluated(own_data.Noisy())[0], evaluated(own_data.Noisy())[0]
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_dicts_and_tuples_reach_the_model_as_they_are() -> None:
    points = own_data.Points()
    for dataset, kind in ((own_data.Dicts(), dict), (own_data.Pairs(), tuple)):
        inputs, targets = loader(dataset).first_sample()
        assert isinstance(inputs, kind)
        assert torch.equal(torch.cat(list(tensors_in(inputs)), 1)[0], points[0][0])
        assert targets.tolist() == [points[0][1]]
    assert torch.equal(trained_on(own_data.DictsOfOne(), 0), trained_on(points, 0))


def test_a_sample_of_another_form_is_refused_and_a_collate_function_takes_it() -> None:
    with pytest.raises(ConfigError, match="has 3 values, and .inputs, target. is wanted.*type loader.collate_fn"):
        evaluated(own_data.Triples())
    found = evaluated(own_data.Triples(), collate_fn=own_data.first_two)
    assert torch.equal(found[0], evaluated(own_data.Points())[0])
    with pytest.raises(ConfigError, match="is a dict of left, right, and one key named"):
        evaluated(own_data.Points(), collate_fn=lambda samples: {"left": samples, "right": samples})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_leaves_samples_out_is_refused_where_samples_are_counted(workers: int) -> None:
    said = "makes 4 targets of 5 samples of the training data, .* return None from .* type loader.on_error=skip$"
    with pytest.raises(ConfigError, match=said):
        trained_on(
            own_data.Points(),
            0,
            workers=workers,
            collate_fn=own_data.without_the_first,
            labels=Labels("training data", 2, one_each=True),
        )
    packed = Labels("training data", None)  # where tokens are counted, sequences may be packed
    assert len(trained_on(own_data.Points(), 0, collate_fn=own_data.without_the_first, labels=packed)) < 23


def test_more_targets_than_samples_and_lists_of_samples_are_refused() -> None:
    labels = Labels("training data", 2, one_each=True)
    said = "makes 10 targets of 5 samples of the training data, .*; write a task whose count .* type task._target_="
    with pytest.raises(ConfigError, match=said):
        trained_on(own_data.Points(), 0, collate_fn=own_data.twice, labels=labels)
    with pytest.raises(ConfigError, match="makes a list of targets, with an item for each sample, .* padded"):
        trained_on(own_data.Points(), 0, collate_fn=own_data.of_several_sizes)


def test_what_a_collate_function_draws_is_alike_in_all_ranks_and_workers_and_after_a_resume() -> None:
    points, collate = own_data.Points(), own_data.scaled
    alone = trained_on(points, 1, collate_fn=collate)
    scales = (alone / trained_on(points, 1)).mean(1)
    assert len(set(scales.mul(1e9).round().tolist())) == 5  # one for each batch
    assert torch.equal(trained_on(points, 1, size=2, collate_fn=collate), alone)
    assert torch.equal(trained_on(points, 1, size=3, workers=2, collate_fn=collate), alone)
    assert torch.equal(trained_on(points, 1, skip=10, collate_fn=collate), alone[10:])
    assert torch.equal(evaluated(points, collate_fn=collate)[0], evaluated(points, collate_fn=collate)[0])


@pytest.mark.parametrize("data", [own_data.OwnNumbers(), own_data.Changed(), own_data.Noisy(), own_data.Values()])
def test_samples_that_are_others_when_they_are_read_again_are_told(data: Any, caplog: pytest.LogCaptureFixture) -> None:
    Samples(data, "training data").warn_of_other_samples()
    is_told = "sample 0 of the training data is another one when it is read again" in caplog.text
    assert is_told == isinstance(data, own_data.OwnNumbers | own_data.Changed)


@pytest.mark.parametrize(
    ("collate", "drawn"),
    [
        (own_data.mixed, "torch and numpy.random"),
        (own_data.noisy, "torch"),
        (own_data.scaled, ""),  # one number for the batch
        (own_data.first_two, ""),
        (own_data.twice, ""),
        (None, ""),
    ],
)
def test_a_collate_function_that_draws_for_samples_is_told(collate: Any, drawn: str, caplog: Any) -> None:
    before = torch.get_rng_state()
    Samples(own_data.Points(), "training data", collate_fn=collate).warn_of_other_samples()
    assert (f"loader.collate_fn draws from {drawn} for single samples, or mixes them" in caplog.text) == bool(drawn)
    assert ("loader.collate_fn" in caplog.text) == bool(drawn)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_told_the_epoch_where_it_is_read(workers: int) -> None:
    plain, parts = own_data.Points(), partial(micro_batch_parts, accumulation_steps=1, rank=0, size=1)
    with closing(loader(own_data.OfEpoch(), workers=workers)) as reader:
        for epoch in (0, 2):
            found = torch.cat([batch.parts[0].inputs for batch in reader.epoch(epoch, 5, parts, last_epoch=2)])
            assert torch.equal(found, trained_on(plain, epoch) + 100 * epoch)
            first, _ = next(iter(reader.eval_batches(4)))
            assert torch.equal(first, plain.points[:4])


def test_lists_of_numbers_become_tensors() -> None:
    (batch, *_) = loader(own_data.OfTokenizer()).eval_batches(4)
    assert batch[0]["input_ids"].tolist() == [[number, 1, 2] for number in range(4)]
    assert batch[0]["attention_mask"].shape == (4, 2, 2)
    assert batch[1].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Words",
            r"sample 0 of the training data has the target 'cat', and a number or a tensor is wanted; ",
        ),
        (
            "Ragged",
            r"sample 0 .* has the shape \[3\] and sample 1 has the shape \[4\], .*; type loader.collate_fn=",
        ),
        (
            "Targetless",
            "sample 0 .* has an object of NoneType, and .*; return one from __getitem__, or type dataset.collate",
        ),
        (
            "Pictures",
            r"sample 0 .* has an object of Image, .*; type loader.transforms='\[{_target_:.*.ToImage}\]'$",
        ),
        ("Mirrored", "sample 0 .* cannot be put into a batch: ValueError: At least one stride .*; return .*contiguous"),
        ("BigEndian", "sample 0 .* cannot be put into a batch: ValueError: given numpy array has byte order"),
        ("Gone", "sample 5 of the training data is None; return .* from __getitem__, or type loader.on_error=skip"),
    ],
)
def test_samples_that_make_no_batch_are_refused_and_named(name: str, said: str, workers: int) -> None:
    reader = loader(getattr(own_data, name)(), workers=workers)
    with closing(reader), pytest.raises(ConfigError, match=said):
        list(reader.eval_batches(6))


def test_a_sample_that_is_none_is_left_out_if_errors_are_skipped() -> None:
    assert len(evaluated(own_data.Gone(), on_error="skip")[0]) == len(own_data.Points()) - 1


def test_transforms_get_the_inputs_and_those_of_v2_the_whole_sample() -> None:
    plain = trained_on(own_data.Points(), 0)
    assert torch.equal(trained_on(own_data.Points(), 0, transforms=[own_data.double, own_data.double]), 4 * plain)
    image = tv_tensors.Image(torch.arange(4.0).view(1, 2, 2))
    mask = tv_tensors.Mask(torch.arange(4).view(2, 2))
    flipped = Samples([(image, mask)], transforms=[v2.RandomHorizontalFlip(1.0)]).__getitems__([(0, 0)]).samples[0]
    assert flipped[0].tolist() == [[[1.0, 0.0], [3.0, 2.0]]]
    assert flipped[1].tolist() == [[1, 0], [3, 2]]
    plain_tensors = (image.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor))
    flipped = Samples([plain_tensors], transforms=[v2.RandomHorizontalFlip(1.0)]).one()
    assert flipped[1].tolist() == [[[1, 0], [3, 2]]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    with pytest.raises(SampleError) as raised:
        trained_on(own_data.Broken(), 0, workers=workers)
    said = exception_record(raised.value)
    assert said["message"] == "sample 5 of the training data cannot be read: OSError: image file is truncated"
    if workers:  # in this process the test is the user's innermost code
        assert (Path(said["file"]).name, said["function"]) == ("own_data.py", "__getitem__")


def test_what_a_worker_raises_is_said_without_its_traceback() -> None:
    """A type that torch cannot make again keeps its name."""
    for collate, said in ((own_data.fails_in_two_lines, "one\n\ntwo"), (own_data.fails_oddly, "TwoWords: one two")):
        with (
            closing(loader(own_data.Points(), workers=1, collate_fn=collate)) as reader,
            pytest.raises(Exception) as raised,
        ):
            list(reader.eval_batches(6))
        assert exception_record(raised.value)["message"].endswith(said)
        assert "Traceback" not in exception_record(raised.value)["message"]


def test_a_skipped_sample_is_replaced_in_training_and_left_out_of_an_evaluation() -> None:
    points, broken = own_data.Points(), own_data.Broken()
    expected = trained_on(points, 0)
    rows = [int((points.points == row).all(1).nonzero()) for row in expected]
    expected[rows.index(own_data.BROKEN)] = points[own_data.BROKEN + 1][0]
    for size in (1, 3):
        assert torch.equal(trained_on(broken, 0, size=size, on_error="skip"), expected)
    inputs, targets = evaluated(broken, on_error="skip")
    kept = [number for number in range(len(points)) if number != own_data.BROKEN]
    assert torch.equal(inputs, points.points[kept])
    assert targets.tolist() == [points[number][1] for number in kept]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_label_that_the_model_has_no_output_for_is_named_with_its_sample(workers: int) -> None:
    said = "^sample 5 of the training data has the target 7, and the classes are 0 to 1; type dataset.classes=8$"
    with pytest.raises(ConfigError, match=said):
        trained_on(own_data.WrongLabel(), 0, workers=workers, labels=Labels("training data", 2))


def test_a_stream_gives_the_same_batches_at_any_ranks_and_after_a_resume_in_its_own_order() -> None:
    alone = trained_on(own_data.PointStream(), 1)
    assert torch.equal(trained_on(own_data.PointStream(), 1, size=3), alone)
    assert torch.equal(trained_on(own_data.PointStream(), 1, size=2, skip=10), alone[10:])
    points = own_data.Points().points.roll(-1, 0)  # epoch 1
    assert (alone - points).std(1).max() < 1e-12  # one number of noise for all values of a point
    again = loader(own_data.PointStream())
    parts = partial(micro_batch_parts, accumulation_steps=1, rank=0, size=1)
    epochs = [torch.cat([batch.parts[0].inputs for batch in again.epoch(epoch, 5, parts)]) for epoch in (1, 2, 1)]
    assert torch.equal(epochs[0], alone)
    assert torch.equal(epochs[2], alone)
    assert not torch.equal(epochs[1], alone)


def test_a_stream_with_a_method_share_is_read_in_parts_which_go_on_over_epochs(caplog: Any) -> None:
    read = list[list[list[int]]]()
    for rank in range(2):
        stream = own_data.SharedStream([[1, 2, 3], [10, 20], [4, 5], [30]], items=8)
        shared = loader(stream)
        shared.samples.stream.share(rank, 2)
        parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=2)
        batches = [[batch.parts[0].inputs.flatten().tolist() for batch in shared.epoch(n, 4, parts)] for n in range(2)]
        read.append([sum(epoch, []) for epoch in batches])
        assert stream.epochs == [[0, 1], [0, 0, 1]][rank]
    assert read == [[[1, 2, 3, 4], [5, 1, 2, 3]], [[10, 20, 30, 10], [20, 30, 10, 20]]]
    assert caplog.text.count("SharedStream, is shared by its method share") == 2
    evaluated = loader(own_data.SharedStream([[1, 2], [3]], items=3)).samples.stream
    evaluated.share(1, 2)
    assert [int(evaluated.read(EVALUATION, number)[0]) for number in range(3)] == [1, 2, 3]
    empty = loader(own_data.SharedStream([[1]], items=8))
    empty.samples.stream.share(1, 2)
    with pytest.raises(ConfigError, match="SharedStream has no items for one of the ranks; type launch.nproc_per"):
        next(empty.epoch(0, 4, parts))


def test_a_stream_is_evaluated_in_the_order_of_epoch_0() -> None:
    """Its set_epoch may make a seed of the number, and -1 is none."""
    points = own_data.Points().points
    assert (evaluated(own_data.PointStream())[0] - points).std(1).max() < 1e-12


def test_a_stream_that_is_too_short_or_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="PointStream has 20 items, and its __len__ says 23; type return 20 there"):
        trained_on(own_data.PointStream(missing=3), 0)
    stream = own_data.PointStream()
    for options, advice in (
        ((1, False, "fail"), "loader.num_workers=0"),
        ((0, True, "fail"), r"loader.batch_transforms=\[\]"),
        ((0, False, "skip"), "loader.on_error=fail"),
    ):
        with pytest.raises(ConfigError, match=f"the data is an IterableDataset, PointStream, .*; type {advice}"):
            require_stream(stream, "data", *options)


def test_a_sample_is_shown_as_the_data_set_has_it_and_one_of_several_inputs_not_at_all() -> None:
    assert torch.equal(loader(own_data.DictsOfOne()).shown_sample(3), own_data.Points()[3][0])
    assert loader(own_data.Dicts()).shown_sample(3).numel() == 0
