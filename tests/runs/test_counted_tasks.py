"""Tasks whose metrics come from counts, against numbers worked out sample by sample, at several world sizes."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.models.tutorial import linear
from lockstep.runs.record import read_run
from lockstep.tasks.base import Task
from lockstep.tasks.classification import Classification, ClassificationF1
from lockstep.tasks.language_modelling import LanguageModelling
from lockstep.tasks.multi_label import MultiLabel
from lockstep.tasks.segmentation import Segmentation
from lockstep.training.early_steps import find_no_sums
from lockstep.training.meter import Meter
from support.commands import WHOLE
from support.digits import digits
from support.models import OwnClassification
from support.reference import saved_parameters, train_reference
from support.refusals import accepted
from support.worlds import in_world, same_bits, train_all

SAMPLES, CLASSES, IGNORED = 37, 4, 255


def asked(*names: str) -> dict[str, str]:
    return {"loss": "min"} | dict.fromkeys(names, "max")


def classification() -> Task:
    return ClassificationF1(asked("accuracy", "top2", "f1", "precision", "recall", "f1_2"), "f1", 0.0, CLASSES, None)


def segmentation() -> Task:
    return Segmentation(asked("accuracy", "iou", "iou_1"), "iou", CLASSES, IGNORED, None)


def multi_label() -> Task:
    return MultiLabel(asked("accuracy", "all_right", "f1"), "f1", CLASSES)


def data(kind: str) -> tuple[Tensor, Tensor]:
    """(outputs, targets) of all samples, in float64."""
    generator = torch.Generator().manual_seed(5)
    shape = (SAMPLES, CLASSES, 3, 2) if kind == "segmentation" else (SAMPLES, CLASSES)
    outputs = torch.randn(shape, dtype=torch.float64, generator=generator)
    if kind == "multi_label":
        return outputs, torch.randint(2, (SAMPLES, CLASSES), generator=generator)
    targets = torch.randint(CLASSES - 1, (SAMPLES, *shape[2:]), generator=generator)  # class 3 is predicted only
    if kind == "segmentation":
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED
    return outputs, targets


def measure(make_task: Callable[[], Task], batch: int) -> dict[str, float]:
    """The metrics of all samples, each on one of the ranks of this world."""
    outputs, targets = data(make_task.__name__)
    with join_world("gloo", 60) as world:
        task = make_task()
        meter = Meter(task, world)
        mine = torch.arange(world.rank, SAMPLES, world.size)
        for part in mine.split(batch):
            meter.add(task(outputs[part], targets[part])[1], len(part))
        return meter.means()


def f1(right: float, predicted: float, true: float) -> float:
    return 2 * right / (predicted + true) if predicted + true else math.nan


def counts(predicted: Tensor, true: Tensor) -> list[tuple[int, int, int]]:
    """(right, predicted, true) of each class, by counting."""
    pairs = list(zip(predicted.flatten().tolist(), true.flatten().tolist(), strict=True))
    return [(pairs.count((c, c)), sum(p == c for p, _ in pairs), sum(t == c for _, t in pairs)) for c in range(CLASSES)]


def expected_classification() -> dict[str, float]:
    outputs, targets = data("classification")
    of_classes = counts(outputs.argmax(1), targets)
    best = outputs.argsort(1, descending=True)[:, :2].tolist()
    return {
        "loss": F.cross_entropy(outputs, targets).item(),
        "accuracy": sum(right for right, _, _ in of_classes) / SAMPLES,
        "top2": sum(target in two for target, two in zip(targets.tolist(), best, strict=True)) / SAMPLES,
        "f1": sum(f1(*numbers) for numbers in of_classes) / CLASSES,
        "precision": sum(right / predicted for right, predicted, _ in of_classes) / CLASSES,
        "recall": sum(right / max(true, 1) for right, _, true in of_classes) / CLASSES,
        "f1_2": f1(*of_classes[2]),
    }


def expected_segmentation() -> dict[str, float]:
    outputs, targets = data("segmentation")
    counted = targets != IGNORED
    of_classes = counts(outputs.argmax(1)[counted], targets[counted])
    union = [right / (predicted + true - right) for right, predicted, true in of_classes]
    images = zip(outputs, targets, strict=True)
    losses = [F.cross_entropy(o[None], t[None], ignore_index=IGNORED).item() for o, t in images]
    return {
        "loss": sum(losses) / SAMPLES,
        "accuracy": sum(right for right, _, _ in of_classes) / int(counted.sum()),
        "iou": sum(union) / CLASSES,
        "iou_1": union[1],
    }


def expected_multi_label() -> dict[str, float]:
    outputs, targets = data("multi_label")
    predicted, true = outputs > 0, targets.bool()
    columns = [
        f1(int((predicted & true)[:, c].sum()), int(predicted[:, c].sum()), int(true[:, c].sum()))
        for c in range(CLASSES)
    ]
    return {
        "loss": F.binary_cross_entropy_with_logits(outputs, targets.double()).item(),
        "accuracy": (predicted == true).double().mean().item(),
        "all_right": (predicted == true).all(1).double().mean().item(),
        "f1": sum(columns) / CLASSES,
    }


@pytest.mark.parametrize(
    ("make_task", "expected"),
    [
        (classification, expected_classification),
        (segmentation, expected_segmentation),
        (multi_label, expected_multi_label),
    ],
)
def test_metrics_are_those_of_all_samples_at_any_world_size(make_task: Any, expected: Any) -> None:
    for size, batch in ((1, SAMPLES), (1, 5), (3, 4)):
        for found in in_world(size, measure, make_task, batch):
            assert found == pytest.approx(expected(), rel=1e-12), (size, batch)


def test_outputs_that_do_not_fit_are_refused_with_both_shapes() -> None:
    labels = torch.zeros(5, dtype=torch.long)
    for make_task, outputs, targets in (
        (classification, torch.zeros(5, CLASSES, 7), labels),
        (classification, torch.zeros(5, CLASSES, 7), torch.zeros(5, 7, dtype=torch.long)),
        (classification, torch.zeros(5, CLASSES, 3, 3), torch.zeros(5, 3, 3, dtype=torch.long)),
        (segmentation, torch.zeros(5, CLASSES, 3, 3), torch.zeros(5, 3, 4, dtype=torch.long)),
        (segmentation, torch.zeros(5, CLASSES), labels),
        (multi_label, torch.zeros(5, CLASSES), labels),
    ):
        with pytest.raises(ConfigError) as refused:
            make_task()(outputs, targets)
        assert str(list(outputs.shape)) in str(refused.value)
        assert str(list(targets.shape)) in str(refused.value)


def test_predictions_are_classes_labels_pixels_and_tokens() -> None:
    outputs = torch.randn(4, CLASSES)
    found = multi_label().predictions(outputs)
    assert torch.equal(found["prediction"], (found["probability"] > 0.5).long())
    assert segmentation().predictions(torch.randn(4, CLASSES, 3, 2))["prediction"].shape == (4, 3, 2)
    tokens = LanguageModelling({"loss": "min"}, "loss").predictions(outputs[None])["prediction"]
    assert torch.equal(tokens, classification().predictions(outputs)["prediction"][None])


def test_a_class_that_the_model_has_no_output_for_is_a_sentence() -> None:
    said = (
        f"^a target is 9, and the model has the outputs 0 to {CLASSES - 1}; type dataset.classes={CLASSES}, which names"
    )
    with pytest.raises(ConfigError, match=said):
        classification()(torch.zeros(2, CLASSES), torch.tensor([0, 9]))


@pytest.mark.parametrize("name", ["f2", "f1_4", "iou_x", "top"])
def test_a_metric_that_is_not_measured_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"task.metrics.{name} is not measured by this task; type one of loss, "):
        ClassificationF1(asked(name), "loss", 0.0, CLASSES, None)


def test_top_k_counts_among_as_many_classes_as_there_are() -> None:
    task = Classification(asked("top3", "top9"), "loss", 0.0, None, {}, None)
    outputs, targets = data("classification")
    sums = task(outputs, targets)[1]
    assert sums["top9"] == SAMPLES
    assert sums["top3"] == sum(outputs.topk(3).indices[n].tolist().count(targets[n].item()) for n in range(SAMPLES))


class Means(Classification):
    """What many people write first."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(outputs, targets)
        return loss, {"loss": loss, "accuracy": (outputs.argmax(1) == targets).sum()}


