"""Nets, losses, optimizers and schedules against formulas and plain torch, and what is refused."""

import inspect
import logging
import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.transforms import v2

from lockstep.config.check import instantiate
from lockstep.errors import ConfigError
from lockstep.models.airbench import Airbench, Whitening
from lockstep.models.gpt import gpt
from lockstep.models.library import timm_model, torchvision_model
from lockstep.models.tutorial import convnet, linear, mlp, toy_parallel
from lockstep.snapshots.initial_weights import load_initial_weights
from lockstep.tasks.base import Task
from lockstep.tasks.tasks import CrossEntropy, MultiLabel, Regression
from lockstep.training import schedules
from lockstep.training.nonfinite import broken_samples
from lockstep.training.optimizers import Muon, orthogonalised
from support.configs import composed
from support.refusals import accepted


def small_gpt(variant: Any) -> nn.Sequential:
    """Two blocks, two heads, 8 numbers a token, 7 symbols and places for 16."""
    torch.manual_seed(0)
    return gpt([16], 7, layers=2, heads=2, width=8, dropout=0.0, tied=True, variant=variant)


def test_models_have_the_layers_that_they_are_asked_for() -> None:
    for model, shapes in [
        (mlp([1, 4, 4], 3, width=5, depth=2, dropout=0.5), [(5, 16), (5, 5), (3, 5)]),
        (linear([20], 1), [(1, 20)]),
        (linear([1, 8, 8], 10), [(10, 64)]),
        (toy_parallel([3, 2], 4, width=9), [(9, 6), (4, 9)]),
        (convnet([3, 12, 8], 10), [(16, 3, 5, 5), (16,), (32, 16, 5, 5), (32,), (10, 192)]),
    ]:
        assert [tuple(value.shape) for name, value in model.named_parameters() if name.endswith("weight")] == shapes
    drops = [module.p for module in mlp([7], 3, width=5, depth=3, dropout=0.5) if isinstance(module, nn.Dropout)]
    assert drops == [0.5, 0.5, 0.5]
    assert list(dict(linear([20], 1).named_parameters())) == ["weight", "bias"]


def test_models_of_torchvision_and_timm_are_built_for_the_channels_and_classes_of_the_data() -> None:
    small = torchvision_model("resnet18", [1, 8, 8], 10)
    assert (small.conv1.weight.shape, type(small.maxpool)) == ((64, 1, 3, 3), nn.Identity)
    assert torchvision_model("resnet18", [1, 64, 64], 10).conv1.weight.shape == (64, 1, 7, 7)
    with torch.device("meta"):  # other nets, whose first convolution is somewhere else
        for name in ("mobilenet_v2", "efficientnet_b0", "shufflenet_v2_x0_5"):
            assert next(torchvision_model(name, [1, 28, 28], 10).parameters()).shape[1] == 1
        vit = torchvision_model("vit_b_32", [1, 64, 64], 10, image_size=64)
        assert (vit.conv_proj.weight.shape, vit.heads.head.out_features) == ((768, 1, 32, 32), 10)
        assert timm_model("convnext_atto", [1, 64, 64], 10).stem[0].weight.shape[1] == 1
        vit = timm_model("vit_tiny_patch16_224", [3, 64, 64], 7, img_size=64)
        assert (vit.pos_embed.shape, vit.head.out_features) == ((1, 17, 192), 7)


