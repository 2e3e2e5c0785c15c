"""Tasks and metrics against numbers worked out sample by sample, at several world sizes."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.distributed.world import join_world
from lockstep.models.tutorial import linear
from lockstep.runs.record import read_run
from lockstep.tasks.tasks import CrossEntropy, MultiLabel
from lockstep.training.evaluate import Metrics
from lockstep.training.metrics import Meter
from support.commands import BY_LOSS, WHOLE
from support.configs import composed
from support.digits import digits
from support.logged import read_rows
from support.reference import saved_parameters, train_reference
from support.refusals import accepted
from support.small_text import small_gpt
from support.worlds import in_world, same_bits, train_all

SAMPLES, CLASSES, IGNORED = 137, 4, 255
WEIGHTS = [0.5, 2.0, 3.0, 0.0]
PIXELS = {"ignored_label": IGNORED}
TASKS = {
    "classification": CrossEntropy(),
    "weighted": CrossEntropy(class_weights=WEIGHTS),
    "soft": CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1),
    "segmentation": CrossEntropy(**PIXELS),
    "weighted_pixels": CrossEntropy(**PIXELS, class_weights=WEIGHTS),
    "tokens": CrossEntropy(classes_last=True),
    "multi_label": MultiLabel(),
}


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
        for name, task in TASKS.items():
            (outputs, targets), meter = data(name), Meter(task, world)
            for part in torch.arange(world.rank, SAMPLES, world.size).split(batch):
                _, values, counts = meter.task.sums(outputs[part], targets[part])
                meter.add(0, values, counts)
            found[name] = meter.means(world.all_reduce_sum(meter.flush()).tolist())
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


@pytest.mark.parametrize(("size", "batch"), [(1, SAMPLES), (1, 1), (3, 4)])
def test_means_are_those_of_all_samples_at_any_world_size(size: int, batch: int) -> None:
    for found in in_world(size, measure, batch):
        assert found.keys() == TASKS.keys()
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


def weighed_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return Weighed()(outputs, targets)["loss"].sum() / weight_of(targets).sum()


OF_CLASSES = [1, 2, 0, 4, 5, 6, 0.7, 8, 9, 10]
SMOOTHED = partial(F.cross_entropy, weight=torch.tensor(OF_CLASSES, dtype=torch.float64), label_smoothing=0.1)
WEIGHED: dict[str, tuple[list[str], Any]] = {
    "an own count": ([f"task._target_={__name__}.Weighed"], weighed_mean),
    "class weights": ([BY_LOSS, "task.label_smoothing=0.1", f"task.class_weights={OF_CLASSES}"], SMOOTHED),
}


@pytest.mark.parametrize("kind", WEIGHED)
def test_a_mean_is_over_the_weights_of_all_ranks_as_torchs_is(tmp_path: Path, kind: str) -> None:
    """Uneven last batches and gradient accumulation; virtual ranks have the same bits."""
    typed, loss = WEIGHED[kind]
    words = [*WHOLE, *typed, "model=linear", "trainer.precision=fp64", "trainer.max_steps=4", "logger=[]"]
    words += ["trainer.batch_size=601", "scheduler=constant", "optimizer.weight_decay=0", "optimizer.lr=0.05"]
    words += ["dataset.mean=null", "dataset.std=null"]
    kinds = {"parts": ["trainer.gradient_accumulation_steps=3"], "fsdp": ["strategy=fsdp"]}
    kinds |= {"virtual": ["strategy=virtual_ranks", "strategy.count=6"]}
    for size in (1, 2, 3):
        chosen = kinds if size == 3 else ("parts", "virtual")
        in_world(size, train_all, [accepted(*words, *kinds[k], f"run_dir={tmp_path / k}-{size}") for k in chosen])
    (x, y), (tested, classes) = ((half.inputs.double() / 255, half.targets) for half in (digits(True), digits(False)))
    torch.manual_seed(0)
    model, make = linear([1, 8, 8], 10).double(), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    plain = train_reference(model, (x, y), loss, make, epochs=2, batch_size=601, max_steps=4)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 7
    for folder in folders:
        assert torch.allclose(saved_parameters(folder, plain.model), plain.weights, rtol=0, atol=1e-12), folder
        run = read_run(folder)
        assert run["objective"]["last"] == pytest.approx(loss(plain.model(tested), classes).item(), rel=1e-12), folder
    assert same_bits(tmp_path / "virtual-1", tmp_path / "virtual-3")


def test_an_ignored_image_costs_nothing() -> None:
    outputs, targets = torch.randn(2, CLASSES, 3, 2, requires_grad=True), torch.full((2, 3, 2), IGNORED)
    loss, _, counts = TASKS["segmentation"].sums(outputs, targets)
    loss.backward()
    assert (loss.item(), counts[0].item(), outputs.grad.abs().sum().item()) == (0, 0, 0)  # type: ignore[union-attr]


def test_the_speed_is_told_in_tokens_too(tmp_path: Path) -> None:
    in_world(1, train_all, [composed(*small_gpt(tmp_path, "logger=[csv,console]", f"run_dir={tmp_path / 'run'}"))])
    speeds: dict[str, list[float]] = {}
    for _, tag, value in read_rows(tmp_path / "run"):
        speeds.setdefault(tag, []).append(value)
    assert speeds["speed/tokens_per_s"] == pytest.approx([8 * value for value in speeds["speed/samples_per_s"]])
    assert re.search(r"epoch 2/2 .* \d+ samples/s   \d+ tokens/s", (tmp_path / "run" / "train.log").read_text())
