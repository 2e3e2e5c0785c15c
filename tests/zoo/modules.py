"""The nets of the zoo: a stem, a body and a head. The bodies are what differs: each is one thing that people bring."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lockstep.data.source import tensors_in

WIDTH = 12  # values of a vector, and of a place in a sequence
CHANNELS = 4
SIDE = 6  # an image, or map, is SIDE x SIDE; a sequence has SIDE places

Body = Callable[[], nn.Module]
BODIES: dict[str, tuple[str, Body]] = {}
"""{name: (what the body takes and gives: "vector", "map" or "sequence", and what makes it)}."""


torch.manual_seed(7)  # as a file of somebody's may do when it is imported
np.random.seed(7)
random.seed(7)


def net(body: str, shape: list[int], classes: int, places: int = 1) -> nn.Module:
    """Samples (N, 1, 6, 6), in whatever holds them, -> (N, classes); with 36 places, for masks, (N, classes, 6, 6)."""
    form, make = BODIES[body]
    return nn.Sequential(OrderedDict(stem=STEMS[form](), body=make(), head=Head(form, classes, places)))


class Stem(nn.Module):
    """Takes the first tensor of the inputs, whatever holds it, as images (N, 1, 6, 6) of the weights' type."""

    def __init__(self, layer: nn.Module, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.form = layer, form

    def forward(self, inputs: Any) -> Tensor:
        images = next(iter(tensors_in(inputs)))
        images = images.reshape(images.shape[0], 1, SIDE, SIDE).to(self.layer.weight.dtype)
        outputs: Tensor = torch.tanh(self.layer(self.form(images)))
        return outputs


def flat(images: Tensor) -> Tensor:
    return images.flatten(1)


def rows(images: Tensor) -> Tensor:
    return images.flatten(1, 2)


def as_they_are(images: Tensor) -> Tensor:
    return images


STEMS: dict[str, Callable[[], nn.Module]] = {
    "vector": lambda: Stem(nn.Linear(SIDE * SIDE, WIDTH), flat),
    "sequence": lambda: Stem(nn.Linear(SIDE, WIDTH), rows),
    "map": lambda: Stem(nn.Conv2d(1, CHANNELS, 3, padding=1), as_they_are),
}


class Head(nn.Module):
    """Values of any form -> (N, classes), or (N, classes, 6, 6) with `places`=36."""

    def __init__(self, form: str, classes: int, places: int = 1) -> None:
        super().__init__()
        width = {"vector": WIDTH, "sequence": WIDTH * SIDE, "map": CHANNELS * SIDE * SIDE}[form]
        self.layer, self.classes, self.places = nn.Linear(width, classes * places), classes, places

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.layer(values.flatten(1))
        return outputs if self.places == 1 else outputs.view(-1, self.classes, SIDE, SIDE)


def body(form: str, name: str = "") -> Callable[[Any], Any]:
    """Keeps a class, or a function that makes a module, under its name."""

    def keep(make: Any) -> Any:
        BODIES[name or make.__name__] = form, make
        return make

    return keep


def keep_all(form: str, **made: Body) -> None:
    for name, make in made.items():
        BODIES[name] = form, make


# Layers of torch.
keep_all(
    "vector",
    linear=partial(nn.Linear, WIDTH, WIDTH),
    batch_norm_1d=partial(nn.BatchNorm1d, WIDTH),
    batch_norm_cumulative=partial(nn.BatchNorm1d, WIDTH, momentum=None),
    batch_norm_plain=partial(nn.BatchNorm1d, WIDTH, affine=False),
    layer_norm=partial(nn.LayerNorm, WIDTH),
    rms_norm=partial(nn.RMSNorm, WIDTH),
    bilinear=lambda: Twice(nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    prelu=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH), nn.Linear(WIDTH, WIDTH)),
    one_prelu=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(), nn.Linear(WIDTH, WIDTH)),
    in_place=lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ELU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
    ),
    lazy_linear=lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()),
    lazy_batch_norm=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d()),
    spectral_norm=lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    old_spectral_norm=lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    weight_norm=lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    orthogonal=lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    twice_the_same=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH)] * 2),
    dropout=lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.AlphaDropout(0.2)),
    scripted=lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
    frozen=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
)
keep_all(
    "map",
    convolution=partial(nn.Conv2d, CHANNELS, CHANNELS, 3, padding=1),
    depthwise=partial(nn.Conv2d, CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
    transposed=partial(nn.ConvTranspose2d, CHANNELS, CHANNELS, 3, padding=1),
    shortcut=lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1, stride=2), nn.Upsample(scale_factor=2)),
    batch_norm_2d=partial(nn.BatchNorm2d, CHANNELS),
    two_batch_norms=lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.BatchNorm2d(CHANNELS)),
    group_norm=partial(nn.GroupNorm, 2, CHANNELS),
    instance_norm=partial(nn.InstanceNorm2d, CHANNELS, affine=True),
    running_instance_norm=partial(nn.InstanceNorm2d, CHANNELS, affine=True, track_running_stats=True),
    local_response_norm=lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.LocalResponseNorm(2)),
    pooled=lambda: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")),
    dropped_channels=lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Dropout2d(0.3)),
    standardised=lambda: parametrizations.weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)),
)
keep_all(
    "sequence",
    lstm=lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    deep_gru=lambda: First(nn.GRU(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)),
    dropped_lstm=lambda: First(nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)),
    attention=lambda: Attention(0.0),
    dropped_attention=lambda: Attention(0.3),
    encoder=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    dropped_encoder=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True, norm_first=True),
)