def test_what_a_model_does_not_take_is_refused_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, said in [
        (lambda: timm_model("resnet18", [3, 64, 64], 5, drop_rat=0.1), "drop_rat.* or ~model.<option>"),
        (lambda: timm_model("resnet18", [3, 64, 64], 5, pretrained=True), "pretrained.* or ~model.<option>"),
        (lambda: timm_model("resnet81", [3, 64, 64], 5), r"Unknown model \(resnet81\).*type model.model_name="),
        (lambda: torchvision_model("resnet18", [3, 64, 64], 5, drop_rat=0.1), "drop_rat.* or ~model.<option>"),
        (lambda: torchvision_model("resnet81", [3, 64, 64], 5), "Unknown model resnet81.*type model.name="),
        (lambda: gpt([8], 5, 1, 4, 18, 0.0, True, "gpt2"), "type model.width=16"),
        (lambda: gpt([8], 5, 1, 4, 12, 0.0, True, "modern"), "in pairs; type model.width=16"),
        (lambda: gpt([1, 8, 8], 5, 1, 4, 16, 0.0, True, "gpt2"), "type dataset=text"),
        (lambda: small_gpt("gpt2")(torch.zeros(2, 17).long()), "rows of at most 16 tokens.*type dataset=text"),
        (lambda: Airbench([1, 8, 20], 10, [8, 12, 16], "one"), "at least 9x9 pixels, not 8x20; type model=mlp"),
        (lambda: convnet([1, 3, 8], 1), "at least 4x4 pixels, not 3x8; type model=mlp"),
        (lambda: accepted("dataset=text", "model=convnet"), r"images, not samples of shape \[64\]; type model=mlp"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make()
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match="model=timm needs timm; type pip install timm, or model=resnet18"):
        timm_model("resnet18", [3, 64, 64], 10)


def test_the_smallest_gpt_of_nanogpt_has_as_many_parameters() -> None:
    model = gpt([64], 65, layers=4, heads=4, width=128, dropout=0.0, tied=True, variant="gpt2")
    assert sum(parameter.numel() for parameter in model.parameters()) == 804096


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_a_gpt_is_the_formulas_of_its_papers(variant: Any) -> None:
    model, modern, tokens = small_gpt(variant).double(), variant == "modern", torch.randint(7, (3, 12))
    added = [weight for name, weight in model.named_parameters() if name.endswith("projection.weight")]
    assert [bool(weight.any()) for weight in added] == [not modern] * 4
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    angles = torch.arange(12)[:, None] / 10_000 ** (torch.arange(0, 4, 2) / 4)

    def placed(vectors: Tensor) -> Tensor:
        """(N, T, 4) of a head: of the norm 2, and turned as complex numbers."""
        pairs = torch.complex(*F.normalize(vectors, dim=-1).chunk(2, -1))
        turned = 2 * pairs * torch.polar(torch.ones(12, 2), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def attention(vectors: Tensor, block: str) -> Tensor:
        if modern:
            before = torch.cat([torch.zeros(3, 1, 4), vectors[:, :-1, 4:]], 1)
            vectors = torch.cat([vectors[:, :, :4], before], -1)
        later, heads = torch.ones(12, 12).triu(1).bool(), []
        for of_head in (vectors @ weights[f"{block}.attention.queries_keys_values.weight"].T).chunk(2, -1):
            queries, keys, values = of_head.chunk(3, -1)
            queries, keys = (placed(queries), placed(keys)) if modern else (queries, keys)
            heads.append((queries @ keys.mT / 2).masked_fill(later, -math.inf).softmax(-1) @ values)
        return torch.cat(heads, -1) @ weights[f"{block}.attention.projection.weight"].T

    def norm(vectors: Tensor, name: str) -> Tensor:
        return F.layer_norm(vectors, (8,), weights[name])

    vectors = weights["embedding.tokens.weight"][tokens]
    vectors = vectors if modern else vectors + weights["embedding.positions.weight"][:12]
    for block in ("block1", "block2"):
        vectors = vectors + attention(norm(vectors, f"{block}.norm1.weight"), block)
        wide = norm(vectors, f"{block}.norm2.weight") @ weights[f"{block}.mlp.widen.weight"].T
        wide = wide.clamp(min=0) ** 2 if modern else F.gelu(wide)
        vectors = vectors + wide @ weights[f"{block}.mlp.projection.weight"].T
    logits = norm(vectors, "head.norm.weight") @ weights["embedding.tokens.weight"].T
    torch.testing.assert_close(model(tokens), logits, rtol=1e-6, atol=1e-6)  # its angles are float32's


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


def net(shape: list[int], views: str = "one") -> nn.Module:
    torch.manual_seed(0)
    return Airbench(shape, 10, [8, 12, 16], views).double()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("shape", [[3, 32, 32], [1, 28, 28], [1, 9, 17]])
def test_the_net_of_airbench_takes_images_of_any_size(shape: list[int]) -> None:
    model = net(shape)
    assert model(noise(5, *shape)).shape == (5, 10)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms = [f"blocks.block{block}.norm{place}.bias" for block in (1, 2, 3) for place in (1, 2)]
    filters = [f"blocks.block{block}.conv{place}.weight" for block in (1, 2, 3) for place in (1, 2)]
    assert trained == {*norms, *filters, "whiten.bias", "head.weight"}
    second = noise(2, 8, 6, 6)
    assert torch.equal(model.get_submodule("blocks.block2.conv1")(second)[:, :8], second)  # at first


def test_the_whitening_makes_the_covariance_of_patches_the_identity() -> None:
    mixed = torch.einsum("nchw,dc->ndhw", noise(1100, 3, 9, 9), noise(3, 3))  # the channels depend on each other
    images = F.avg_pool2d(mixed, 2, 1)  # and so do the pixels
    layer = Whitening(3).double()
    layer.bias.detach().zero_()
    layer.set_weights_from(images)
    whitened = layer(images).transpose(0, 1).flatten(1)
    assert torch.equal(whitened[:12], -whitened[12:])
    covariance = whitened[:12] @ whitened[:12].T / whitened.shape[1]
    assert torch.allclose(covariance.diagonal(), torch.ones(12, dtype=torch.float64), atol=0.05)  # SMALLEST_VARIANCE
    assert torch.allclose(covariance, torch.diag(covariance.diagonal()), atol=1e-10)


def test_an_evaluation_is_the_mean_over_the_views() -> None:
    images = noise(4, 3, 12, 12)
    one, two, six = (net([3, 12, 12], views).eval() for views in ("one", "mirrored", "mirrored_and_shifted"))
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    up_and_left, down_and_right = padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]

    def mean(*views: torch.Tensor) -> torch.Tensor:
        return torch.stack([one(view) for view in views]).mean(0)

    mirrored = mean(images, images.flip(3))
    shifted = mean(up_and_left, up_and_left.flip(3), down_and_right, down_and_right.flip(3))
    torch.testing.assert_close(two(images), mirrored)
    torch.testing.assert_close(six(images), (mirrored + shifted) / 2)
    assert not torch.allclose(mirrored, shifted)
    torch.testing.assert_close(six.train()(images), one.train()(images))


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_orthogonalised_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = noise(*shape)
    found = orthogonalised(matrix, 5)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ found @ right.T
    values = inside.diagonal()
    assert torch.allclose(inside, torch.diag(values), atol=1e-10)
    assert 0.5 < values.min() <= values.max() < 1.5


def muon(parameters: Any, lr: float) -> Muon:
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.8, weight_decay=0.1, nesterov=True)
    return Muon(parameters, lr, 0.6, 0.0, 3, True, sgd)


