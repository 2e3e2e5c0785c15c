"""Losses and metrics against plain torch, and the layers of the models."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.distributed.world import World, join_world
from lockstep.errors import ConfigError
from lockstep.models.base import give_shapes
from lockstep.models.tutorial import linear, mlp
from lockstep.strategies.model_parallel import layer_groups
from lockstep.tasks.base import Function, Share, Task
from lockstep.tasks.classification import Classification
from lockstep.tasks.regression import Regression
from lockstep.tasks.reports import ClassReport
from lockstep.training.early_steps import find_no_sums
from lockstep.training.setup import prepare_model
from support.configs import composed

CLASSIFICATION = Classification({"loss": "min", "accuracy": "max"}, "accuracy", 0.0, None, {}, None)
REGRESSION = Regression({"loss": "min"}, "loss", None, {})


def test_classification_sums_cross_entropy_and_right_answers() -> None:
    outputs = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]], requires_grad=True)
    targets = torch.tensor([0, 1, 1])
    loss, sums = CLASSIFICATION(outputs, targets)
    assert loss.item() == pytest.approx(3 * F.cross_entropy(outputs, targets).item())
    assert (sums["loss"].item(), sums["accuracy"].item()) == (loss.item(), 2)
    loss.backward()
    assert outputs.grad is not None


def test_regression_sums_over_samples_and_averages_over_a_samples_values() -> None:
    outputs, targets = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
    loss, sums = REGRESSION(outputs, targets)
    assert loss.item() == sums["loss"].item() == 5.0
    one_each = torch.tensor([1.0, 3.0])
    assert REGRESSION(torch.zeros(2, 1), one_each)[0].item() == REGRESSION(torch.zeros(2), one_each)[0].item() == 10.0


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "advice"),
    [
        (CLASSIFICATION, [2, 5, 9], torch.zeros(2, 5).long(), "type task=language_modelling for a class number"),
        (CLASSIFICATION, [2, 4], torch.zeros(2, 4).long(), "type task=multi_label for targets that are labels"),
        (CLASSIFICATION, [2, 1], torch.zeros(2), "type task=regression for targets that are numbers"),
        (REGRESSION, [2, 3], torch.zeros(2).long(), "type task=classification for targets that are classes"),
        (REGRESSION, [2, 3], torch.zeros(2, 4), r"type model._target_=<a net with outputs \[N, 4\]>"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_with_the_task_that_they_are_for(
    task: Task, outputs: list[int], targets: torch.Tensor, advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        task(torch.zeros(outputs), targets)


@pytest.mark.parametrize(
    ("task", "targets"), [(CLASSIFICATION, torch.zeros(0, dtype=torch.long)), (REGRESSION, torch.zeros(0, 2))]
)
def test_no_sample_adds_nothing_and_half_precision_is_summed_in_float32(task: Task, targets: torch.Tensor) -> None:
    loss, sums = task(torch.zeros(0, 2, dtype=torch.bfloat16), targets)
    assert loss.dtype == torch.float32
    assert [value.item() for value in sums.values()] == [0] * len(sums)


def test_metrics_say_whether_more_is_better() -> None:
    assert (CLASSIFICATION.mode("val/accuracy"), CLASSIFICATION.mode("test/loss")) == ("max", "min")
    with pytest.raises(ConfigError, match="type monitor=val/loss or monitor=val/accuracy"):
        CLASSIFICATION.mode("val/f1")
    with pytest.raises(ConfigError, match="type task.monitor=loss"):
        Regression({"loss": "min"}, "accuracy", None, {})


def layers(model: nn.Module) -> list[tuple[int, ...]]:
    """The weights' shapes."""
    return [tuple(parameter.shape) for name, parameter in model.named_parameters() if name.endswith("weight")]


def test_layer_groups_are_neighbours_with_equally_many_layers_with_parameters() -> None:
    groups = layer_groups(mlp([7], 3, width=5, depth=3, dropout=0.0), 2)
    assert [len(layers(nn.Sequential(*group.values()))) for group in groups] == [2, 2]
    assert [name for group in groups for name in group] == [str(number) for number in range(11)]
    with pytest.raises(ConfigError, match="type model=mlp model.depth=2"):
        layer_groups(linear([1, 8, 8], 10), 3)


@pytest.mark.parametrize(
    ("dataset", "task", "monitor"), [("digits", "Classification", "accuracy"), ("random", "Regression", "loss")]
)
def test_a_data_set_brings_its_task(dataset: str, task: str, monitor: str) -> None:
    cfg = composed(f"dataset={dataset}", "model=linear", whole=False)
    assert cfg.task["_target_"].endswith(task)
    assert cfg.objective == f"val/{monitor}"