class Twice(nn.Module):
    """A layer of two inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Tensor) -> Tensor:
        return 0.1 * self.layer(values, values)


class First(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values)[0]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.layer(values, values, values, need_weights=False)[0]


@body("vector")
class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up.weight = self.down.weight

    def forward(self, values: Tensor) -> Tensor:
        return self.up(torch.tanh(self.down(values)))


@body("vector")
class TiedTransposed(nn.Module):
    """An autoencoder whose decoder uses the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 8)

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(values)), self.encoder.weight.t())


@body("vector")
class Complex(nn.Module):
    """A filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, values: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(values) * self.filter, n=WIDTH)


@body("vector")
class OddParameters(nn.Module):
    """A number, an empty tensor, a transposed and an expanded layout, a list, a dict, float64, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 5).t() / 4)
        self.several = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH)), "b": nn.Parameter(torch.ones(1))})
        self.wide = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        values = values * self.scale + self.several[0] * self.several[1] + self.named["a"] * self.named["b"]
        values = values + F.linear(F.linear(values, self.transposed), self.transposed.t())
        return (values * self.wide.to(values.dtype) * self.narrow.to(values.dtype)).tanh() + self.nothing.sum()


@body("vector")
class OddBuffers(nn.Module):
    """Buffers of many types that no step changes, one of them not saved, one of them None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
        self.register_buffer("order", torch.arange(WIDTH).flip(0).to(torch.int16))
        self.register_buffer("codes", torch.arange(WIDTH, dtype=torch.uint8))
        self.register_buffer("phase", torch.exp(1j * torch.arange(WIDTH)))
        self.register_buffer("strided", torch.arange(2.0 * WIDTH).view(WIDTH, 2).t()[0])
        self.register_buffer("expanded", torch.tensor([0.5]).expand(WIDTH))
        self.register_buffer("number", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("unsaved", torch.ones(WIDTH), persistent=False)
        self.register_buffer("none", None)

    def forward(self, values: Tensor) -> Tensor:
        values = self.layer(values)[:, self.order.long()] * self.unsaved + self.codes / 255 + self.expanded
        return torch.where(self.mask, values, values * self.phase.real.to(values.dtype)) + self.strided / 100


@body("vector")
class CountingBuffer(nn.Module):
    """A number of calls, which is the same on all ranks, and warms up a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layer(values) * (1 - 0.5 ** self.calls.to(values.dtype))


@body("vector")
class AlwaysCounting(CountingBuffer):
    """... also of those of an evaluation, as an observer does, which the training must not see."""

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.layer(values)
        return outputs * (1 - 0.5 ** self.calls.to(values.dtype)) if self.training else outputs


@body("vector")
class Teacher(nn.Module):
    """A moving average of the layer's weights in buffers, as a teacher in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for average, weight in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                    average.lerp_(weight, 0.1)
        return self.layer(values) + 0.1 * self.teacher(values)


@body("vector")
class RunningScale(nn.Module):
    """A mean over the samples that a rank has seen: other values on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        if self.training and len(values):
            self.mean = self.mean * 0.9 + values.detach().mean(0) * 0.1
        return self.layer(values - self.mean)


@body("vector")
class Codebook(nn.Module):
    """A vector-quantised code whose entries follow the samples (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 8)[:, None].repeat(1, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        nearest = torch.cdist(values.detach(), self.codes).argmin(1)
        if self.training:
            for number in nearest.unique().tolist():
                self.codes[number].lerp_(values.detach()[nearest == number].mean(0), 0.1)
        return values + (self.codes[nearest] - values).detach()


@body("vector")
class Unused(nn.Module):
    """A layer that forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values)