def test_muon_turns_filters_beside_groups_of_sgd() -> None:
    tall = torch.nn.Parameter(torch.eye(6, 2, dtype=torch.float64) * 3**0.5)  # its norm is the root of its rows
    tall.grad = tall.detach().clone()
    muon([tall], 0.1).step()  # a published step: not longer for having more rows than columns
    expected = torch.eye(6, 2, dtype=torch.float64) * 3**0.5
    expected -= 0.1 * orthogonalised(expected.clone(), 3)
    torch.testing.assert_close(tall.detach(), expected, rtol=1e-6, atol=1e-7)

    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 5)).double()
    weight, bias, head = net[0].weight, net[0].bias, net[2].weight
    weight.detach().mul_(3**0.5 / weight.norm())  # as Muon does first
    net(noise(7, 1, 8, 8)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in (weight, bias, head)]
    of_head: dict[str, Any] = {"params": [head], "use_muon": False, "lr": 0.3, "weight_decay": 0.2}
    muon([{"params": [*net[0].parameters(), net[2].bias]}, of_head], 0.1).step()
    update = orthogonalised(weight.grad.flatten(1), 3).view(3, 1, 3, 3)  # momentum only scales a first gradient
    torch.testing.assert_close(weight.detach(), before[0] - 0.1 * update, rtol=1e-6, atol=1e-7)
    for parameter, first, lr, decay in ((bias, before[1], 0.02, 0.1), (head, before[2], 0.3, 0.2)):
        gradient = parameter.grad + decay * first  # Nesterov's first step is of 1.8 gradients
        torch.testing.assert_close(parameter.detach(), first - lr * 1.8 * gradient, rtol=1e-9, atol=1e-12)