class Compares(Classification):
    """A loss of all pairs of a batch."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = torch.cdist(outputs, outputs).sum()
        return loss, {"loss": loss, "accuracy": (outputs.argmax(1) == targets).sum()}


def test_a_task_that_returns_a_mean_is_refused_and_one_that_compares_samples_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outputs, targets = data("classification")
    for number in (SAMPLES, 2):
        with pytest.raises(ConfigError, match="Means returns a mean as its loss.* return a sum over samples"):
            find_no_sums(Means(asked("accuracy"), "loss", 0.0, None, {}, None), outputs[:number], targets[:number])
    find_no_sums(Means(asked("accuracy"), "loss", 0.0, None, {}, None), outputs[:1], targets[:1])
    find_no_sums(classification(), outputs, targets)
    assert not caplog.records
    find_no_sums(Compares(asked("accuracy"), "loss", 0.0, None, {}, None), outputs, targets)
    assert "loss of test_counted_tasks.Compares does not add up" in caplog.text


class Weighed(OwnClassification):
    """Samples with weights, whose sum is no whole number, below 1 and a plain number of Python's."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (F.cross_entropy(outputs, targets, reduction="none") * weight_of(targets)).sum()
        return loss, {"loss": loss, "accuracy": ((outputs.argmax(1) == targets) * weight_of(targets)).sum()}

    def count(self, targets: Tensor) -> float:
        return float(weight_of(targets).sum())


