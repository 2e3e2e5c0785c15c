"""Nets of points (4,) that mode=check shall name, or leave alone, and losses, data and optimizers of the same kind.

`WRONG` has the row of the table that names each, and words of its reason; `RIGHT` those in which no row says no.
"""

import random
import time
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.tasks.tasks import CrossEntropy
from support.commands import ema
from support.models import attach
from support.own_data import Noisy, Points


def found_here(name, of, **members):
    """A class that a config finds here by its name."""
    globals()[name] = type(name, (of,), {"__module__": __name__, **members})
    return globals()[name]


class Simple(nn.Module):
    """A linear layer. `before` and `after` are what others add to it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def before(self, x):
        return x

    after = before

    def forward(self, x):
        return self.after(self.layer(self.before(x)))


def net(name, init=None, of=Simple, **parts):
    """A `Simple` with other methods `before` and `after`. init: called with it. parts: see `attach`."""
    methods = {key: parts.pop(key) for key in ("before", "after", "forward", "train") if key in parts}

    def construct(self):
        of.__init__(self)
        attach(self, parts)
        if init is not None:
            init(self)

    return found_here(name, of, __init__=construct, **methods)


def needs_version(self, state, prefix, metadata, *others):
    """As layers do whose weights had another form once."""
    if metadata.get("version") is None:
        raise ValueError("a state dict without the versions of its layers")
    nn.Module._load_from_state_dict(self, state, prefix, metadata, *others)


def layers(name, *make):
    return found_here(name, nn.Sequential, __init__=lambda self: nn.Sequential.__init__(self, *(one() for one in make)))


def linear(inputs, outputs):
    return lambda: nn.Linear(inputs, outputs)


def constant(make, *shape, **options):
    """What makes a new tensor for each net."""
    return lambda: make(*shape, **options)


def running(name, follow):
    """A mean of what has passed in the training, in a buffer."""

    def before(self, x):
        out = x - self.mean
        if self.training:
            follow(self, x.mean(0))
        return out

    return net(name, before=before, mean=constant(torch.zeros, 4))


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
    calls = []

    def hook(module, inputs, outputs):
        calls.extend([1] * module.training)
        return outputs / (1 + len(calls))

    self.layer.register_forward_hook(hook)


def following(self, x):
    """Follows an evaluation alone, so that ranks and steps agree."""
    self.mean = self.mean if self.training else 0.5
    return x if self.mean is None else x - self.mean


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


# Data, tasks and optimizers that are wrong.


def data(name, change=lambda self, index, *sample: sample, of=Points, **parts):
    """Points that change(self, number, point, class) makes of others."""

    def construct(self):
        of.__init__(self)
        self.__dict__ |= {key: make() for key, make in parts.items()}

    read = lambda self, index: change(self, index, *of.__getitem__(self, index))  # noqa: E731
    return found_here(name, of, __init__=construct, __getitem__=read)


def task(name, change, **members):
    """A task whose loss is change(self, losses, targets)."""

    def call(self, outputs, targets):
        found = CrossEntropy.__call__(self, outputs, targets)
        return found | {"loss": change(self, found["loss"], targets)}

    return found_here(name, CrossEntropy, __call__=call, **members)


def waves(self, y):
    """Seven sines, each of which makes a difference up to three times as large: rounding grows from step to step."""
    for _ in range(7):
        y = (3 * y).sin()
    return y


BATCHES = []


def collate(samples):
    """Counts the batches that it has made."""
    BATCHES.append(len(samples))
    points, labels = torch.stack([point for point, _ in samples]), torch.tensor([label for _, label in samples])
    return points / len(BATCHES), labels


def weighed_by_batch(self, losses, targets):
    """A class-weighted mean times the number of samples, in which a sample counts by the others of its batch."""
    weights = torch.tensor([0.2, 3.0]).to(losses)[targets]
    return losses * weights * len(targets) / weights.sum()


def counted_loss(self, losses, targets):
    """Divides by what the steps before have left, in an attribute; the same on all ranks."""
    self.calls += torch.is_grad_enabled()
    return losses / (1 + self.calls)


class Outside(torch.optim.Optimizer):
    """Keeps its velocity outside self.state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.velocity = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.velocity.setdefault(p, torch.zeros_like(p))
                p.sub_(velocity.mul_(0.9).add_(p.grad), alpha=group["lr"])


OwnGenerator = data(  # noise that no seed of a run reaches
    "OwnGenerator",
    lambda self, index, point, label: (point + self.numbers.random(), label),
    numbers=lambda: np.random.default_rng(0),
)
InPlace = data("InPlace", lambda self, index, point, label: (point.mul_(0.9), label))
Keeping = data("Keeping", lambda self, index, *sample: self.kept.setdefault(index, sample), of=Noisy, kept=dict)
Unseeded = data("Unseeded", points=lambda: torch.from_numpy(np.random.default_rng().standard_normal((23, 4))))
task("WeighedByBatch", weighed_by_batch)
task("Memory", counted_loss, calls=0)
task("DrawnLoss", lambda self, losses, targets: losses * (1 + np.random.rand()))  # one number for all samples

