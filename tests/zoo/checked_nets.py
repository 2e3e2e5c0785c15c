"""Nets of points (4,) that mode=check shall name, or leave alone, and losses, data and optimizers of the same kind.

`WRONG` has the row of the table that names each, and words of its reason; `RIGHT` those in which no row says no.
"""

import random
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.tasks.tasks import CrossEntropy
from support.commands import ema
from support.own_data import Noisy, Points


class Simple(nn.Module):
    """A linear layer. `before` and `after` are what others add to it."""

    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def before(self, x):
        return x

    def after(self, y):
        return y

    def forward(self, x):
        return self.after(self.layer(self.before(x)))


def net(name, init=None, width=4, of=Simple, kept=None, **methods):
    """A subclass of `Simple`, found here by its name. init: called with it. kept: {name: what makes an attribute}, of
    which tensors are buffers."""

    def construct(self, *args):
        of.__init__(self, *([width] if of is Simple else args))
        for key, make in (kept or {}).items():
            value = make()
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            self.register_buffer(key, value) if is_buffer else setattr(self, key, value)
        if init is not None:
            init(self)

    globals()[name] = type(name, (of,), {"__init__": construct, "__module__": __name__, **methods})
    return globals()[name]


def layers(name, *make):
    """A sequence of layers, found here by its name."""

    def construct(self):
        nn.Sequential.__init__(self, *(one() for one in make))

    globals()[name] = type(name, (nn.Sequential,), {"__init__": construct, "__module__": __name__})
    return globals()[name]


def linear(inputs, outputs):
    return lambda: nn.Linear(inputs, outputs)


def running(name, follow):
    """A mean of what has passed in the training, in a buffer."""

    def before(self, x):
        out = x - self.mean
        if self.training:
            follow(self, x.mean(0))
        return out

    return net(name, before=before, kept={"mean": lambda: torch.zeros(4)})


def normalised(self, y):
    """The gradient of the outputs has the norm 1."""
    if y.requires_grad:
        y = y * 1.0
        y.register_hook(lambda gradient: gradient / gradient.norm())
    return y


def grown(self, x):
    self.bank = torch.cat([self.bank, x.detach()]) if self.training else self.bank
    return x


def queued(self, x):
    out = x + 0.1 * self.queue.mean(0)
    if self.training:
        self.queue = torch.cat([self.queue, x.detach()])[-6:]
    return out


def counted_codes(self, x):
    """Counts the samples near each of two codes, and does not read it."""
    self.sizes.lerp_(F.one_hot((x[:, 0] > 0).long(), 2).sum(0).to(self.sizes), 0.5)
    return x


def moved_codes(self, x):
    """Codes in a frozen weight, which a forward pass moves."""
    self.codes.data.lerp_(x.detach().mean(0), 0.1)
    return x - self.codes


def counting(self, y):
    self.calls += self.training
    return y / (1 + self.calls)


def remembering(self, y):
    """What the weights were in the last step, in an attribute that it replaces: the same on all ranks."""
    out = y * (1 + self.last[0])
    if self.training:
        self.last = [self.layer.weight.detach().mean()]
    return out


def cached(self, x):
    """What the weights were in the first step."""
    self.first = self.layer.weight.detach().clone() if self.first is None else self.first
    return x + self.first.mean()


def counted_by_a_hook(self):
    calls: list[int] = []

    def hook(module, inputs, outputs):
        calls.extend([1] * module.training)
        return outputs / (1 + len(calls))

    self.layer.register_forward_hook(hook)


def following(self, x):
    """Follows an evaluation alone, so that ranks and steps agree."""
    self.mean = self.mean if self.training else 0.5
    return x if self.mean is None else x - self.mean


class Folding(Simple):
    """Folds an adapter into a frozen weight while it does not train."""

    folded = False

    def __init__(self):
        super().__init__()
        self.layer.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.zeros(2, 1))

    def train(self, mode=True):
        super().train(mode)
        if mode == self.folded:
            self.layer.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.folded = not mode
        return self

    def forward(self, x):
        return self.layer(x) if self.folded else self.layer(x) + x @ self.down.T @ self.up.T