def weight_of(targets: Tensor) -> Tensor:
    return (1 + targets).double() / 7000


def test_a_mean_is_over_the_weights_of_all_ranks_whatever_their_sum_is(tmp_path: Path) -> None:
    words = [*WHOLE, f"task._target_={__name__}.Weighed", "trainer.precision=fp64", "trainer.max_steps=4"]
    words += ["model=linear", "trainer.batch_size=61", "scheduler=constant", "optimizer.weight_decay=0", "logger=[]"]
    torch.manual_seed(0)
    images, targets = digits(True).inputs, digits(True).targets
    scaled = (images.double() / 255 - 0.287) / 0.353
    plain = train_reference(
        linear([1, 8, 8], 10).double(),
        (scaled, targets),
        lambda outputs, classes: Weighed.__call__(None, outputs, classes)[0] / weight_of(classes).sum(),  # type: ignore[arg-type]
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        epochs=1,
        batch_size=61,
        max_steps=4,
    )
    for size in (1, 2):
        folder = tmp_path / str(size)
        found = in_world(size, train_all, [accepted(*words, "optimizer.lr=0.05", f"run_dir={folder}")])
        assert torch.allclose(saved_parameters(folder, plain.model), plain.weights, rtol=1e-9, atol=1e-12)
        tested = (digits(False).inputs.double() / 255 - 0.287) / 0.353
        outputs, classes = plain.model(tested), digits(False).targets
        accuracy = ((outputs.argmax(1) == classes) * weight_of(classes)).sum() / weight_of(classes).sum()
        assert found[0] == [pytest.approx(float(accuracy), rel=1e-9)]


def test_class_weights_are_those_of_torch_on_any_ranks_and_balanced_ones_those_of_sklearn(tmp_path: Path) -> None:
    """Uneven last batches, gradient accumulation and label smoothing; virtual ranks have the same bits."""
    (x, y), (tested, classes) = ((half.inputs.double() / 255, half.targets) for half in (digits(True), digits(False)))
    typed = {"balanced": "balanced", "listed": "[1,2,0,4,5,6,0.7,8,9,10]"}
    weights = {
        "balanced": torch.from_numpy(compute_class_weight("balanced", classes=np.arange(10), y=y.numpy())),
        "listed": torch.tensor([1, 2, 0, 4, 5, 6, 0.7, 8, 9, 10], dtype=torch.float64),
    }
    words = [*WHOLE, "model=linear", "trainer.precision=fp64", "trainer.max_steps=4", "logger=[]"]
    words += ["trainer.batch_size=601", "scheduler=constant", "optimizer.weight_decay=0", "optimizer.lr=0.05"]
    words += ["dataset.mean=null", "dataset.std=null", "task.label_smoothing=0.1", "task.monitor=loss"]
    kinds = {"parts": ["trainer.gradient_accumulation_steps=3"], "fsdp": ["strategy=fsdp"]}
    kinds |= {"virtual": ["strategy=virtual_ranks", "strategy.count=6"]}
    for size in (1, 2, 3):
        chosen = product(weights, kinds if size == 3 else ("parts", "virtual"))
        folders = {pair: f"run_dir={tmp_path / '-'.join(pair)}-{size}" for pair in chosen}
        runs = [
            accepted(*words, *kinds[kind], f"task.class_weights={typed[name]}", folder)
            for (name, kind), folder in folders.items()
        ]
        in_world(size, train_all, runs)
    for name, values in weights.items():
        loss = partial(F.cross_entropy, weight=values, label_smoothing=0.1)
        torch.manual_seed(0)
        plain = train_reference(
            linear([1, 8, 8], 10).double(),
            (x, y),
            loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            epochs=2,
            batch_size=601,
            max_steps=4,
        )
        tested_loss = loss(plain.model(tested), classes).item()
        found = list(tmp_path.glob(f"{name}-*"))
        assert len(found) == 7
        for folder in found:
            assert torch.allclose(saved_parameters(folder, plain.model), plain.weights, rtol=0, atol=1e-12), folder
            run = read_run(folder)
            assert run["objective"]["last"] == pytest.approx(tested_loss, rel=1e-12), folder
            assert run["config"]["task.class_weights"] == pytest.approx(values.tolist(), rel=1e-12)
        assert same_bits(tmp_path / f"{name}-virtual-1", tmp_path / f"{name}-virtual-3")


