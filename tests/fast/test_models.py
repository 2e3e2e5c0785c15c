"""Nets, what they draw, losses, optimizers and schedules, against formulas and plain torch, and what is refused."""

import inspect
import math
import sys
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.data.loader import Batch, LoadedPart, Progress
from lockstep.errors import ConfigError
from lockstep.models.tutorial import convnet
from lockstep.tasks.tasks import CrossEntropy, MultiLabel, Regression
from lockstep.training import schedules
from lockstep.training.optimizers import Muon, orthogonalised
from lockstep.training.rng import Draws
from support.refusals import accepted

# Extras, each of which a fork may have deleted with its tests.
with suppress(ImportError):
    from lockstep.models.airbench import Airbench, Whitening
with suppress(ImportError):
    from lockstep.models.gpt import gpt
with suppress(ImportError):
    from lockstep.models.library import timm_model, torchvision_model


def small_gpt(variant):
    torch.manual_seed(0)
    return gpt([16], 7, layers=2, heads=2, width=8, dropout=0.0, tied=True, variant=variant)


def test_models_of_torchvision_and_timm_are_built_for_the_channels_and_classes_of_the_data():
    small = torchvision_model("resnet18", [1, 8, 8], 10)
    assert (small.conv1.weight.shape, type(small.maxpool)) == ((64, 1, 3, 3), nn.Identity)
    assert torchvision_model("resnet18", [1, 64, 64], 10).conv1.weight.shape == (64, 1, 7, 7)
    with torch.device("meta"):  # other nets, whose first convolution is somewhere else
        for name in ("mobilenet_v2", "efficientnet_b0", "shufflenet_v2_x0_5"):
            assert next(torchvision_model(name, [1, 28, 28], 10).parameters()).shape[1] == 1
        for name in ("googlenet", "inception_v3"):  # without the heads that are for training alone
            assert torchvision_model(name, [3, 96, 96], 10)(torch.rand(2, 3, 96, 96)).shape == (2, 10)
        vit = torchvision_model("vit_b_32", [1, 64, 64], 10, image_size=64)
        assert (vit.conv_proj.weight.shape, vit.heads.head.out_features) == ((768, 1, 32, 32), 10)
        assert timm_model("convnext_atto", [1, 64, 64], 10).stem[0].weight.shape[1] == 1
        vit = timm_model("vit_tiny_patch16_224", [3, 64, 64], 7, img_size=64)
        assert (vit.pos_embed.shape, vit.head.out_features) == ((1, 17, 192), 7)