PLAN = "strategy.parallelize_plan=[{stem.layer:gathered},{head.layer:gathered},{body.0:colwise},{body.2:rowwise}]"
PIPELINE = ["strategy=pipeline", "strategy.micro_batches=2"]
TASK, OPTIMIZER = f"task._target_={__name__}.", f"optimizer._target_={__name__}."
COLLATE = f"loader.collate_fn={{_target_:{__name__}.collate}}"
TEXT = ["dataset=text", f"dataset.path={Path(__file__)}", "dataset.block=16", f"dataset.tokens_dir={gettempdir()}"]
TEXT += ["model=gpt", "model.layers=2", "model.width=16", "trainer.batch_size=8", "loader.validation=0.1"]
PLAIN = ["optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.fused=false"]  # for sparse gradients
UNUSED, TWICE = "strategy.find_unused_parameters=true", "trainer.gradient_accumulation_steps=2"
ENDS = "its run ends with an error"
SQUEEZED = ["gradient_sync=powersgd", "gradient_sync.start_step=2", "gradient_sync.rank=1"]
SHARE, KEEPS = "depends on a rank's share", "keeps what no snapshot has"
BY_BATCH_NORM = layers("BatchNormed", linear(4, 3), constant(nn.BatchNorm1d, 3), linear(3, 2))
DROPPED = layers("Dropped", linear(4, 8), constant(nn.Dropout, 0.5), linear(8, 8), linear(8, 2))
MIXES = net("Mixes", before=lambda self, x: 0.7 * x + 0.3 * x.roll(1, 0) if self.training else x)
FROZEN = lambda: nn.Parameter(torch.zeros(4), requires_grad=False)  # noqa: E731
SPARE = net("Spare", spare=linear(2, 2))
EXPERT = net("Expert", spare=linear(4, 2))
EXPERT.forward = lambda self, x: self.layer(x) + (0 * self.spare(x) if len(x) > 10 else 0)
SPARSE = net("SparseTable", table=constant(nn.Embedding, 2, 4, sparse=True))  # several ranks refuse it
SPARSE.before = lambda self, x: x + self.table((x[:, 0] > 0).long())
CUT_OFF = net("CutOff", spare=linear(4, 2), forward=lambda self, x: self.layer(x) + self.spare(x).detach())
OWN_NUMBERS = net("OwnNumbers", numbers=lambda: np.random.default_rng(0))
OWN_NUMBERS.before = lambda self, x: x * float(self.numbers.random())
LISTED = net("Listed", before=lambda self, x: self.hidden[0](x), hidden=lambda: [linear(4, 4)().double()])
LOOSE = net("Loose", scales=lambda: {"inputs": nn.Parameter(torch.ones(4, dtype=torch.float64))})
LOOSE.before = lambda self, x: x * self.scales["inputs"]
CLAMPED = net("Clamped", lambda self: self.layer.weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01)))
NUMPY_NOISE = net("NumpyNoise", before=lambda self, x: x * torch.from_numpy(np.random.rand(len(x), 1)))
EVALUATED = net("InEvaluation", after=lambda self, y: y if self.training else y * float(np.random.rand()))
# An animal: what it is, or the name of one in zoo.modules; its words; of a wrong one the row and a part of the reason.
WRONG = [
    (net("Centred", after=lambda self, y: y - 0.5 * y.mean(0)), [], "two", "layers,"),
    (net("Scaled", before=lambda self, x: x / x.abs().max()), [], "two", "layers,"),
    (net("OverBatch", after=lambda self, y: y.softmax(0)), [], "two", f"model (OverBatch): it {SHARE}"),
    (MIXES, [], "two", f"layer (Linear): it {SHARE}"),
    (net("BySize", after=lambda self, y: y * len(y) / 10), [], "two", "layers,"),
    (CLAMPED, [], "two", "gradients,"),
    (net("Normalised", after=normalised), [], "two", "gradients,"),
    (running("Running", lambda self, mean: self.mean.lerp_(mean, 0.1)), [], "two", f"mean: it {SHARE}"),
    (net("Queue", before=queued, queue=constant(torch.zeros, 6, 4)), [], "two", f"queue: it {SHARE}"),
    (net("Grows", before=grown, bank=constant(torch.zeros, 0, 4)), [], "two", f"bank: it {SHARE}", ENDS),
    (net("Codebook", before=counted_codes, sizes=constant(torch.zeros, 2)), [], "two", "weights,"),
    (net("FrozenCodes", before=moved_codes, codes=FROZEN), [], "two", "layer (Linear)", ENDS),
    (net("Annealed", after=counting, calls=int), [], "resumed", KEEPS),
    (net("Unsaved", unsaved("calls", torch.zeros(())), after=counting), [], "resumed", "model (Unsaved): the model"),
    (net("Remembers", after=remembering, last=lambda: [0]), [], "resumed", KEEPS),
    (net("Clock", before=lambda self, x: x * (1 + time.time_ns() % 1000 / 1e5)), [], "again", "asks the clock"),
    (net("Entropy", before=lambda self, x: x * (1 + random.SystemRandom().random())), [], "again", "asks the clock"),
    (net("OwnWeights", drawn_by_numpy), [], "again", "start,"),
    (OWN_NUMBERS, [], "resumed", KEEPS),
    (LISTED, [], "learns", "no optimizer has"),
    (CUT_OFF, [], "learns", "spare.weight, spare.bias: no gradient"),
    (net("NoiseOfAll", before=lambda self, x: x * torch.rand(4, dtype=x.dtype)), [], "two", "layer (Linear)"),
    (NUMPY_NOISE, [], "two", "layer (Linear)"),
    (BY_BATCH_NORM, ["sync_bn=off"], "two", "1 (BatchNorm1d)"),
    ("Teacher", ["strategy=virtual_ranks"], "two", "teacher"),
    # Writes that do not raise the version of a tensor.
    (running("ByData", lambda self, mean: self.mean.data.lerp_(mean, 0.1)), [], "two", "mean: "),
    (running("ByNumpy", lambda self, mean: np.add(self.mean, 0.1 * mean, out=self.mean.numpy())), [], "two", "mean: "),
    (running("ByForeach", lambda self, m: torch._foreach_lerp_([self.mean.data], [m], 0.1)), [], "two", "mean: "),
    (net("Cached", before=cached, first=lambda: None), [], "resumed", KEEPS),
    (net("ByCallback", counted_by_a_hook), [], "resumed", KEEPS),
    (net("Follows", before=following, mean=lambda: None), [], "again", "an evaluation changes"),
    (LOOSE, [], "learns", "no optimizer has the weight of shape [4]"),
    (SPARE, [], "learns", "spare.weight, spare.bias: no gradient"),
    (SPARE, [], "two", "ddp strategy.find_unused_parameters=true", ENDS),
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
    (layers("Wide", linear(4, 64), nn.ReLU, linear(64, 2)), SQUEEZED, "two", "type gradient_sync=auto"),
    (Simple, ["trainer.batch_size_per_rank=7"], "two", "type trainer.batch_size=<of all ranks>"),
    (EXPERT, [], "two", "ddp strategy.find_unused_parameters=true", ENDS),
    (SPARSE, PLAIN, "two", "make it with sparse=False", ENDS),
    (BY_BATCH_NORM, PIPELINE, "two", "strategy=ddp"),
    (DROPPED, PIPELINE, "two", "strategy=ddp"),
    (MIXES, [TWICE], "cut", "type trainer.gradient_accumulation_steps=1"),
    (EVALUATED, [], "two", "evaluation, "),
    (net("Renamed", before=late, first=constant(torch.ones, 4)), [], "resumed", "", ENDS),
    (Simple, ["loader.collate_fn={_target_:support.own_data.mixed}"], "two", "samples,"),
    (DROPPED, ["trainer.compile=true"], "compiled", "type trainer.compile=false"),
]
RIGHT = [
    *((body, []) for body in ("layer_norm", "Tied", "Teacher", "deep_gru", "Coin", "Residual", "spectral_norm")),
    *((body, []) for body in ("weight_norm", "dropped_attention", "OddBuffers", "Complex", "Embedded")),
    *((body, ["optimizer=adamw"]) for body in ("group_norm", "batch_norm_1d")),
    ("dropout", ["optimizer=adamw", ema(0.9)]),
    ("batch_norm_1d", [ema(0.9)]),  # its first bias has a gradient of rounding alone
    ("CountingBuffer", ["optimizer.fused=false"]),
    ("one_prelu", ["optimizer=muon"]),
    ("Unused", [UNUSED]),
    ("Mixed", [TWICE]),
    ("layer_norm", ["strategy=fsdp", TWICE]),
    ("one_prelu", ["strategy=tensor_parallel", PLAN]),
    (BY_BATCH_NORM, ["strategy=virtual_ranks"]),
    ("layer_norm", PIPELINE),
    (Simple, [Noisy]),
    (Simple, [TWICE]),
    (Folding, []),
    (net("Adapted", of=Folding, train=nn.Module.train), []),  # `down` has no gradient in the first step
    (net("InFloat32", after=lambda self, y: y.float().log_softmax(1).to(y.dtype)), []),
    (net("Vmapped", forward=lambda self, x: torch.func.vmap(self.layer)(x)), []),
    (net("LateBuffer", before=late), []),
    (net("Unstable", after=waves), []),
    (net("OtherNames", with_other_names), []),
    (found_here("Versioned", Simple, _version=2, _load_from_state_dict=needs_version), []),
    ("a gpt with dropout", [*TEXT, "model.dropout=0.1", ema(0.9), "optimizer=adamw"]),
    ("a compiled gpt", [*TEXT, "model.dropout=0", "trainer.compile=true"]),
    ("a convnet by a plateau", ["scheduler=plateau", "loader.validation=0.1"]),
]
# For a whole command.
HALF = net("Half", lambda self: self.layer.bfloat16(), eye=lambda: torch.eye(3).to_sparse())
HALF.forward = lambda self, x: self.layer(x.bfloat16()).float()