def test_weighted_metrics_divide_the_loss_alone_by_the_weights() -> None:
    outputs, targets = data("classification")
    weights = [0.5, 2.0, 3.0, 0.0]
    task = ClassificationF1(asked("accuracy", "f1"), "f1", 0.0, CLASSES, weights)
    totals = {name: value.detach().double() for name, value in task(outputs, targets)[1].items()}
    found = task.finish(totals, float(task.count(targets)))
    expected = expected_classification()
    expected["loss"] = F.cross_entropy(outputs, targets, torch.tensor(weights).double()).item()
    assert found == pytest.approx({name: expected[name] for name in ("loss", "accuracy", "f1")}, rel=1e-12)
    mixed = torch.rand(SAMPLES, CLASSES, dtype=torch.float64).softmax(1)  # torch divides these by the samples
    plain = F.cross_entropy(outputs, mixed, torch.tensor(weights).double())
    assert float(task(outputs, mixed)[0] / task.count(mixed)) == pytest.approx(plain.item(), rel=1e-12)


def test_weighted_pixels_are_those_of_torch_for_each_image() -> None:
    outputs, targets = data("segmentation")
    weights = torch.tensor([0.5, 2.0, 3.0, 0.0], dtype=torch.float64)
    task = Segmentation(asked("iou"), "iou", CLASSES, IGNORED, weights.tolist())
    images = zip(outputs, targets, strict=True)
    losses = [F.cross_entropy(o[None], t[None], weights, ignore_index=IGNORED).item() for o, t in images]
    assert float(task(outputs, targets)[0]) == pytest.approx(sum(losses), rel=1e-12)


class Uncertain(Classification):
    """Two losses, weighted by two numbers that the model returns beside its outputs."""

    def __call__(self, outputs: Any, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, weights = outputs
        loss = F.cross_entropy(logits, targets, reduction="sum") * weights[0] + weights[1] * len(targets)
        return loss, {"loss": loss, "accuracy": (logits.argmax(1) == targets).sum()}


class Packed(Classification):
    """Of labels of all samples in one row, and how many each has."""

    def __call__(self, outputs: Tensor, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = torch.stack([part.sum() for part in targets[0].split(targets[1].tolist())]).sum() * outputs.mean()
        return loss, {"loss": loss, "accuracy": loss}


def test_what_has_no_row_for_each_sample_is_not_halved(caplog: pytest.LogCaptureFixture) -> None:
    outputs, targets = data("classification")
    arguments: Any = (asked("accuracy"), "loss", 0.0, None, {}, None)
    assert find_no_sums(Uncertain(*arguments), (outputs, torch.tensor([2.0, 3.0])), targets) == []
    packed = (torch.ones(3 * SAMPLES), torch.full((SAMPLES,), 3))
    assert find_no_sums(Packed(*arguments), outputs, packed) == []
    assert not caplog.records


def test_an_ignored_image_costs_nothing() -> None:
    task = segmentation()
    outputs, targets = torch.randn(2, CLASSES, 3, 2, requires_grad=True), torch.full((2, 3, 2), IGNORED)
    loss, sums = task(outputs, targets.to(torch.uint8))
    loss.backward()
    assert (loss.item(), sums["true"].sum().item(), outputs.grad.abs().sum().item()) == (0, 0, 0)  # type: ignore[union-attr]
