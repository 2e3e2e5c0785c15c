"""Tasks and metrics against numbers worked out sample by sample, at several world sizes."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lockstep.distributed.world import join_world
from lockstep.models.tutorial import linear
from lockstep.runs.record import read_run
from lockstep.tasks.tasks import CrossEntropy, MultiLabel
from lockstep.training.evaluate import Metrics, gathered
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
TASKS = {
    "classification": CrossEntropy(),
    "soft": CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1),
    "segmentation": CrossEntropy(ignored_label=IGNORED),
    "weighted_pixels": CrossEntropy(ignored_label=IGNORED, class_weights=WEIGHTS),
    "tokens": CrossEntropy(classes_last=True),
    "multi_label": MultiLabel(),
}


def data(kind):
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


def measure(batch):
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


def expected(kind):
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
    counted = (targets.flatten() != IGNORED) & (targets.flatten() != -100)
    rows, labels = rows[counted], targets.flatten()[counted]
    loss = F.cross_entropy(rows, labels, weight if "weighted" in kind else None)
    if kind == "tokens":
        return {"loss": loss.item(), "perplexity": loss.exp().item()}
    return {"loss": loss.item(), "accuracy": (rows.argmax(1) == labels).double().mean().item()}


def measure_metrics(shares):
    """{kind: two evaluations}: a second one begins at nothing. shares: the samples of each rank."""
    from torchmetrics import AUROC, F1Score, JaccardIndex

    f1 = F1Score(task="multiclass", num_classes=CLASSES, average="macro")
    iou = JaccardIndex(task="multiclass", num_classes=CLASSES, ignore_index=IGNORED)
    made = {"classification": {"f1": f1, "auroc": AUROC(task="multiclass", num_classes=CLASSES, average="macro")}}
    task, found = CrossEntropy(ignored_label=IGNORED), {}
    with join_world("gloo", 60) as world:
        for kind, chosen in (made | {"segmentation": {"iou": iou}}).items():
            (outputs, targets), found[kind] = data(kind), []
            for _ in range(2):
                metrics, rows = Metrics(chosen), []
                for numbers in torch.tensor(shares[world.rank], dtype=torch.int64).split(7):
                    own = metrics.add(task.scores(outputs[numbers].float()), targets[numbers])
                    rows.append({"number": numbers} | own)
                found[kind].append(metrics.compute(world, gathered(world, rows)))
    return found


def test_means_and_metrics_of_torchmetrics_are_those_of_all_samples_at_any_world_size():
    """Also where the shares are unequal, or empty."""
    from sklearn.metrics import f1_score, jaccard_score, roc_auc_score

    for found in in_world(1, measure, 1) + in_world(3, measure, 4):
        assert found.keys() == TASKS.keys()
        for name, means in found.items():
            assert means == pytest.approx(expected(name), rel=1e-12), name
    outputs, targets = data("classification")
    scores = outputs.float().softmax(1).double().numpy()
    f1 = f1_score(targets, outputs.argmax(1), labels=range(CLASSES), average="macro", zero_division=0)
    areas = [roc_auc_score(targets == label, scores[:, label]) for label in range(CLASSES - 1)]  # the last has none
    classes = pytest.approx({"f1": f1, "auroc": sum(areas) / CLASSES}, rel=1e-6)
    outputs, targets = data("segmentation")
    counted = targets != IGNORED
    pairs = targets[counted], outputs.argmax(1)[counted]
    iou = jaccard_score(*pairs, average="macro", labels=range(CLASSES), zero_division=0)
    shares = [range(30), range(30, SAMPLES), []]
    for found in in_world(3, measure_metrics, [list(share) for share in shares]):
        assert found["classification"] == [classes] * 2
        assert found["segmentation"] == [pytest.approx({"iou": iou}, rel=1e-6)] * 2


class Weighed(CrossEntropy):
    """Samples with weights, whose sum is no whole number, and below 1."""

    monitor = "loss"

    def __call__(self, outputs, targets):
        loss = F.cross_entropy(outputs, targets, reduction="none") * weight_of(targets)
        return {"loss": loss, "accuracy": outputs.argmax(1) == targets}

    def count(self, targets):
        return weight_of(targets).sum()


def weight_of(targets):
    return (1 + targets).double() / 7000


def weighed_mean(outputs, targets):
    return Weighed()(outputs, targets)["loss"].sum() / weight_of(targets).sum()


OF_CLASSES = [1, 2, 0, 4, 5, 6, 0.7, 8, 9, 10]
SMOOTHED = partial(F.cross_entropy, weight=torch.tensor(OF_CLASSES, dtype=torch.float64), label_smoothing=0.1)
WEIGHED = {
    "an own count": ([f"task._target_={__name__}.Weighed"], weighed_mean),
    "class weights": ([BY_LOSS, "task.label_smoothing=0.1", f"task.class_weights={OF_CLASSES}"], SMOOTHED),
}


@pytest.mark.parametrize("kind", WEIGHED)
def test_a_mean_is_over_the_weights_of_all_ranks_as_torchs_is(tmp_path, kind):
    """Uneven last batches and gradient accumulation; virtual ranks have the same bits."""
    typed, loss = WEIGHED[kind]
    words = [*WHOLE, *typed, "model=linear", "trainer.precision=fp64", "trainer.max_steps=4", "logger=[]"]
    words += ["trainer.batch_size=601", "scheduler=constant", "optimizer.weight_decay=0", "optimizer.lr=0.05"]
    words += ["dataset.mean=null", "dataset.std=null"]
    kinds = {"parts": ["trainer.gradient_accumulation_steps=3"], "fsdp": ["strategy=fsdp"]}
    kinds |= {"virtual": ["strategy=virtual_ranks", "strategy.count=6"]}
    for size in (1, 3):
        chosen = kinds if size == 3 else ("parts", "virtual")
        in_world(size, train_all, [accepted(*words, *kinds[k], f"run_dir={tmp_path / k}-{size}") for k in chosen])
    (x, y), (tested, classes) = ((half.inputs.double() / 255, half.targets) for half in (digits(True), digits(False)))
    torch.manual_seed(0)
    model, make = linear([1, 8, 8], 10).double(), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    plain = train_reference(model, (x, y), loss, make, epochs=2, batch_size=601, max_steps=4)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 5
    for folder in folders:
        assert torch.allclose(saved_parameters(folder, plain.model), plain.weights, rtol=0, atol=1e-12), folder
        run = read_run(folder)
        assert run["objective"]["last"] == pytest.approx(loss(plain.model(tested), classes).item(), rel=1e-12), folder
    assert same_bits(tmp_path / "virtual-1", tmp_path / "virtual-3")


def test_the_speed_is_told_in_tokens_too(tmp_path):
    in_world(1, train_all, [composed(*small_gpt(tmp_path, "logger=[csv,console]", f"run_dir={tmp_path / 'run'}"))])
    speeds = {}
    for _, tag, value in read_rows(tmp_path / "run"):
        speeds.setdefault(tag, []).append(value)
    assert speeds["speed/tokens_per_s"] == pytest.approx([8 * value for value in speeds["speed/samples_per_s"]])
    assert re.search(r"epoch 2/2 .* \d+ samples/s   \d+ tokens/s", (tmp_path / "run" / "train.log").read_text())