def test_what_a_model_does_not_take_is_refused_by_its_own_name(monkeypatch):
    for make, said in [
        (lambda: timm_model("resnet18", [3, 64, 64], 5, drop_rat=0.1), "drop_rat.* or ~model.<option>"),
        (lambda: timm_model("resnet18", [3, 64, 64], 5, pretrained=True), "pretrained.* or ~model.<option>"),
        (lambda: timm_model("resnet81", [3, 64, 64], 5), r"Unknown model \(resnet81\).*type model.model_name="),
        (lambda: torchvision_model("resnet18", [3, 64, 64], 5, drop_rat=0.1), "drop_rat.* or ~model.<option>"),
        (lambda: torchvision_model("resnet81", [3, 64, 64], 5), "no net model.name=resnet81; type model.name=resnet18"),
        (lambda: torchvision_model("fcn_resnet50", [3, 64, 64], 5), "no net model.name=fcn_resnet50; type"),
        (lambda: torchvision_model("vit_b_32", [3, 40, 40], 5, image_size=40), "indivisible.* or ~model.<option>"),
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


def test_the_smallest_gpt_of_nanogpt_has_as_many_parameters():
    model = gpt([64], 65, layers=4, heads=4, width=128, dropout=0.0, tied=True, variant="gpt2")
    assert sum(parameter.numel() for parameter in model.parameters()) == 804096


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_a_gpt_is_the_formulas_of_its_papers(variant):
    model, modern, tokens = small_gpt(variant).double(), variant == "modern", torch.randint(7, (3, 12))
    added = [weight for name, weight in model.named_parameters() if name.endswith("projection.weight")]
    assert [bool(weight.any()) for weight in added] == [not modern] * 4
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    angles = torch.arange(12)[:, None] / 10_000 ** (torch.arange(0, 4, 2) / 4)

    def placed(vectors):
        """(N, T, 4) of a head: of the norm 2, and turned as complex numbers."""
        pairs = torch.complex(*F.normalize(vectors, dim=-1).chunk(2, -1))
        turned = 2 * pairs * torch.polar(torch.ones(12, 2), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def attention(vectors, block):
        if modern:
            before = torch.cat([torch.zeros(3, 1, 4), vectors[:, :-1, 4:]], 1)
            vectors = torch.cat([vectors[:, :, :4], before], -1)
        later, heads = torch.ones(12, 12).triu(1).bool(), []
        for of_head in (vectors @ weights[f"{block}.attention.queries_keys_values.weight"].T).chunk(2, -1):
            queries, keys, values = of_head.chunk(3, -1)
            queries, keys = (placed(queries), placed(keys)) if modern else (queries, keys)
            heads.append((queries @ keys.mT / 2).masked_fill(later, -math.inf).softmax(-1) @ values)
        return torch.cat(heads, -1) @ weights[f"{block}.attention.projection.weight"].T

    def norm(vectors, name):
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


LABELS = torch.zeros(2).long()
REFUSED = [  # the task, the shape of outputs, the targets, what is said
    (CrossEntropy(), [2, 5, 9], torch.zeros(2, 5).long(), r"class numbers \(N, ...\), whole ones, and these"),
    (CrossEntropy(), [2, 4], torch.zeros(2, 4).long(), r"are \[2, 4\] and \[2, 4\], int64; type task="),
    (CrossEntropy(), [2, 1], torch.zeros(2), r"are \[2, 1\] and \[2\], float32; type task="),
    (Regression(), [2, 3], LABELS, r"of one shape, and these are \[2, 3\] and \[2\], int64; type task="),
    (Regression(), [2, 3], torch.zeros(2, 4), r"are \[2, 3\] and \[2, 4\], float32; type task="),
    (MultiLabel(), [2, 3], LABELS, r"\(N, labels\), and these are \[2, 3\] and \[2\], int64; type task="),
    (Regression(loss=lambda *_: torch.ones(3)), [2, 4], torch.zeros(2, 4), r"loss as \[3\], .* \[2\], or \[2, 4\]"),
]


def test_outputs_that_do_not_fit_are_refused():
    for task, outputs, targets, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            task.sums(torch.zeros(outputs), targets)


def test_no_sample_adds_nothing_and_half_precision_is_summed_in_float32():
    for task, targets in ((CrossEntropy(), LABELS[:0]), (Regression(), torch.zeros(0, 2))):
        outputs = torch.zeros(0, 2, dtype=torch.bfloat16)
        found = task.sums(outputs, targets)
        assert (found.loss.dtype, any(value.item() for value in found.values)) == (torch.float32, False)


def net(shape, views="one"):
    torch.manual_seed(0)
    return Airbench(shape, 10, [8, 12, 16], views).double()


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_whitening_makes_the_covariance_of_patches_the_identity():
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


def test_an_evaluation_is_the_mean_over_the_views():
    images = noise(4, 3, 12, 12)
    one, two, six = (net([3, 12, 12], views).eval() for views in ("one", "mirrored", "mirrored_and_shifted"))
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    up_and_left, down_and_right = padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]

    def mean(*views):
        return torch.stack([one(view) for view in views]).mean(0)

    mirrored = mean(images, images.flip(3))
    shifted = mean(up_and_left, up_and_left.flip(3), down_and_right, down_and_right.flip(3))
    torch.testing.assert_close(two(images), mirrored)
    torch.testing.assert_close(six(images), (mirrored + shifted) / 2)
    assert not torch.allclose(mirrored, shifted)
    torch.testing.assert_close(six.train()(images), one.train()(images))


def test_orthogonalised_keeps_the_singular_vectors():
    for shape in ((6, 20), (20, 6)):
        matrix = noise(*shape)
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        inside = left.T @ orthogonalised(matrix, 5) @ right.T
        values = inside.diagonal()
        assert torch.allclose(inside, torch.diag(values), atol=1e-10)
        assert 0.5 < values.min() <= values.max() < 1.5


def muon(parameters, lr):
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.8, weight_decay=0.1, nesterov=True)
    return Muon(parameters, lr, 0.6, 0.0, 3, True, sgd)


