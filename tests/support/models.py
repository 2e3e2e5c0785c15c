"""Models and data sets of a user, which are not part of this project."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data import Tensors
from lockstep.tasks.tasks import CrossEntropy


def attach(module, parts):
    """Give a module attributes: {name: what makes its value}. Tensors become buffers."""
    for name, make in parts.items():
        value = make()
        is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        module.register_buffer(name, value) if is_buffer else setattr(module, name, value)


class ByLoss(CrossEntropy):
    monitor = "loss"


class LargestLoss(ByLoss):
    """The best weights are the first ones."""

    def __init__(self):
        super().__init__()
        self.better = self.better | {"loss": "max"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Tokens (N, length) int64 -> logits (N, vocabulary) of the next token. The head shares the embedding's weight."""

    def __init__(self, vocabulary, width, depth, length):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1]))


def tokens(samples, vocabulary, length, train):
    """Random tokens (samples, length) int64; the next one is the first one again."""
    rows = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(int(train)))
    return Tensors(rows, rows[:, 0].clone())


class WithConstants(nn.Module):
    """A linear layer, buffers that no step changes, a counter of samples, and weights that nothing uses."""

    LARGE = 2**24 + 1  # float32 cannot hold it

    def __init__(self, shape, classes):
        super().__init__()
        self.layer, self.unused = nn.Linear(shape[0], classes), nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.full((2, 2), torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("infinite", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("thirds", torch.arange(100) / 3)
        self.register_buffer("large", torch.tensor([self.LARGE]))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs):
        if self.training:
            self.seen += len(inputs)
        return self.layer(inputs)

    def assert_constant(self, saved):
        """Fail unless what no step changes has, in a run's model.pt, the bits that the model began with."""
        for name in ("mask", "infinite", "thirds", "large", "unused"):
            assert torch.equal(saved[name], self.state_dict()[name]), name


class OddParameters(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.lists = nn.ModuleList([nn.ParameterList([torch.eye(shape[0]) + 0.1, torch.ones(6, shape[0]).t() / 9])])
        self.last = nn.Linear(6, classes)

    def forward(self, inputs):
        first, second = self.lists[0]
        return self.last((inputs @ first @ second).relu())


class Viewing(nn.Module):
    """`view(len(x), -1)`, as many models have it, cannot be computed for no samples. norms: how many it has."""

    def __init__(self, shape, classes, norms=2):
        super().__init__()
        self.conv, self.norm2d = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norms else nn.Identity()
        self.fc1, self.norm1d = nn.Linear(144, 12), nn.BatchNorm1d(12) if norms > 1 else nn.Identity()
        self.fc2 = nn.Linear(12, classes)

    def forward(self, images):
        features = self.norm2d(self.conv(images)).relu()
        rows = features.view(len(features), -1)
        return self.fc2(self.norm1d(self.fc1(rows)).relu())


class Recurrent(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.second = (nn.LSTM(shape[0] // 4, shape[0] // 4, batch_first=True) for _ in range(2))
        self.last = nn.Linear(shape[0] // 4, classes)

    def forward(self, inputs):
        outputs, state = self.first(inputs.unflatten(1, (4, -1)), None)
        outputs, _ = self.second(outputs, state)
        return self.last(input=outputs[:, -1])


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factors", torch.full((1,), 2.0), persistent=False)

    def forward(self, inputs):
        return inputs * self.factors


def scaled_layers(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 16), Scale(), nn.Linear(16, classes))


def lazy_layers(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(classes))


class Drawing(nn.Module):
    """It draws for samples and for a whole batch, and with `late` only after 3 steps."""

    def __init__(self, shape, classes, late=False):
        super().__init__()
        self.layer, self.head, self.late = nn.Linear(math.prod(shape), 16), nn.Linear(16, classes), late
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, images):
        hidden = self.layer(images.flatten(1))
        if self.training and not self.late:
            hidden = F.leaky_relu(hidden) * torch.distributions.Beta(2.0, 2.0).sample()
            hidden = hidden + torch.normal(0.0, 0.1, size=hidden.shape, dtype=hidden.dtype)
        if self.training and self.late:
            self.steps += 1
            hidden = F.dropout(hidden, 0.3) if self.steps > 3 else hidden
        return self.head(hidden)


class Langevin(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics (Welling and Teh 2011): each step adds noise to the weights."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.001)


class CountingSGD(torch.optim.SGD):
    """Keeps the number of its steps, and a function, in its groups."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group |= {"steps": 0, "next": lambda steps: steps + 1}

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group["next"](group["steps"])
        return super().step(closure)


def of_any_size(shape, classes):
    channels = [shape[0], 8, 8, 8]
    blocks = [nn.Sequential(nn.Conv2d(*ends, 3, padding=1), nn.GELU()) for ends in pairwise(channels)]
    return nn.Sequential(*blocks, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, classes))


class Versioned(nn.Linear):
    def get_extra_state(self):
        return {"version": [1, 2]}

    def set_extra_state(self, state):
        assert state == {"version": [1, 2]}


class OddTensors(nn.Module):
    """A linear layer, and parameters and buffers of every type and layout. A step moves most of the buffers."""

    TYPES = ("bool", "int16", "uint16", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn")

    def __init__(self, shape, classes, trains_all=True):
        """trains_all: False trains the parameters of float32 only."""
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), classes)
        self.empty = nn.Parameter(torch.empty(0)) if trains_all else None
        self.filter = nn.Parameter(torch.polar(torch.ones(classes), torch.linspace(0, 1, classes)), trains_all)
        self.gain = nn.Parameter(torch.full((classes,), 1 / 3, dtype=torch.float64), trains_all)
        self.shift = nn.Parameter(torch.full((classes,), 1 / 3, dtype=torch.bfloat16), trains_all)
        self.codes = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
        self.coarse = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        for name in self.TYPES:
            self.register_buffer(f"of_{name}", torch.ones(5).to(getattr(torch, name)))
        table = torch.arange(10.0).view(5, 2)
        self.register_buffer("column", table[:, 0])
        self.register_buffer("other_column", table[:, 1])
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).T)
        self.register_buffer("expanded", torch.ones(1).expand(5))
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("direction", torch.ones(2) / 2**0.5)
        self.register_buffer("running_mean", torch.zeros(()))

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                seen = inputs.mean()
                for name in (*(f"of_{name}" for name in self.TYPES[1:]), "column", "other_column", "transposed"):
                    buffer = getattr(self, name)
                    buffer.copy_((seen * torch.arange(1, buffer.numel() + 1)).view(buffer.shape) * 8)
                angle = 100 * seen
                self.direction = torch.stack([angle.cos(), angle.sin()]).float()  # another tensor in its place
                self.running_mean.lerp_(seen.float(), 0.5)
        rows = torch.view_as_real(self.layer(inputs.flatten(1)) * self.filter).sum(-1)
        outputs = (rows * self.gain + self.shift).to(inputs.dtype)
        return outputs if self.empty is None else outputs + self.empty.sum()


class MadeInForward(nn.Module):
    """Makes a buffer in its first forward pass, enlarges another, and keeps what it counts in its extra state."""

    def __init__(self, shape, classes, extra="set"):
        super().__init__()
        self.layer, self.seen, self.extra = nn.Linear(math.prod(shape), classes), 0, extra
        self.register_buffer("cache", None)
        self.register_buffer("bank", torch.zeros(0, classes))

    def forward(self, inputs):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.full((inputs[0].numel(),), 0.5))
        if self.cache is None:
            self.cache = torch.ones(())
        outputs = self.layer(inputs.flatten(1) * self.mask + self.cache + self.seen / 100)
        if self.training:
            self.seen += 1
            self.bank = torch.cat([self.bank, outputs.detach().mean(0, keepdim=True)])
        return outputs

    def get_extra_state(self):
        return {"seen": {self.seen, -1} if self.extra == "set" else str(self.seen).encode()}

    def set_extra_state(self, state):
        self.seen = max(state["seen"]) if self.extra == "set" else int(state["seen"])


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 8, sparse=sparse), nn.Linear(8, 10)

    def forward(self, inputs):
        return self.head(self.embedding((inputs.flatten(1) * 16).long().clamp(0, 16)).mean(1))