class Teacher(Simple):
    """A frozen layer that follows a trained one, and does not train."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 2).requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x) + 0.1 * self.teacher(x)


def replaced_counter(self, y):
    self.calls = self.calls + self.training
    return y / (1 + self.calls)


def looked_up(self, x):
    self.calls = self.calls + self.training
    return x * self.calls + self.table((x[:, 0] > 0).long())


def late(self, x):
    """Registers a buffer in its first step. One that is called `first` goes."""
    if hasattr(self, "first"):
        del self.first
    if not hasattr(self, "mask"):
        self.register_buffer("mask", torch.ones(4, dtype=x.dtype))
    return x * self.mask


def unsaved(name, value):
    return lambda self: self.register_buffer(name, value.clone(), persistent=False)


def drawn_by_numpy(self):
    self.layer.weight.data += torch.from_numpy(np.random.default_rng().standard_normal((2, 4))).float()


def with_other_names(self):
    """Its state dict has other names than its parameters."""

    def renamed(state, prefix, before, after):
        for name in ("weight", "bias"):
            state[f"{prefix}{after}{name}"] = state.pop(f"{prefix}{before}{name}")

    self.register_state_dict_post_hook(lambda module, state, prefix, *_: renamed(state, prefix, "layer.", "head_"))
    self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: renamed(state, prefix, "head_", "layer."))


# Data, tasks and optimizers that are wrong.


class OwnGenerator(Points):
    """Noise that no seed of a run reaches."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point + self.generator.random(), label


class InPlace(Points):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point.mul_(0.9), label


class Keeping(Noisy):
    def __init__(self):
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class Unseeded(Points):
    def __init__(self):
        super().__init__()
        self.points = torch.from_numpy(np.random.default_rng().standard_normal((23, 4)))


BATCHES: list[int] = []


def collate(samples):
    """Counts the batches that it has made."""
    BATCHES.append(len(samples))
    points, labels = torch.stack([point for point, _ in samples]), torch.tensor([label for _, label in samples])
    return points / len(BATCHES), labels


class WeighedByBatch(CrossEntropy):
    """A class-weighted mean times the number of samples, in which a sample counts by the others of its batch."""

    def __call__(self, outputs, targets):
        weight = torch.tensor([0.2, 3.0]).to(outputs)
        losses = F.cross_entropy(outputs, targets, weight=weight, reduction="none")
        return super().__call__(outputs, targets) | {"loss": losses * len(targets) / weight[targets].sum()}


class Memory(CrossEntropy):
    """Divides by what the steps before have left, in an attribute; the same on all ranks."""

    calls = 0

    def __call__(self, outputs, targets):
        found = super().__call__(outputs, targets)
        self.calls += torch.is_grad_enabled()
        return found | {"loss": found["loss"] / (1 + self.calls)}


class DrawnLoss(CrossEntropy):
    """One number for all samples."""

    def __call__(self, outputs, targets):
        found = super().__call__(outputs, targets)
        return found | {"loss": found["loss"] * (1 + np.random.rand())}