@pytest.mark.parametrize("loss", [nn.HuberLoss(), F.huber_loss])
def test_a_loss_of_the_user_s_counts_each_sample_by_its_mean(loss: Function) -> None:
    task = Regression({"loss": "min", "mae": "min"}, "loss", loss, {"mae": nn.L1Loss()})
    outputs, targets = torch.randn(8, 3), torch.randn(8, 3)
    total, sums = task(outputs, targets)
    assert torch.allclose(total, 8 * F.huber_loss(outputs, targets))
    assert torch.allclose(sums["mae"], 8 * F.l1_loss(outputs, targets))
    first, second = (task(outputs[half], targets[half])[0] for half in (slice(4), slice(4, 8)))
    assert torch.allclose(total, first + second)


@pytest.mark.parametrize("loss", [nn.KLDivLoss(reduction="batchmean"), partial(F.kl_div, reduction="batchmean")])
def test_a_loss_of_the_user_s_that_is_a_sum_over_the_values_of_a_sample_stays_one(loss: Function) -> None:
    task = Regression({"loss": "min"}, "loss", loss, {})
    outputs, targets = torch.randn(8, 3).log_softmax(1), torch.randn(8, 3).softmax(1)
    assert torch.allclose(task(outputs, targets)[0] / 8, F.kl_div(outputs, targets, reduction="batchmean"))


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")])
def test_a_loss_of_the_user_s_that_grows_with_the_batch_is_refused(loss: Function) -> None:
    with pytest.raises(ConfigError, match=r"task.loss has reduction=sum, .*; type \+\+task.loss.reduction=mean"):
        Regression({"loss": "min"}, "loss", loss, {})


def test_a_loss_of_the_user_s_that_is_a_mean_is_refused() -> None:
    task = Regression({"loss": "min"}, "loss", lambda outputs, targets: (outputs - targets).abs().mean(), {})
    with pytest.raises(ConfigError, match=r"task.loss gives the shape \[\] for 8 samples.* return \[8\], or type"):
        task(torch.randn(8, 3), torch.randn(8, 3))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": torch.ones(2)}, "task.loss gives a dict, and a tensor with a value for each sample is wanted"),
        (1.0, "task.loss gives a float, and a tensor"),
        (torch.tensor(1.0), "task.loss gives the shape \\[\\] for 2 samples"),
    ],
)
def test_an_own_loss_that_gives_no_value_for_each_sample_is_refused(given: Any, said: str) -> None:
    task = Regression({"loss": "min"}, "loss", lambda outputs, targets: given, {})
    with pytest.raises(ConfigError, match=said):
        task(torch.zeros(2, 4), torch.zeros(2, 4))


def test_an_own_measure_may_give_yes_or_no() -> None:
    measures = {"near": lambda outputs, targets: (outputs - targets).abs() < 0.1}
    task = Regression({"loss": "min", "near": "max"}, "loss", None, measures)
    sums = task(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.zeros(2, 2))[1]
    assert sums["near"].item() == 1.5


class Means(Task):
    """A user's task, on a model with a loss of its own, that forgets to sum."""

    def __call__(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = F.cross_entropy(outputs["logits"], targets) + outputs["own"]
        return loss, {"loss": loss}


def test_a_mean_is_found_with_two_samples_beside_an_output_of_no_dimension() -> None:
    task, outputs = Means({"loss": "min"}, "loss"), {"logits": torch.eye(4), "own": torch.tensor(0.5)}
    one = {"logits": outputs["logits"][:1], "own": outputs["own"]}
    assert find_no_sums(task, one, torch.arange(1)) is None
    with pytest.raises(ConfigError, match="Means returns a mean as its loss"):
        find_no_sums(task, outputs, torch.arange(4))


def test_a_report_leaves_out_targets_that_are_no_class() -> None:
    with join_world("gloo", 60) as world:
        report = ClassReport(Share(0, 1, 3), images=3)
        report.add(torch.eye(3), torch.tensor([-100, 1, 0]))
        report.reduce(world)
    assert [(shown.number, shown.truth) for shown in report.shown] == [(2, 0), (1, 1)]


def test_layers_that_get_their_shapes_later_get_their_layout_then() -> None:
    world = World(0, 1, 0, 1, torch.device("cpu"), None, 60, None)  # type: ignore[arg-type]
    model = prepare_model(nn.Sequential(nn.LazyConv2d(2, 3)), world, world.device, "fp32", torch.channels_last, False)
    give_shapes(model, torch.zeros(1, 1, 4, 4))
    assert model[0].weight.shape == (2, 1, 3, 3)
