"""Tasks and metrics against numbers worked out sample by sample, at several world sizes."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.models.tutorial import linear
from lockstep.runs.record import read_run
from lockstep.tasks.base import Task
from lockstep.tasks.tasks import CrossEntropy, MultiLabel
from lockstep.training.evaluate import Metrics
from lockstep.training.metrics import Meter
from support.commands import BY_LOSS, WHOLE
from support.digits import digits
from support.reference import saved_parameters, train_reference
from support.refusals import accepted
from support.worlds import in_world, same_bits, train_all

SAMPLES, CLASSES, IGNORED = 37, 4, 255
WEIGHTS = [0.5, 2.0, 3.0, 0.0]


def classification() -> Task:
    return CrossEntropy()


def weighted() -> Task:
    return CrossEntropy(class_weights=WEIGHTS)


def soft() -> Task:
    return CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1)


def segmentation() -> Task:
    return CrossEntropy(ignored_label=IGNORED)


def weighted_pixels() -> Task:
    return CrossEntropy(ignored_label=IGNORED, class_weights=WEIGHTS)


def tokens() -> Task:
    return CrossEntropy(classes_last=True)


def multi_label() -> Task:
    return MultiLabel()


def data(kind: str) -> tuple[Tensor, Tensor]:
    """(outputs, targets) of all samples, in float64."""
    generator = torch.Generator().manual_seed(5)
    shape = {"segmentation": (3, 2), "weighted_pixels": (3, 2), "tokens": (5,)}.get(kind, ())
    outputs = torch.randn((SAMPLES, CLASSES, *shape), dtype=torch.float64, generator=generator)
    if kind == "multi_label":
        return outputs, torch.randint(2, (SAMPLES, CLASSES), generator=generator)
    if kind == "soft":
        return outputs, torch.rand(SAMPLES, CLASSES, dtype=torch.float64, generator=generator).softmax(1)
    targets = torch.randint(CLASSES - 1, (SAMPLES, *shape), generator=generator)  # class 3 is predicted only
    if shape:
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED if kind != "tokens" else -100
    return outputs.mT if kind == "tokens" else outputs, targets


def measure(batch: int) -> dict[str, dict[str, float]]:
    """{task: the means of all samples}, each sample on one of the ranks of this world."""
    found = {}
    with join_world("gloo", 60) as world:
        for make_task in TASKS:
            outputs, targets = data(make_task.__name__)
            meter = Meter(make_task(), world)
            for part in torch.arange(world.rank, SAMPLES, world.size).split(batch):
                _, values, counts = meter.task.sums(outputs[part], targets[part])
                meter.add(0, values, counts)
            found[make_task.__name__] = meter.means(world.all_reduce_sum(meter.flush()).tolist())
    return found


def expected(kind: str) -> dict[str, float]:
    outputs, targets = data(kind)
    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    if kind == "multi_label":
        right = (outputs > 0) == targets.bool()
        loss = F.binary_cross_entropy_with_logits(outputs, targets.double())
        return {"loss": loss.item(), "accuracy": right.double().mean().item()}
    if kind == "soft":
        loss = F.cross_entropy(outputs, targets, weight, label_smoothing=0.1)
        return {"loss": loss.item(), "accuracy": (outputs.argmax(1) == targets.argmax(1)).double().mean().item()}
    rows = outputs if outputs.dim() == 2 else (outputs if kind == "tokens" else outputs.movedim(1, -1)).flatten(0, -2)
    labels = targets.flatten()
    rows, labels = rows[(labels != IGNORED) & (labels != -100)], labels[(labels != IGNORED) & (labels != -100)]
    loss = F.cross_entropy(rows, labels, weight if "weighted" in kind else None)
    if kind == "tokens":
        return {"loss": loss.item(), "perplexity": loss.exp().item()}
    return {"loss": loss.item(), "accuracy": (rows.argmax(1) == labels).double().mean().item()}


TASKS = [classification, weighted, soft, segmentation, weighted_pixels, tokens, multi_label]


@pytest.mark.parametrize(("size", "batch"), [(1, SAMPLES), (1, 5), (3, 4)])
def test_means_are_those_of_all_samples_at_any_world_size(size: int, batch: int) -> None:
    for found in in_world(size, measure, batch):
        assert found.keys() == {make_task.__name__ for make_task in TASKS}
        for name, means in found.items():
            assert means == pytest.approx(expected(name), rel=1e-12), name


def metrics_of(kind: str) -> dict[str, Any]:
    from torchmetrics import AUROC, F1Score, JaccardIndex

    options: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES, "average": "macro"}
    if kind == "segmentation":
        return {"iou": JaccardIndex(task="multiclass", num_classes=CLASSES, ignore_index=IGNORED)}
    return {"f1": F1Score(**options), "auroc": AUROC(**options | {"num_classes": CLASSES})}


def measure_metrics(shares: list[list[int]]) -> dict[str, list[dict[str, float]]]:
    """{kind: two evaluations}: a second one begins at nothing. shares: the samples of each rank."""
    task, found = CrossEntropy(ignored_label=IGNORED), {}
    with join_world("gloo", 60) as world:
        for kind in ("classification", "segmentation"):
            (outputs, targets), made = data(kind), metrics_of(kind)
            found[kind] = []
            for _ in range(2):
                metrics = Metrics(made)
                for numbers in torch.tensor(shares[world.rank], dtype=torch.int64).split(7):
                    metrics.add(task.scores(outputs[numbers].float()), targets[numbers], numbers)
                found[kind].append(metrics.compute(world))
    return found


SHARES = [[range(SAMPLES)], [range(0, SAMPLES, 2), range(1, SAMPLES, 2)], [range(30), range(30, SAMPLES), []]]


@pytest.mark.parametrize("shares", SHARES)
def test_metrics_of_torchmetrics_are_those_of_one_process(shares: Any) -> None:
    """Also where the shares are unequal, or empty."""
    from sklearn.metrics import f1_score, jaccard_score, roc_auc_score

    outputs, targets = data("classification")
    scores = outputs.float().softmax(1).double().numpy()
    f1 = f1_score(targets, outputs.argmax(1), labels=range(CLASSES), average="macro", zero_division=0)
    areas = [roc_auc_score(targets == label, scores[:, label]) for label in range(CLASSES - 1)]  # the last has none
    classes = pytest.approx({"f1": f1, "auroc": sum(areas) / CLASSES}, rel=1e-6)
    outputs, targets = data("segmentation")
    counted = targets != IGNORED
    pairs = targets[counted], outputs.argmax(1)[counted]
    iou = jaccard_score(*pairs, average="macro", labels=range(CLASSES), zero_division=0)
    for found in in_world(len(shares), measure_metrics, [list(share) for share in shares]):
        assert found["classification"] == [classes] * 2
        assert found["segmentation"] == [pytest.approx({"iou": iou}, rel=1e-6)] * 2


def test_outputs_that_do_not_fit_are_refused_with_both_shapes() -> None:
    labels = torch.zeros(5, dtype=torch.long)
    for make_task, outputs, targets in (
        (classification, torch.zeros(5, CLASSES, 7), labels),
        (segmentation, torch.zeros(5, CLASSES, 3, 3), torch.zeros(5, 3, 4, dtype=torch.long)),
        (multi_label, torch.zeros(5, CLASSES), labels),
    ):
        with pytest.raises(ConfigError) as refused:
            make_task().sums(outputs, targets)
        assert str(list(outputs.shape)) in str(refused.value)
        assert str(list(targets.shape)) in str(refused.value)


def test_predictions_are_classes_labels_pixels_and_tokens() -> None:
    outputs = torch.randn(4, CLASSES)
    found = multi_label().predictions(outputs)
    assert torch.equal(found["prediction"], (found["probability"] > 0.5).long())
    assert segmentation().predictions(torch.randn(4, CLASSES, 3, 2))["prediction"].shape == (4, 3, 2)
    of_tokens = tokens().predictions(outputs[None])["prediction"]
    assert torch.equal(of_tokens, classification().predictions(outputs)["prediction"][None])


class Means(CrossEntropy):
    """What many people write first."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return super().__call__(outputs, targets) | {"loss": F.cross_entropy(outputs, targets)}