def test_the_preset_for_image_folders_has_every_part_of_torchvisions_recipe() -> None:
    cfg = composed("experiment=image_folder_resnet", "dataset.root=pictures", "dataset.classes=2")
    crop, flip, augment, erasing = instantiate(cfg.loader.transforms)
    assert (crop(torch.zeros(3, 40, 30)).shape, type(augment)) == ((3, 176, 176), v2.TrivialAugmentWide)
    resize, middle = instantiate(cfg.loader.test_transforms)
    assert resize(torch.zeros(3, 464, 928)).shape == (3, 232, 464)
    assert middle(torch.zeros(3, 232, 464)).shape == (3, 224, 224)
    (mixing,) = instantiate(cfg.loader.batch_transforms)
    mixup, cutmix = mixing.transforms
    assert (erasing.p, flip.p, mixup.alpha, cutmix.alpha, cutmix.num_classes) == (0.1, 0.5, 0.2, 1.0, 2)
    assert cfg.dataset["size"] is None
    assert (cfg.task["label_smoothing"], cfg.trainer.ema["decay"], cfg.scheduler["warmup_epochs"]) == (0.1, 0.999, 5)
    assert cfg.scheduler["shape"] == "cosine"
    assert (cfg.optimizer["weight_decay"], cfg.parameters.no_decay) == (2e-5, ["bias", "norm"])
    assert cfg.optimizer["lr"] / cfg.trainer.batch_size == 0.5 / 1024


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0, momentum=0.9)


def rates(schedule: Any, steps: int, steps_per_epoch: int = 4) -> list[float]:
    """The learning rate of each step, of a peak of 2: as they come, and as a run that goes on computes them."""
    facts = {"steps_per_epoch": steps_per_epoch, "total_steps": steps}
    taken = {name: value for name, value in facts.items() if name in inspect.signature(schedule).parameters}

    running, found, resumed = optimizer(), [], []
    follow = schedule(running, **taken)
    for step in range(steps):
        found.append(running.param_groups[0]["lr"])
        follow(step + 1)
        other = optimizer()
        schedule(other, **taken)(step)
        resumed.append(other.param_groups[0]["lr"])
    assert resumed == found
    return found


def half_cosine(n: int) -> float:
    return (1 + math.cos(math.pi * n / 10)) / 2


FORMULAS: list[tuple[Any, list[float]]] = [  # two epochs and a half of four steps, of which the first two warm up
    (schedules.constant, [2.0] * 12),
    (partial(schedules.step, step_epochs=2, gamma=0.1), [2.0] * 8 + [0.2] * 4),
    (
        partial(schedules.decay, shape="cosine", warmup_epochs=0.5, final_lr_ratio=0.1),
        [1.0, 2.0, *(2 * (0.1 + 0.9 * half_cosine(n)) for n in range(10))],
    ),
    (
        partial(schedules.decay, shape="linear", warmup_epochs=0.5, final_lr_ratio=0.1),
        [1.0, 2.0, *(2 * (1 - 0.9 * n / 10) for n in range(10))],
    ),
    (partial(schedules.decay, shape="linear", warmup_epochs=0, final_lr_ratio=0), [2 - n / 6 for n in range(12)]),
]


@pytest.mark.parametrize(("schedule", "expected"), FORMULAS)
def test_schedules_are_their_formulas(schedule: Any, expected: list[float]) -> None:
    assert rates(schedule, 12) == pytest.approx(expected)


@pytest.mark.parametrize("pct_start", [0.05, 0.25, 0.75])
def test_one_cycle_is_torchs(pct_start: float) -> None:
    plain, expected = optimizer(), []
    theirs = torch.optim.lr_scheduler.OneCycleLR(plain, 2.0, 17, pct_start=pct_start, cycle_momentum=False)
    for _ in range(16):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        theirs.step()
    assert rates(partial(schedules.one_cycle, pct_start=pct_start), 16) == pytest.approx(expected, rel=1e-12)


def test_torchvisions_weights_come_in_with_a_new_head(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for kind, save in (("pt", torch.save), ("safetensors", save_file)):
        pretrained, net = resnet18(num_classes=20), resnet18(num_classes=7)
        pretrained.bn1.running_mean += 3
        save(pretrained.state_dict(), path := tmp_path / f"weights.{kind}")
        expected, head = pretrained.state_dict(), net.fc.weight.clone()
        said = r"size mismatch for fc.bias: .*\[20\].*\[7\].*type .?parameters.new_layers=\[<the layers"
        with pytest.raises(ConfigError, match=said):
            load_initial_weights(net, str(path), [])
        caplog.clear()
        load_initial_weights(net, str(path), ["fc"])
        assert all(torch.equal(v, expected[name]) for name, v in net.state_dict().items() if name[:2] != "fc")
        assert torch.equal(net.fc.weight, head)
        assert f"init: {len(expected) - 2} of {len(expected)} tensors" in caplog.text
        assert "init: keep their first values: fc.bias, fc.weight" in caplog.text
    monkeypatch.setattr("lockstep.snapshots.files.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^parameters.init=.* needs safetensors; type pip install safetensors$"):
        load_initial_weights(net, str(path), [])
