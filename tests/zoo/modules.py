"""The nets of the zoo: a stem, a body and a head. The bodies are what differs: each is one thing that people bring."""

import copy
import random
from collections import OrderedDict
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from lockstep.data.source import tensors_in
from support.models import attach

WIDTH = 12  # values of a vector, and of a place in a sequence
CHANNELS = 4
SIDE = 6  # an image, or map, is SIDE x SIDE; a sequence has SIDE places

BODIES = {}
"""{name: (what the body takes and gives, of FORMS, and what makes it)}."""

torch.manual_seed(7)  # as a file of somebody's may do when it is imported
np.random.seed(7)
random.seed(7)

FORMS = {  # shape of an image, first layer, values that the head gets
    "vector": ((SIDE * SIDE,), partial(nn.Linear, SIDE * SIDE, WIDTH), WIDTH),
    "sequence": ((SIDE, SIDE), partial(nn.Linear, SIDE, WIDTH), WIDTH * SIDE),
    "map": ((1, SIDE, SIDE), partial(nn.Conv2d, 1, CHANNELS, 3, padding=1), CHANNELS * SIDE * SIDE),
}


def net(body, shape, classes, places=1):
    """Samples (N, 1, 6, 6), in whatever holds them, -> (N, classes); with 36 places, for masks, (N, classes, 6, 6)."""
    form, make = BODIES[body]
    return nn.Sequential(OrderedDict(stem=Stem(form), body=make(), head=Head(form, classes, places)))


class Stem(nn.Module):
    """Takes the first tensor of the inputs, whatever holds it, in the weights' type."""

    def __init__(self, form):
        super().__init__()
        self.shape, make, _ = FORMS[form]
        self.layer = make()

    def forward(self, inputs):
        images = next(iter(tensors_in(inputs)))
        return torch.tanh(self.layer(images.reshape(images.shape[0], *self.shape).to(self.layer.weight.dtype)))


class Head(nn.Module):
    """Values of any form -> (N, classes), or (N, classes, 6, 6) with `places`=36."""

    def __init__(self, form, classes, places):
        super().__init__()
        self.shape = (classes,) if places == 1 else (classes, SIDE, SIDE)
        self.layer = nn.Linear(FORMS[form][2], classes * places)

    def forward(self, values):
        return self.layer(values.flatten(1)).unflatten(1, self.shape)


class Made(nn.Module):
    """A module with this forward pass. kept: see `attach`. init: called with it."""

    def __init__(self, forward, init, kept):
        super().__init__()
        self.computed = forward
        attach(self, kept)
        if init is not None:
            init(self)

    def forward(self, x):
        return self.computed(self, x)


def made(forward, init=None, **kept):
    return lambda: Made(forward, init, kept)


def keep_all(form, **bodies):
    BODIES.update({name: (form, make) for name, make in bodies.items()})


def linear(inputs=WIDTH, outputs=WIDTH):
    return nn.Linear(inputs, outputs)