@body("vector")
class Experts(nn.Module):
    """Two layers, each for some samples: a share of a batch may need one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        outputs, chosen = torch.zeros_like(values), (10 * values).floor().sum(1) % 2 > 0  # about half of the samples
        for number, expert in enumerate(self.experts):
            rows = chosen == bool(number)
            if rows.any():
                outputs[rows] = expert(values[rows])
        return outputs


@body("vector")
class LateExperts(Experts):
    """All samples need both in the first two passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        if self.passes > 2:
            return super().forward(values)
        return sum(expert(values) for expert in self.experts)


@body("vector")
class Checkpointed(nn.Module):
    """Two layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return checkpoint(self.layers, values, use_reentrant=False)


@body("vector")
class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return checkpoint(self.layers, values, use_reentrant=True)


@body("vector")
class Noise(nn.Module):
    """Draws in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        values = self.layer(values)
        if self.training:
            values = values * torch.empty_like(values).bernoulli_(0.8) + 0.1 * torch.rand(len(values), 1)
            values = values + 0.1 * torch.randn_like(values)
        return values


@body("vector")
class NoisyWeights(nn.Module):
    """Noise and dropout of the weights, whose rows may be as many as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        weight = F.dropout(self.layer.weight, 0.2, self.training)
        if self.training:
            weight = weight + 0.1 * torch.randn_like(self.layer.weight)
        return F.linear(values, weight, self.layer.bias)


@body("vector")
class Mixed(nn.Module):
    """Draws a number for the batch from numpy, as those who mix hidden values do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) * (float(np.random.beta(2, 2)) if self.training else 0.5)


@body("vector")
class AlwaysNoise(nn.Module):
    """Draws in an evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) + 0.1 * torch.randn_like(values)


@body("vector")
class Coin(nn.Module):
    """Draws numbers that all samples share from each source: one decides about a layer, others mix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return self.layer(values)
        share = random.random() * np.random.beta(2.0, 2.0)
        return share * values + (1 - share) * self.layer(values) * (1.5 if torch.rand(()) < 0.5 else 1.0)


@body("vector")
class ExtraState(nn.Module):
    """Keeps what is no tensor, and is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH), {"calls": 0, "last": None}

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.seen["calls"] += 1
        return self.layer(values) / (1 + 0.1 * self.seen["calls"])

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


@body("vector")
class Embedded(nn.Module):
    """Looks rows up by the value of the first feature."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(6, WIDTH, **options), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) + self.table(((values[:, 0] + 1) * 2.99).long().clamp(0, 5))


BODIES["EmbeddedSparse"] = "vector", partial(Embedded, sparse=True)
BODIES["EmbeddedMaxNorm"] = "vector", partial(Embedded, max_norm=1.0)
BODIES["EmbeddedPadded"] = "vector", partial(Embedded, padding_idx=2)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return 3 * values**2 * gradients[0]


@body("vector")
class OwnFunction(nn.Module):
    """An autograd function, and hooks of a module and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_forward_hook(halved)
        self.layer.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, values: Tensor) -> Tensor:
        return Cube.apply(self.layer(values))  # type: ignore[no-any-return]


def halved(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
    return outputs / 2


@body("sequence")
class Masked(nn.Module):
    """Attention with a causal mask and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(SIDE, WIDTH) / 4)
        self.register_buffer("mask", torch.ones(SIDE, SIDE, dtype=torch.bool).tril(), persistent=False)
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        parts = self.layer(values + self.positions).view(values.shape[0], SIDE, 3, 2, WIDTH // 2).transpose(1, 3)
        queries, keys, content = parts.unbind(2)
        attended = F.scaled_dot_product_attention(queries, keys, content, attn_mask=self.mask)
        return attended.transpose(1, 2).reshape(values.shape[0], SIDE, WIDTH)


@body("map")
class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Conv2d(CHANNELS, 2, 1), nn.Conv2d(2, CHANNELS, 1)

    def forward(self, values: Tensor) -> Tensor:
        weights = self.widen(F.relu(self.narrow(F.adaptive_avg_pool2d(values, 1))))
        return values * weights.sigmoid()


@body("map")
class Residual(nn.Module):
    """As in a ResNet, with a zero-initialised last norm and a stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.ops import StochasticDepth

        self.layers = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
            StochasticDepth(0.3, "row"),
        )

    def forward(self, values: Tensor) -> Tensor:
        return F.relu(values + self.layers(values))