class Outside(torch.optim.Optimizer):
    """Keeps its velocity outside self.state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.velocity: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.velocity.setdefault(p, torch.zeros_like(p))
                p.sub_(velocity.mul_(0.9).add_(p.grad), alpha=group["lr"])


PIPELINE = ["strategy=pipeline", "strategy.micro_batches=2"]
TASK, OPTIMIZER = f"task._target_={__name__}.", f"optimizer._target_={__name__}."
COLLATE = f"loader.collate_fn={{_target_:{__name__}.collate}}"
TEXT = ["dataset=text", f"dataset.path={Path(__file__)}", "dataset.block=16", f"dataset.tokens_dir={gettempdir()}"]
TEXT += ["model=gpt", "model.layers=2", "model.width=16", "trainer.batch_size=8", "loader.validation=0.1"]
PLAIN = ["optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.fused=false"]  # for sparse gradients
UNUSED, TWICE = "strategy.find_unused_parameters=true", "trainer.gradient_accumulation_steps=2"
ENDS = "its run ends with an error"
SHARE, KEEPS = "depends on a rank's share", "keeps what no snapshot has"
BY_BATCH_NORM = layers("BatchNormed", linear(4, 3), lambda: nn.BatchNorm1d(3), linear(3, 2))
LAYER_NORM = layers("LayerNormed", linear(4, 6), lambda: nn.LayerNorm(6), nn.GELU, linear(6, 2))
DROPPED = layers("Dropped", linear(4, 8), lambda: nn.Dropout(0.5), linear(8, 8), linear(8, 2))
ACTIVATED = layers("Activated", linear(4, 8), nn.PReLU, linear(8, 2))
SPARE = net("Spare", kept={"spare": linear(2, 2)})
TABLE = net("Table", before=looked_up, kept={"table": lambda: nn.Embedding(2, 4), "calls": lambda: torch.zeros(())})
LATE = net("LateBuffer", before=late)
MIXES = net("Mixes", before=lambda self, x: 0.7 * x + 0.3 * x.roll(1, 0) if self.training else x)
FROZEN = lambda: nn.Parameter(torch.zeros(4), requires_grad=False)  # noqa: E731
FLAG = {"calls": lambda: torch.zeros(())}
HEAD = {"spare": linear(4, 2)}
EXPERT = net("Expert", kept=HEAD, forward=lambda self, x: self.layer(x) + (0 * self.spare(x) if len(x) > 10 else 0))
CUT_OFF = net("CutOff", kept=HEAD, forward=lambda self, x: self.layer(x) + self.spare(x).detach())
NUMBERS = {"numbers": lambda: np.random.default_rng(0)}
OWN_NUMBERS = net("OwnNumbers", before=lambda self, x: x * float(self.numbers.random()), kept=NUMBERS)
LIST = {"hidden": lambda: [nn.Linear(4, 4, dtype=torch.float64)]}
LISTED = net("Listed", before=lambda self, x: self.hidden[0](x), kept=LIST)
BOTH = {"first": linear(4, 4), "second": linear(4, 4)}
TIED = net("Tied", lambda self: setattr(self.second, "weight", self.first.weight), of=net("Both", kept=BOTH))
TIED.before = lambda self, x: self.second(self.first(x).tanh())
CELL = {"cell": lambda: nn.GRU(1, 5, batch_first=True)}
RECURRENT = net("Recurrent", width=5, before=lambda self, x: self.cell(x.unsqueeze(2))[0][:, -1], kept=CELL)
LAYER_DROPPED = net("LayerDropped", kept={"hidden": linear(4, 4)})  # all ranks toss the same coin
LAYER_DROPPED.before = lambda self, x: x + self.hidden(x) * (not (self.training and np.random.rand() < 0.3))
SCALES = {"scales": lambda: {"inputs": nn.Parameter(torch.ones(4, dtype=torch.float64))}}
LOOSE = net("Loose", before=lambda self, x: x * self.scales["inputs"], kept=SCALES)
DROPS_PATHS = net("DropsPaths")  # a draw for each sample
DROPS_PATHS.before = lambda self, x: x * ((torch.rand(len(x), 1, dtype=x.dtype) < 0.7) if self.training else 1)
ATTENTION = {"attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True), "up": linear(1, 4)}
ATTENDS = net("Attends", kept=ATTENTION)
ATTENDS.before = lambda self, x: self.attention(*[self.up(x.unsqueeze(2))] * 3, need_weights=False)[0].mean(1)
# A buffer that no snapshot has, and a mask for each size.
CONSTANT = net("Constant", unsaved("scale", torch.linspace(1, 2, 4)), kept={"masks": dict})
CONSTANT.before = lambda self, x: x * self.scale * self.masks.setdefault(len(x), torch.ones(4, dtype=x.dtype))
COMPLEX = net("Complex", kept={"filter": lambda: nn.Parameter(torch.ones(3, dtype=torch.complex128))})
COMPLEX.before = lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)
CLAMPED = net("Clamped", lambda self: self.layer.weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01)))
SPARSE = net("SparseTable", lambda self: setattr(self.table, "sparse", True), of=TABLE)  # several ranks refuse it
NUMPY_NOISE = net("NumpyNoise", before=lambda self, x: x * torch.from_numpy(np.random.rand(len(x), 1)))
EVALUATED = net("InEvaluation", after=lambda self, y: y if self.training else y * float(np.random.rand()))
COIN = net("Coin", before=lambda self, x: x * (np.random.rand() + random.random()) if self.training else x)
# An animal: what it is, its words, and of a wrong one the row and a part of the reason.
WRONG = [
    (net("Centred", after=lambda self, y: y - 0.5 * y.mean(0)), [], "two", "layers,"),
    (net("Scaled", before=lambda self, x: x / x.abs().max()), [], "two", "layers,"),
    (net("OverBatch", after=lambda self, y: y.softmax(0)), [], "two", f"model (OverBatch): it {SHARE}"),
    (MIXES, [], "two", f"layer (Linear): it {SHARE}"),
    (net("BySize", after=lambda self, y: y * len(y) / 10), [], "two", "layers,"),
    (
        net("Clamped", lambda self: self.layer.weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01))),
        [],
        "two",
        "gradients,",
    ),
    (net("Normalised", after=normalised), [], "two", "gradients,"),
    (running("Running", lambda self, mean: self.mean.lerp_(mean, 0.1)), [], "two", f"mean: it {SHARE}"),
    (net("Queue", before=queued, kept={"queue": lambda: torch.zeros(6, 4)}), [], "two", f"queue: it {SHARE}"),
    (net("Grows", before=grown, kept={"bank": lambda: torch.zeros(0, 4)}), [], "two", "bank has other sizes on other"),
    (net("Codebook", before=counted_codes, kept={"sizes": lambda: torch.zeros(2)}), [], "two", "weights,"),
    (net("FrozenCodes", before=moved_codes, kept={"codes": FROZEN}), [], "two", "layer (Linear)", ENDS),
    (net("Annealed", after=counting, calls=0), [], "resumed", KEEPS),
    (net("Unsaved", unsaved("calls", torch.zeros(())), after=counting), [], "resumed", "model (Unsaved): the model"),
    (net("Remembers", after=remembering, last=[0]), [], "resumed", KEEPS),
    (net("Clock", before=lambda self, x: x * (1 + time.time_ns() % 1000 / 1e5)), [], "again", "asks the clock"),
    (net("Entropy", before=lambda self, x: x * (1 + random.SystemRandom().random())), [], "again", "asks the clock"),
    (net("OwnWeights", drawn_by_numpy), [], "again", "start,"),
    (OWN_NUMBERS, [], "resumed", KEEPS),
    (LISTED, [], "learns", "no optimizer has"),
    (CUT_OFF, [], "learns", "spare.weight, spare.bias: no gradient"),
    (net("NoiseOfAll", before=lambda self, x: x * torch.rand(4, dtype=x.dtype)), [], "two", "layer (Linear)"),
    (NUMPY_NOISE, [], "two", "layer (Linear)"),
    (BY_BATCH_NORM, ["sync_bn=off"], "two", "1 (BatchNorm1d)"),
    # Writes that do not raise the version of a tensor.
    (running("ByData", lambda self, mean: self.mean.data.lerp_(mean, 0.1)), [], "two", "mean: "),
    (running("ByNumpy", lambda self, mean: np.add(self.mean, 0.1 * mean, out=self.mean.numpy())), [], "two", "mean: "),
    (running("ByForeach", lambda self, m: torch._foreach_lerp_([self.mean.data], [m], 0.1)), [], "two", "mean: "),
    (net("Cached", before=cached, first=None), [], "resumed", KEEPS),
    (net("ByCallback", counted_by_a_hook), [], "resumed", KEEPS),
    (net("Follows", before=following, mean=None), [], "again", "an evaluation changes"),
    (LOOSE, [], "learns", "no optimizer has the weight of shape [4]"),
    (SPARE, [], "learns", "spare.weight, spare.bias: no gradient"),
    (SPARE, [], "two", "type strategy.find_unused_parameters=true", ENDS),
    (Simple, [OwnGenerator], "two", "samples,"),
    (Simple, [OwnGenerator], "resumed", "samples,"),
    (Simple, [InPlace], "resumed", "samples,"),
    (Simple, [Keeping], "resumed", "samples,"),
    (Simple, [Unseeded], "again", "samples,"),
    (Simple, [Unseeded], "two", "data", ENDS),
    (Simple, [COLLATE], "resumed", "samples,"),
    (Simple, [f"{TASK}WeighedByBatch"], "two", "loss,", ENDS),
    (Simple, [f"{TASK}DrawnLoss"], "two", "evaluation,"),  # an evaluation draws for a rank
    (Simple, [f"{TASK}Memory"], "resumed", KEEPS),
    (Simple, [f"{OPTIMIZER}Outside", "optimizer.lr=0.05"], "resumed", "weights,"),
    (Simple, ["gradient_sync=powersgd"], "two", "type gradient_sync=auto"),
    (Simple, ["trainer.batch_size_per_rank=7"], "two", "type trainer.batch_size=<of all ranks>"),
    (EXPERT, [], "two", "type strategy.find_unused_parameters=true", ENDS),
    (SPARSE, PLAIN, "two", "make it with sparse=False", ENDS),
    (BY_BATCH_NORM, PIPELINE, "two", "strategy=ddp"),
    (DROPPED, PIPELINE, "two", "strategy=ddp"),
    (MIXES, [TWICE], "cut", "type trainer.gradient_accumulation_steps=1"),
    (EVALUATED, [], "two", "evaluation, "),
    (net("Renamed", before=late, kept={"first": lambda: torch.ones(4)}), [], "resumed", "", ENDS),
    (Simple, ["loader.collate_fn={_target_:support.own_data.mixed}"], "two", "samples,"),
    (DROPPED, ["trainer.compile=true"], "compiled", "type trainer.compile=false"),
]
RIGHT = [
    (LAYER_NORM, []),
    (layers("GroupNormed", linear(4, 6), lambda: nn.GroupNorm(2, 6), nn.SiLU, linear(6, 2)), ["optimizer=adamw"]),
    (net("Dropping", after=lambda self, y: F.dropout(y, 0.3, self.training)), ["optimizer=adamw", ema(0.9)]),
    (BY_BATCH_NORM, [ema(0.9)]),  # its first bias has a gradient of rounding alone
    (TIED, []),
    (Teacher, []),
    (RECURRENT, []),
    (LAYER_DROPPED, []),
    (net("Counts", after=replaced_counter, kept=FLAG), ["optimizer.fused=false"]),
    (Simple, [Noisy]),
    (BY_BATCH_NORM, ["optimizer=adamw"]),
    (DROPS_PATHS, []),
    (Folding, []),
    # Its buffers follow the weight in each forward pass.
    (net("SpectralNormed", lambda self: nn.utils.parametrizations.spectral_norm(self.layer)), []),
    (net("WeightNormed", lambda self: nn.utils.parametrizations.weight_norm(self.layer)), []),
    (ATTENDS, []),
    (net("Adapted", of=Folding, train=nn.Module.train), []),  # `down` has no gradient in the first step
    (CONSTANT, []),
    (net("InFloat32", after=lambda self, y: y.float().log_softmax(1).to(y.dtype)), []),
    (net("Vmapped", forward=lambda self, x: torch.func.vmap(self.layer)(x)), []),
    (ACTIVATED, ["optimizer=muon"]),
    (COMPLEX, []),
    (LATE, []),
    (Simple, [TWICE]),
    (SPARE, [UNUSED]),
    (COIN, [TWICE]),
    (TABLE, []),
    (net("OtherNames", with_other_names), []),
    (LAYER_NORM, ["strategy=fsdp", TWICE]),
    (ACTIVATED, ["strategy=tensor_parallel", "strategy.parallelize_plan=[{0:colwise},{2:rowwise}]"]),
    (BY_BATCH_NORM, ["strategy=virtual_ranks"]),
    (LAYER_NORM, PIPELINE),
    ("a gpt with dropout", [*TEXT, "model.dropout=0.1", ema(0.9), "optimizer=adamw"]),
    ("a compiled gpt", [*TEXT, "model.dropout=0", "trainer.compile=true"]),
    ("a convnet by a plateau", ["scheduler=plateau", "loader.validation=0.1"]),
]
# Nets of other kinds than float64, for whole commands.
net("OnlyFloat32", before=lambda self, x: x.float())
net("Infinite", after=lambda self, y: y + (y - y).sqrt())  # its gradients are not finite
net(
    "Half",
    lambda self: self.layer.bfloat16(),
    kept={"eye": lambda: torch.eye(3).to_sparse()},
    forward=lambda self, x: self.layer(x.bfloat16()).float(),
)