def convolution(side=3, **options):
    return nn.Conv2d(CHANNELS, CHANNELS, side, padding=side // 2, **options)


def in_turn(*makes):
    return lambda: nn.Sequential(*(make() for make in makes))


def wrapped(wrap, make=linear):
    return lambda: wrap(make())


def parameter(make, *shape, **options):
    return lambda: nn.Parameter(make(*shape, **options))


def first(layer, *sizes, **options):
    """A recurrent layer without its last state."""
    return made(lambda self, x: self.layer(x)[0], layer=partial(layer, *sizes, batch_first=True, **options))


def attention(dropout):
    layer = partial(nn.MultiheadAttention, WIDTH, 2, dropout=dropout, batch_first=True)
    return made(lambda self, x: x + self.layer(x, x, x, need_weights=False)[0], layer=layer)


def embedded(**options):
    """Looks rows up by the value of the first feature."""
    table = partial(nn.Embedding, 6, WIDTH, **options)
    looked_up = lambda self, x: self.layer(x) + self.table(((x[:, 0] + 1) * 2.99).long().clamp(0, 5))  # noqa: E731
    return made(looked_up, table=table, layer=linear)


norm_2d = partial(nn.BatchNorm2d, CHANNELS)
encoder = partial(nn.TransformerEncoderLayer, WIDTH, 2, 16, batch_first=True)
blocks = in_turn(linear, nn.Tanh, linear)
dropped_blocks = in_turn(linear, nn.Tanh, partial(nn.Dropout, 0.3), linear)
experts = wrapped(nn.ModuleList, lambda: [linear(), linear()])

# Layers of torch.
keep_all(
    "vector",
    linear=linear,
    batch_norm_1d=partial(nn.BatchNorm1d, WIDTH),
    batch_norm_cumulative=partial(nn.BatchNorm1d, WIDTH, momentum=None),
    batch_norm_plain=partial(nn.BatchNorm1d, WIDTH, affine=False),
    layer_norm=partial(nn.LayerNorm, WIDTH),
    rms_norm=partial(nn.RMSNorm, WIDTH),
    bilinear=made(lambda self, x: 0.1 * self.layer(x, x), layer=partial(nn.Bilinear, WIDTH, WIDTH, WIDTH)),
    prelu=in_turn(linear, partial(nn.PReLU, WIDTH), linear),
    one_prelu=in_turn(linear, nn.PReLU, linear),
    in_place=in_turn(linear, partial(nn.ELU, inplace=True), linear, partial(nn.ReLU, inplace=True)),
    lazy_linear=in_turn(partial(nn.LazyLinear, WIDTH), nn.Tanh),
    lazy_batch_norm=in_turn(linear, nn.LazyBatchNorm1d),
    spectral_norm=wrapped(parametrizations.spectral_norm),
    old_spectral_norm=wrapped(nn.utils.spectral_norm),
    weight_norm=wrapped(parametrizations.weight_norm),
    orthogonal=wrapped(parametrizations.orthogonal),
    twice_the_same=wrapped(lambda layer: nn.Sequential(layer, layer)),
    dropout=in_turn(partial(nn.Dropout, 0.3), linear, partial(nn.AlphaDropout, 0.2)),
    scripted=wrapped(torch.jit.script, in_turn(linear, nn.Tanh)),
    frozen=in_turn(wrapped(lambda layer: layer.requires_grad_(False)), nn.Tanh, linear),
)
keep_all(
    "map",
    convolution=convolution,
    depthwise=partial(convolution, groups=CHANNELS),
    transposed=partial(nn.ConvTranspose2d, CHANNELS, CHANNELS, 3, padding=1),
    shortcut=in_turn(partial(convolution, 1, stride=2), partial(nn.Upsample, scale_factor=2)),
    batch_norm_2d=norm_2d,
    two_batch_norms=in_turn(norm_2d, nn.ReLU, norm_2d),
    group_norm=partial(nn.GroupNorm, 2, CHANNELS),
    instance_norm=partial(nn.InstanceNorm2d, CHANNELS, affine=True),
    running_instance_norm=partial(nn.InstanceNorm2d, CHANNELS, affine=True, track_running_stats=True),
    local_response_norm=in_turn(partial(convolution, 1), partial(nn.LocalResponseNorm, 2)),
    pooled=in_turn(partial(nn.MaxPool2d, 2), partial(nn.Upsample, scale_factor=2, mode="bilinear")),
    dropped_channels=in_turn(partial(convolution, 1), partial(nn.Dropout2d, 0.3)),
    standardised=wrapped(parametrizations.weight_norm, convolution),
)
keep_all(
    "sequence",
    lstm=first(nn.LSTM, WIDTH, WIDTH),
    deep_gru=first(nn.GRU, WIDTH, WIDTH // 2, num_layers=2, bidirectional=True),
    dropped_lstm=first(nn.LSTM, WIDTH, WIDTH, num_layers=2, dropout=0.3),
    attention=attention(0.0),
    dropped_attention=attention(0.3),
    encoder=partial(encoder, dropout=0.0),
    dropped_encoder=partial(encoder, dropout=0.2, norm_first=True),
)

# Forward passes of several lines.


def odd_parameters(self, x):
    """A number, an empty tensor, a transposed layout, a list, a dict, float64, bfloat16."""
    x = x * self.scale + self.several[0] * self.several[1] + self.named["a"] * self.named["b"]
    x = x + F.linear(F.linear(x, self.transposed), self.transposed.t())
    return (x * self.wide.to(x.dtype) * self.narrow.to(x.dtype)).tanh() + self.nothing.sum()


def odd_buffers(self, x):
    """Buffers of many types that no step changes, one of them not saved, one of them None."""
    x = self.layer(x)[:, self.order.long()] * self.unsaved + self.codes / 255 + self.expanded
    return torch.where(self.mask, x, x * self.phase.real.to(x.dtype)) + self.strided / 100


def counting(self, x, always=False):
    """A number of calls, which is the same on all ranks, warms up a scale. always: those of an evaluation count, too,
    as an observer has it, which the training must not see."""
    self.calls += self.training or always
    return self.layer(x) * (1 - 0.5 ** self.calls.to(x.dtype)) if self.training or not always else self.layer(x)


def taught(self, x):
    """A moving average of the layer's weights, as a teacher in self-distillation."""
    if self.training:
        with torch.no_grad():
            for average, weight in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                average.lerp_(weight, 0.1)
    return self.layer(x) + 0.1 * self.teacher(x)


def running_scale(self, x):
    """A mean over the samples that a rank has seen: other values on other ranks."""
    if self.training and len(x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
    return self.layer(x - self.mean)


def quantised(self, x):
    """A vector-quantised code whose entries follow the samples (van den Oord et al. 2017)."""
    nearest = torch.cdist(x.detach(), self.codes).argmin(1)
    if self.training:
        for number in nearest.unique().tolist():
            self.codes[number].lerp_(x.detach()[nearest == number].mean(0), 0.1)
    return x + (self.codes[nearest] - x).detach()


def by_experts(self, x):
    """Two layers, each for about half of the samples: a share of a batch may need one alone. After two passes, if they
    are counted."""
    if self.training:
        self.passes = self.passes + 1
    if self.passes <= 2:
        return self.experts[0](x) + self.experts[1](x)
    outputs, chosen = torch.zeros_like(x), (10 * x).floor().sum(1) % 2 > 0
    for number, expert in enumerate(self.experts):
        rows = chosen == bool(number)
        if rows.any():
            outputs[rows] = expert(x[rows])
    return outputs


def noisy(self, x):
    """Draws in several ways."""
    x = self.layer(x)
    if self.training:
        x = x * torch.empty_like(x).bernoulli_(0.8) + 0.1 * torch.rand(len(x), 1) + 0.1 * torch.randn_like(x)
    return x


def noisy_weights(self, x):
    """Noise and dropout of the weights, whose rows may be as many as samples."""
    weight = F.dropout(self.layer.weight, 0.2, self.training)
    if self.training:
        weight = weight + 0.1 * torch.randn_like(self.layer.weight)
    return F.linear(x, weight, self.layer.bias)


def coin(self, x):
    """Draws numbers that all samples share from each source: one decides about a layer, others mix."""
    if not self.training:
        return self.layer(x)
    share = random.random() * np.random.beta(2.0, 2.0)
    return share * x + (1 - share) * self.layer(x) * (1.5 if torch.rand(()) < 0.5 else 1.0)


class ExtraState(nn.Module):
    """Keeps what is no tensor, and is saved."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH), {"calls": 0, "last": None}

    def forward(self, x):
        self.seen["calls"] += self.training
        return self.layer(x) / (1 + 0.1 * self.seen["calls"])

    def get_extra_state(self):
        return dict(self.seen)

    def set_extra_state(self, state):
        self.seen = dict(state)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    def backward(ctx, *gradients):
        (values,) = ctx.saved_tensors
        return 3 * values**2 * gradients[0]


def hooked(self):
    self.layer.register_forward_hook(lambda module, inputs, outputs: outputs / 2)
    self.layer.weight.register_hook(lambda gradient: gradient * 0.5)


def masked_attention(self, x):
    """With a causal mask and learned positions."""
    parts = self.layer(x + self.positions).view(x.shape[0], SIDE, 3, 2, WIDTH // 2).transpose(1, 3)
    queries, keys, content = parts.unbind(2)
    attended = F.scaled_dot_product_attention(queries, keys, content, attn_mask=self.mask)
    return attended.transpose(1, 2).reshape(x.shape[0], SIDE, WIDTH)


keep_all(
    "vector",
    Tied=made(
        lambda self, x: self.up(torch.tanh(self.down(x))),
        lambda self: setattr(self.up, "weight", self.down.weight),
        down=linear,
        up=linear,
    ),
    TiedTransposed=made(
        lambda self, x: F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t()),
        encoder=partial(linear, WIDTH, 8),
    ),
    Complex=made(
        lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH),
        filter=parameter(torch.randn, WIDTH // 2 + 1, dtype=torch.complex64),
    ),
    OddParameters=made(
        odd_parameters,
        scale=parameter(torch.tensor, 1.5),
        nothing=parameter(torch.empty, 0, 3),
        transposed=lambda: nn.Parameter(torch.randn(WIDTH, 5).t() / 4),
        several=lambda: nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)]),
        named=lambda: nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH)), "b": nn.Parameter(torch.ones(1))}),
        wide=parameter(torch.ones, WIDTH, dtype=torch.float64),
        narrow=lambda: nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16), requires_grad=False),
    ),
    OddBuffers=made(
        odd_buffers,
        lambda self: (self.register_buffer("unsaved", torch.ones(WIDTH), False), self.register_buffer("none", None)),
        layer=linear,
        mask=lambda: torch.arange(WIDTH) % 2 == 0,
        order=lambda: torch.arange(WIDTH).flip(0).to(torch.int16),
        codes=lambda: torch.arange(WIDTH, dtype=torch.uint8),
        phase=lambda: torch.exp(1j * torch.arange(WIDTH)),
        strided=lambda: torch.arange(2.0 * WIDTH).view(WIDTH, 2).t()[0],
        expanded=lambda: torch.tensor([0.5]).expand(WIDTH),
        number=lambda: torch.tensor(7),
        nothing=lambda: torch.empty(0),
    ),
    CountingBuffer=made(counting, layer=linear, calls=lambda: torch.tensor(0)),
    AlwaysCounting=made(partial(counting, always=True), layer=linear, calls=lambda: torch.tensor(0)),
    Teacher=made(
        taught, lambda self: setattr(self, "teacher", copy.deepcopy(self.layer).requires_grad_(False)), layer=linear
    ),
    RunningScale=made(running_scale, layer=linear, mean=partial(torch.zeros, WIDTH)),
    Codebook=made(quantised, codes=lambda: torch.linspace(-1, 1, 8)[:, None].repeat(1, WIDTH)),
    Unused=made(lambda self, x: self.layer(x), layer=linear, unused=linear),
    Experts=made(by_experts, experts=experts, passes=lambda: 3),
    LateExperts=made(by_experts, experts=experts, passes=lambda: torch.tensor(0)),
    Checkpointed=made(lambda self, x: checkpoint(self.layers, x, use_reentrant=False), layers=dropped_blocks),
    Reentrant=made(lambda self, x: checkpoint(self.layers, x, use_reentrant=True), layers=blocks),
    Noise=made(noisy, layer=linear),
    NoisyWeights=made(noisy_weights, layer=linear),
    # A number for the batch from numpy, as those who mix hidden values do.
    Mixed=made(lambda self, x: self.layer(x) * (float(np.random.beta(2, 2)) if self.training else 0.5), layer=linear),
    AlwaysNoise=made(lambda self, x: self.layer(x) + 0.1 * torch.randn_like(x), layer=linear),
    Coin=made(coin, layer=linear),
    ExtraState=ExtraState,
    Embedded=embedded(),
    EmbeddedSparse=embedded(sparse=True),
    EmbeddedMaxNorm=embedded(max_norm=1.0),
    EmbeddedPadded=embedded(padding_idx=2),
    OwnFunction=made(lambda self, x: Cube.apply(self.layer(x)), hooked, layer=linear),
)
keep_all(
    "sequence",
    Masked=made(
        masked_attention,
        lambda self: self.register_buffer("mask", torch.ones(SIDE, SIDE, dtype=torch.bool).tril(), persistent=False),
        positions=lambda: nn.Parameter(torch.randn(SIDE, WIDTH) / 4),
        layer=partial(linear, WIDTH, 3 * WIDTH),
    ),
)
keep_all(
    "map",
    SqueezeExcite=made(
        lambda self, x: x * self.widen(F.relu(self.narrow(F.adaptive_avg_pool2d(x, 1)))).sigmoid(),
        narrow=partial(nn.Conv2d, CHANNELS, 2, 1),
        widen=partial(nn.Conv2d, 2, CHANNELS, 1),
    ),
    Residual=made(
        lambda self, x: F.relu(x + self.layers(x)),
        layers=in_turn(partial(convolution, bias=False), norm_2d, partial(StochasticDepth, 0.3, "row")),
    ),
)
