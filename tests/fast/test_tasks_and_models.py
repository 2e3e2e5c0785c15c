"""Losses and metrics against plain torch, and the layers of the models."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.models.base import give_shapes
from lockstep.models.tutorial import linear, mlp
from lockstep.strategies.base import layer_groups
from lockstep.tasks.base import Task
from lockstep.tasks.tasks import CrossEntropy, MultiLabel, Regression
from lockstep.training.nonfinite import broken_samples
from lockstep.training.setup import prepare_model


def sums(task: Task, outputs: Any, targets: Any) -> dict[str, float]:
    """{name: the value that is added up}, and "loss" with its gradient as `loss`."""
    found = task.sums(outputs, targets)
    assert found.loss.item() == found.values[0].item()
    return {name: value.item() for name, value in zip(task.names, found.values, strict=True)}


def test_regression_sums_over_samples_and_averages_over_a_samples_values() -> None:
    outputs, targets = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
    assert sums(Regression(), outputs, targets) == {"loss": 5.0, "mae": 2.0}
    one_each = torch.tensor([1.0, 3.0])
    for zeros in (torch.zeros(2, 1), torch.zeros(2)):
        assert sums(Regression(), zeros, one_each)["loss"] == 10.0


def constant(loss: Any) -> Task:
    return Regression(loss=lambda outputs, targets: loss)


ONE, LABELS = torch.ones(()), torch.zeros(2).long()
REFUSED = [  # the task, the shape of outputs, the targets, what is said
    (CrossEntropy(), [2, 5, 9], torch.zeros(2, 5).long(), r"class numbers \(N, classes, ...\) and \(N, ...\), and"),
    (CrossEntropy(), [2, 4], torch.zeros(2, 4).long(), r"are \[2, 4\] and \[2, 4\], int64; type task="),
    (CrossEntropy(), [2, 1], torch.zeros(2), r"are \[2, 1\] and \[2\], float32; type task="),
    (Regression(), [2, 3], LABELS, r"of one shape, and these are \[2, 3\] and \[2\], int64; type task="),
    (Regression(), [2, 3], torch.zeros(2, 4), r"are \[2, 3\] and \[2, 4\], float32; type task="),
    (MultiLabel(), [2, 3], LABELS, r"\(N, labels\), and these are \[2, 3\] and \[2\], int64; type task="),
    (constant(ONE), [2, 4], torch.zeros(2, 4), r'gives loss as \[\], .*: the ranks add them up; type reduction="none"'),
    (
        constant(torch.ones(3)),
        [2, 4],
        torch.zeros(2, 4),
        r"loss as \[3\], and a .* sample is wanted, \[2\], or \[2, 4\]",
    ),
    (constant(1.0), [2, 4], torch.zeros(2, 4), "gives loss as float, and a value"),
    (constant({"a": torch.ones(2)}), [2, 4], torch.zeros(2, 4), "gives loss as dict, and a value"),
]


def test_outputs_that_do_not_fit_and_a_loss_without_a_value_for_each_sample_are_refused() -> None:
    for task, outputs, targets, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            task.sums(torch.zeros(outputs), targets)


def test_no_sample_adds_nothing_and_half_precision_is_summed_in_float32() -> None:
    for task, targets in ((CrossEntropy(), LABELS[:0]), (Regression(), torch.zeros(0, 2))):
        outputs = torch.zeros(0, 2, dtype=torch.bfloat16)
        assert task.sums(outputs, targets).loss.dtype == torch.float32
        assert not any(sums(task, outputs, targets).values())


def test_rows_that_are_not_those_of_the_samples_name_no_broken_sample() -> None:
    broken, packed = torch.full((4, 2), math.nan), torch.full((3, 2), math.nan)
    assert broken_samples(torch.arange(4), broken, torch.zeros(4)) == [0, 1, 2, 3]
    assert broken_samples(torch.arange(4), packed, torch.tensor(math.nan)) == []


def test_layer_groups_are_neighbours_with_equally_many_layers_with_parameters() -> None:
    groups = layer_groups(mlp([7], 3, width=5, depth=3, dropout=0.0), 2)
    assert [len([*nn.Sequential(*group.values()).parameters()]) for group in groups] == [4, 4]
    assert [name for group in groups for name in group] == [str(number) for number in range(11)]
    with pytest.raises(ConfigError, match="type model=mlp model.depth=2"):
        layer_groups(linear([1, 8, 8], 10), 3)


def test_layers_that_get_their_shapes_later_get_their_layout_then() -> None:
    world = World(0, 1, torch.device("cpu"), None, 60, None)  # type: ignore[arg-type]
    model = prepare_model(nn.Sequential(nn.LazyConv2d(2, 3)), world, world.device, "fp32", torch.channels_last, False)
    give_shapes(model, torch.zeros(1, 1, 4, 4))
    assert model[0].weight.shape == (2, 1, 3, 3)