def test_muon_turns_filters_beside_groups_of_sgd():
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
    of_head = {"params": [head], "use_muon": False, "lr": 0.3, "weight_decay": 0.2}
    muon([{"params": [*net[0].parameters(), net[2].bias]}, of_head], 0.1).step()
    update = orthogonalised(weight.grad.flatten(1), 3).view(3, 1, 3, 3)  # momentum only scales a first gradient
    torch.testing.assert_close(weight.detach(), before[0] - 0.1 * update, rtol=1e-6, atol=1e-7)
    for parameter, first, lr, decay in ((bias, before[1], 0.02, 0.1), (head, before[2], 0.3, 0.2)):
        gradient = parameter.grad + decay * first  # Nesterov's first step is of 1.8 gradients
        torch.testing.assert_close(parameter.detach(), first - lr * 1.8 * gradient, rtol=1e-9, atol=1e-12)


def optimizer():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0, momentum=0.9)


def rates(schedule, steps):
    """The learning rate of each step, of a peak of 2: as they come, and as a run that goes on computes them."""
    parameters = inspect.signature(schedule).parameters
    taken = {name: n for name, n in {"steps_per_epoch": 4, "total_steps": steps}.items() if name in parameters}
    running, found = optimizer(), []
    follow = schedule(running, **taken)
    for step in range(steps):
        resumed = optimizer()
        schedule(resumed, **taken)(step)
        found.append(running.param_groups[0]["lr"])
        assert resumed.param_groups[0]["lr"] == found[-1]
        follow(step + 1)
    return found


def half_cosine(n):
    return (1 + math.cos(math.pi * n / 10)) / 2


FORMULAS = [  # two epochs and a half of four steps, of which the first two warm up
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


def test_schedules_are_their_formulas_and_one_cycle_is_torchs():
    for schedule, expected in FORMULAS:
        assert rates(schedule, 12) == pytest.approx(expected)
    for pct_start in (0.05, 0.25, 0.75):
        plain, expected = optimizer(), []
        theirs = torch.optim.lr_scheduler.OneCycleLR(plain, 2.0, 17, pct_start=pct_start, cycle_momentum=False)
        for _ in range(16):
            expected.append(plain.param_groups[0]["lr"])
            plain.step()
            theirs.step()
        assert rates(partial(schedules.one_cycle, pct_start=pct_start), 16) == pytest.approx(expected, rel=1e-12)


BATCH = 24
TOGETHER, CUTS = (0, BATCH), [(0, 12, BATCH), (0, 7, BATCH), (0, 3, 5, 9, 10, BATCH), (0, 1, BATCH)]
# Layers whose tokens are not taken for as many samples.
LAYERS, AS_TOKENS = ("lstm", "attention", "attention, tokens first", "transformer"), (0, 5, 12, 17, BATCH)
ATTENTION = nn.MultiheadAttention(6, 2, dropout=0.3, dtype=torch.float64)
ATTENTION_OF_BATCHES = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True, dtype=torch.float64)
LSTM = nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True, dtype=torch.float64)
ENCODER = nn.TransformerEncoderLayer(6, 2, 12, 0.2, batch_first=True, dtype=torch.float64)


def tokens_first(function):
    return lambda x: function(x.transpose(0, 1)).transpose(0, 1)