def test_a_task_that_returns_a_mean_is_refused() -> None:
    outputs, targets = data("classification")
    said = r'Means gives loss as \[\], .* wanted, \[2\].*; type reduction="none" where it calls a loss of torch'
    with pytest.raises(ConfigError, match=said):
        Means().sums(outputs[:2], targets[:2])


class Weighed(CrossEntropy):
    """Samples with weights, whose sum is no whole number, and below 1."""

    monitor = "loss"

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(outputs, targets, reduction="none") * weight_of(targets)
        return {"loss": loss, "accuracy": outputs.argmax(1) == targets}

    def count(self, targets: Tensor) -> Tensor:
        return weight_of(targets).sum()


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
        lambda outputs, classes: Weighed()(outputs, classes)["loss"].sum() / weight_of(classes).sum(),
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
        loss = Weighed()(outputs, classes)["loss"].sum() / weight_of(classes).sum()
        assert found[0] == [pytest.approx(loss.item(), rel=1e-9)]


def test_class_weights_are_those_of_torch_on_any_ranks(tmp_path: Path) -> None:
    """Uneven last batches, gradient accumulation and label smoothing; virtual ranks have the same bits."""
    (x, y), (tested, classes) = ((half.inputs.double() / 255, half.targets) for half in (digits(True), digits(False)))
    typed = {"listed": "[1,2,0,4,5,6,0.7,8,9,10]"}
    weights = {"listed": torch.tensor([1, 2, 0, 4, 5, 6, 0.7, 8, 9, 10], dtype=torch.float64)}
    words = [*WHOLE, BY_LOSS, "model=linear", "trainer.precision=fp64", "trainer.max_steps=4", "logger=[]"]
    words += ["trainer.batch_size=601", "scheduler=constant", "optimizer.weight_decay=0", "optimizer.lr=0.05"]
    words += ["dataset.mean=null", "dataset.std=null", "task.label_smoothing=0.1"]
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


def test_an_ignored_image_costs_nothing() -> None:
    outputs, targets = torch.randn(2, CLASSES, 3, 2, requires_grad=True), torch.full((2, 3, 2), IGNORED)
    loss, _, counts = segmentation().sums(outputs, targets)
    loss.backward()
    assert (loss.item(), counts[0].item(), outputs.grad.abs().sum().item()) == (0, 0, 0)  # type: ignore[union-attr]