# {what draws: a function of x (N, 5, 6)}
DRAWS = {
    "dropout": nn.Dropout(0.3),
    "dropout in place": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "dropout1d": nn.Dropout1d(0.3),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.3),
    "alpha_dropout": nn.AlphaDropout(0.3),
    "feature_alpha_dropout": nn.FeatureAlphaDropout(0.3),
    "dropout, tokens first": tokens_first(nn.Dropout(0.3)),
    "dropout of windows": lambda x: F.dropout(x.reshape(-1, 6), 0.3),
    "attention, tokens first": tokens_first(lambda x: ATTENTION(x, x, x)[0]),
    "attention": lambda x: ATTENTION_OF_BATCHES(x, x, x)[0],
    "attention without its weights": lambda x: ATTENTION_OF_BATCHES(x, x, x, need_weights=False)[0],
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2),
    "attention with heads": lambda x: F.scaled_dot_product_attention(*[x.unflatten(2, (2, 3)).mT] * 3, dropout_p=0.2),
    "lstm": lambda x: LSTM(x)[0],
    "transformer": ENCODER,
    "stochastic depth": lambda x: torchvision.ops.stochastic_depth(x, 0.3, "row"),
    "gumbel_softmax": F.gumbel_softmax,
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint_like": lambda x: x + torch.randint_like(x, 2, 9),
    "rand": lambda x: x + torch.rand(len(x), 1, 1),
    "randn": lambda x: x + torch.randn(len(x), 5, 1),
    "randint": lambda x: x + torch.randint(9, (len(x), 1, 1)),
    "a coin": lambda x: x * torch.rand(()),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "normal": lambda x: x + torch.normal(x.detach(), 0.1),
    "normal of tensors": lambda x: x + torch.normal(0.0, torch.ones(len(x), 5, 6)),
    "normal of a size": lambda x: x + torch.normal(0.0, 0.1, size=x.shape),
    "a gamma number": lambda x: x * torch.distributions.Beta(2.0, 2.0).sample(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "distributions": lambda x: x + torch.distributions.Normal(x.detach(), 0.1).rsample(),
    "two": nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)),
    "checkpoint": lambda x: checkpoint(lambda y: F.dropout(y, 0.3).sin(), x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(lambda y: F.dropout(y, 0.3).sin(), x, use_reentrant=True),
}


def drawing(start, rows, count, progress):
    """The block of a part in the first batch of an epoch."""
    part = LoadedPart(0, start, None, None, torch.arange(rows))
    return Draws(0, torch.device("cpu"), True, progress).of_part(part, Batch(0, count, []))


def passes(function, inputs, edges):
    progress, outputs, gradients = Progress(), [], []
    for begin, end in pairwise(edges):
        part = inputs[begin:end].clone().requires_grad_()
        with drawing(begin, end - begin, len(inputs), progress):
            output = function(part)
            output.square().sum().backward()
        assert progress.has_drawn
        outputs.append(output.detach().reshape(end - begin, -1))
        gradients.append(part.grad)
    return torch.cat(outputs), torch.cat(gradients)


@pytest.mark.parametrize("what", DRAWS)
def test_each_sample_draws_the_same_however_the_batch_is_cut(what):
    inputs = torch.rand(BATCH, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs, gradients = passes(DRAWS[what], inputs, TOGETHER)
    for edges in [*CUTS, *([AS_TOKENS] if what in LAYERS else [])]:
        others, their_gradients = passes(DRAWS[what], inputs, edges)
        torch.testing.assert_close(others, outputs, rtol=0, atol=1e-12)
        torch.testing.assert_close(their_gradients, gradients, rtol=0, atol=1e-12)


def test_masks_of_samples_layers_and_steps_are_independent():
    masks = []
    for step in range(3):
        with drawing(0, 100, 100, Progress(step=step)):
            masks += [F.dropout(torch.ones(100, 2000)).sign() for _ in range(3)]
    drawn = torch.cat(masks) * 2 - 1  # (900, 2000)
    together = drawn @ drawn.T / 2000
    assert together.fill_diagonal_(0).abs().max() < 6 / 2000**0.5  # 6 standard deviations, of 404,550 pairs


def test_what_decides_about_a_layer_or_a_parameter_is_the_same_on_all_ranks_and_draws_without_samples_is_not():
    coins, masks, orders, weights, weight = set(), [], [], [], nn.Parameter(torch.ones(6, 4))
    for start, rows in ((0, 7), (7, 9)):
        with drawing(start, rows, 16, Progress()):
            weights.append(torch.cat([torch.randn_like(weight), F.dropout(weight)]).detach())
            whole = torchvision.ops.stochastic_depth(torch.ones(rows, 5, 6), 0.5, "batch")
            coins.add((float(torch.rand(())), float(torch.rand(1)), float(whole.sum()) > 0))
            masks.append(F.dropout(torch.ones(1001)))
            orders.append(torch.randperm(1001))
    assert (len(coins), torch.equal(*weights)) == (1, True)
    assert not torch.equal(*masks)
    assert not torch.equal(*orders)
