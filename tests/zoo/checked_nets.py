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

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def before(self, inputs: Tensor) -> Tensor:
        return inputs

    def after(self, outputs: Tensor) -> Tensor:
        return outputs

    def forward(self, inputs: Tensor) -> Tensor:
        return self.after(self.layer(self.before(inputs)))


# Batch statistics in disguises.


class Centred(Simple):
    def after(self, outputs: Tensor) -> Tensor:
        return outputs - 0.5 * outputs.mean(0)


class Scaled(Simple):
    def before(self, inputs: Tensor) -> Tensor:
        return inputs / inputs.abs().max()


class OverBatch(Simple):
    """A softmax over the wrong dimension."""

    def after(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(0)


class Mixes(Simple):
    """Each sample with the one before it."""

    def before(self, inputs: Tensor) -> Tensor:
        return 0.7 * inputs + 0.3 * inputs.roll(1, 0) if self.training else inputs


class BySize(Simple):
    def after(self, outputs: Tensor) -> Tensor:
        return outputs * len(outputs) / 10


class NoiseOfAll(Simple):
    """One draw of torch for all samples, which each rank draws for itself."""

    def before(self, inputs: Tensor) -> Tensor:
        return inputs * torch.rand(4, dtype=inputs.dtype)


class NumpyNoise(Simple):
    """A number for each sample, from a generator that does not know which samples they are."""

    def before(self, inputs: Tensor) -> Tensor:
        return inputs * torch.from_numpy(np.random.rand(len(inputs), 1))


# Hooks that are not linear.


class Clamped(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class Normalised(Simple):
    """The gradient of the outputs has the norm 1."""

    def after(self, outputs: Tensor) -> Tensor:
        if outputs.requires_grad:
            outputs = outputs * 1.0
            outputs.register_hook(lambda gradient: gradient / gradient.norm())
        return outputs


# Buffers and queues.


class Running(Simple):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def before(self, inputs: Tensor) -> Tensor:
        out = inputs - self.mean
        if self.training:
            self.follow(inputs.mean(0))
        return out

    def follow(self, mean: Tensor) -> None:
        self.mean.lerp_(mean, 0.1)


class ByData(Running):
    """A write that does not raise the version of the tensor."""

    def follow(self, mean: Tensor) -> None:
        self.mean.data.lerp_(mean, 0.1)


class ByNumpy(Running):
    def follow(self, mean: Tensor) -> None:
        self.mean.numpy()[:] += 0.1 * mean.numpy()


class ByForeach(Running):
    def follow(self, mean: Tensor) -> None:
        torch._foreach_lerp_([self.mean.data], [mean], 0.1)


class Queue(Simple):
    """Features of the samples before, which the net compares with."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 4))

    def before(self, inputs: Tensor) -> Tensor:
        out = inputs + 0.1 * self.queue.mean(0)
        if self.training:
            self.queue = torch.cat([self.queue, inputs.detach()])[-6:]
        return out


class Codebook(Simple):
    """Counts the samples near each of two codes, and does not read it."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.zeros(2))

    def before(self, inputs: Tensor) -> Tensor:
        self.sizes.lerp_(F.one_hot((inputs[:, 0] > 0).long(), 2).sum(0).to(self.sizes), 0.5)
        return inputs


class FrozenCodes(Simple):
    """Codes in a frozen weight, which a forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(4), requires_grad=False)

    def before(self, inputs: Tensor) -> Tensor:
        self.codes.data.lerp_(inputs.detach().mean(0), 0.1)
        return inputs - self.codes


# What no snapshot has.


class Annealed(Simple):
    """Counts its training steps in a plain attribute."""

    calls = 0

    def after(self, outputs: Tensor) -> Tensor:
        self.calls += self.training
        return outputs / (1 + self.calls)


class Unsaved(Simple):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def after(self, outputs: Tensor) -> Tensor:
        self.calls += self.training
        return outputs / (1 + self.calls)


class Remembers(Simple):
    """What the weights were in the last step, in an attribute that it replaces: the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def after(self, outputs: Tensor) -> Tensor:
        out = outputs * (1 + self.last)
        if self.training:
            self.last = self.layer.weight.detach().mean()
        return out


class Cached(Simple):
    """What the weights were in the first step."""

    first: Any = None

    def before(self, inputs: Tensor) -> Tensor:
        if self.first is None:
            self.first = self.layer.weight.detach().clone()
        return inputs + self.first.mean()


class ByCallback(Simple):
    """A hook that counts in a closure."""

    def __init__(self) -> None:
        super().__init__()
        calls: list[int] = []

        def hook(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
            calls.extend([1] * module.training)
            return outputs / (1 + len(calls))

        self.layer.register_forward_hook(hook)


class OwnNumbers(Simple):
    """Draws from a generator of its own, all ranks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)

    def before(self, inputs: Tensor) -> Tensor:
        return inputs * float(self.numbers.random())


class Folding(Simple):
    """Folds an adapter into a frozen weight while it does not train."""

    folded = False

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.zeros(2, 1))

    def train(self, mode: bool = True) -> "Folding":
        super().train(mode)
        if mode == self.folded:
            self.layer.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.folded = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out if self.folded else out + inputs @ self.down.T @ self.up.T


# What a run that is typed again has not.


class Clock(Simple):
    def before(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + time.time_ns() % 1000 / 1e5)


class OwnWeights(Simple):
    """Draws its first weights from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.data += torch.from_numpy(np.random.default_rng().standard_normal((2, 4))).float()


class Entropy(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = random.SystemRandom()

    def before(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + self.numbers.random())


class Follows(Simple):
    """Follows the inputs of an evaluation alone, so that ranks and steps agree."""

    mean: Any = None

    def before(self, inputs: Tensor) -> Tensor:
        if not self.training:
            self.mean = 0.5
        return inputs if self.mean is None else inputs - self.mean


# Weights that do not learn.


class Listed(Simple):
    """A layer in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(4, 4, dtype=torch.float64)]

    def before(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.hidden[0](inputs)
        return out


class Loose(Simple):
    """A weight in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"inputs": nn.Parameter(torch.ones(4, dtype=torch.float64))}

    def before(self, inputs: Tensor) -> Tensor:
        return inputs * self.scales["inputs"]


class CutOff(Simple):
    """A second head whose outputs get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head2 = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs) + self.head2(inputs).detach()
        return out


class Spare(Simple):
    """A layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


# Data, tasks and optimizers that are wrong.


class OwnGenerator(Points):
    """Noise that no seed of a run reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point + self.generator.random(), label


class InPlace(Points):
    """Changes what it keeps."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point.mul_(0.9), label


class Keeping(Noisy):
    """Keeps each sample with its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class Unseeded(Points):
    """Other points at each start."""

    def __init__(self) -> None:
        super().__init__()
        self.points = torch.from_numpy(np.random.default_rng().standard_normal((23, 4)))


BATCHES: list[int] = []


def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Counts the batches that it has made."""
    BATCHES.append(len(samples))
    points, labels = torch.stack([point for point, _ in samples]), torch.tensor([label for _, label in samples])
    return points / len(BATCHES), labels


class WeighedByBatch(CrossEntropy):
    """A class-weighted mean times the number of samples, in which a sample counts by the others of its batch."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        weight = torch.tensor([0.2, 3.0]).to(outputs)
        losses = F.cross_entropy(outputs, targets, weight=weight, reduction="none")
        return super().__call__(outputs, targets) | {"loss": losses * len(targets) / weight[targets].sum()}


class Memory(CrossEntropy):
    """Divides by what the steps before have left, in an attribute; the same on all ranks."""

    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found = super().__call__(outputs, targets)
        self.calls += torch.is_grad_enabled()
        return found | {"loss": found["loss"] / (1 + self.calls)}


class Outside(torch.optim.Optimizer):
    """Keeps its velocity outside self.state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.velocity: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.velocity.setdefault(p, torch.zeros_like(p))
                p.sub_(velocity.mul_(0.9).add_(p.grad), alpha=group["lr"])


# Right ones.


class LayerNormed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))


class GroupNormed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.SiLU(), nn.Linear(6, 2))


class Dropping(Simple):
    def after(self, outputs: Tensor) -> Tensor:
        return F.dropout(outputs, 0.3, self.training)


class BatchNormed(nn.Sequential):
    """Its first bias has a gradient of rounding alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Tied(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def before(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(inputs).tanh())
        return out


class Teacher(Simple):
    """A frozen layer that follows a trained one, and does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 2).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Teacher":
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.layer.weight, 0.1)
        out: Tensor = self.layer(inputs) + 0.1 * self.teacher(inputs)
        return out


class Recurrent(Simple):
    def __init__(self) -> None:
        super().__init__(5)
        self.cell = nn.GRU(1, 5, batch_first=True)

    def before(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.cell(inputs.unsqueeze(2))[0][:, -1]
        return out


class LayerDropped(Simple):
    """One coin for all samples: all ranks toss the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 4)

    def before(self, inputs: Tensor) -> Tensor:
        drops = self.training and np.random.rand() < 0.3
        return inputs + 0 * self.hidden(inputs) if drops else inputs + self.hidden(inputs)


class Counts(Simple):
    """Counts in a buffer, which it replaces."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def after(self, outputs: Tensor) -> Tensor:
        self.calls = self.calls + self.training
        return outputs / (1 + self.calls)


class DropsPaths(Simple):
    """A draw for each sample."""

    def before(self, inputs: Tensor) -> Tensor:
        kept = torch.rand(len(inputs), 1, dtype=inputs.dtype) < 0.7
        return inputs * kept if self.training else inputs


class SpectralNormed(Simple):
    """Its buffers follow the weight in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(self.layer)


class WeightNormed(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(self.layer)


class Attends(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.attention = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def before(self, inputs: Tensor) -> Tensor:
        values = self.up(inputs.unsqueeze(2))
        out: Tensor = self.attention(values, values, values, need_weights=False)[0].mean(1)
        return out


class Adapted(Folding):
    """The same adapter, which folds nothing: `down` has no gradient in the first step."""

    def train(self, mode: bool = True) -> "Adapted":
        nn.Module.train(self, mode)
        return self


class Constant(Simple):
    """A buffer that no snapshot has, and that never changes; and a mask that is kept for each size."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 4), persistent=False)
        self.masks: dict[int, Tensor] = {}

    def before(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale * self.masks.setdefault(len(inputs), torch.ones(4, dtype=inputs.dtype))


class InFloat32(Simple):
    """A part of it computes in float32."""

    def after(self, outputs: Tensor) -> Tensor:
        return outputs.float().log_softmax(1).to(outputs.dtype)


class Vmapped(Simple):
    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(self.layer)(inputs)
        return out


class Activated(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 2))


class Complex(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def before(self, inputs: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(inputs) * self.filter, n=4)


class LateBuffer(Simple):
    """Registers a buffer in its first step."""

    def before(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4, dtype=inputs.dtype))
        return inputs * self.mask


class Coin(Simple):
    """One number for all samples."""

    def before(self, inputs: Tensor) -> Tensor:
        return inputs * (np.random.rand() + random.random()) if self.training else inputs


class InEvaluation(Simple):
    """Draws while it does not train."""

    def after(self, outputs: Tensor) -> Tensor:
        return outputs if self.training else outputs * float(np.random.rand())


class Expert(Simple):
    """A layer that a share of a batch does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        return out + 0 * self.spare(inputs) if len(inputs) > 10 else out


class Table(Simple):
    """A table, and a buffer that is replaced."""

    calls: Tensor

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, sparse=sparse)
        self.register_buffer("calls", torch.zeros(()))

    def before(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + self.training
        out: Tensor = inputs * self.calls + self.table((inputs[:, 0] > 0).long())
        return out


class SparseTable(Table):
    """Its gradients are sparse, which several ranks refuse."""

    def __init__(self) -> None:
        super().__init__(sparse=True)


class Renamed(LateBuffer):
    """Replaces a buffer by one of another name in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(4))

    def before(self, inputs: Tensor) -> Tensor:
        if hasattr(self, "first"):
            del self.first
        return super().before(inputs)


class OtherNames(Simple):
    """Its state dict has other names than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(under_other_names)
        self.register_load_state_dict_pre_hook(under_own_names)


def under_other_names(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in ("weight", "bias"):
        state[f"{prefix}head_{name}"] = state.pop(f"{prefix}layer.{name}")


def under_own_names(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in ("weight", "bias"):
        state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}head_{name}")


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2))


class DrawnLoss(CrossEntropy):
    """One number for all samples, too."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found = super().__call__(outputs, targets)
        return found | {"loss": found["loss"] * (1 + np.random.rand())}


class OnlyFloat32(Simple):
    """It cannot compute in float64."""

    def before(self, inputs: Tensor) -> Tensor:
        return inputs.float()


class Half(Simple):
    """Weights of half precision, and a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.bfloat16()
        self.register_buffer("eye", torch.eye(3).to_sparse())

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.bfloat16()).float()


class Infinite(Simple):
    """Its outputs are finite, and its gradients are not."""

    def after(self, outputs: Tensor) -> Tensor:
        return outputs + (outputs - outputs).sqrt()


PIPELINE = ["strategy=pipeline", "strategy.micro_batches=2"]
TASK, OPTIMIZER = f"task._target_={__name__}.", f"optimizer._target_={__name__}."
COLLATE = f"loader.collate_fn={{_target_:{__name__}.collate}}"
TEXT = ["dataset=text", f"dataset.path={Path(__file__)}", "dataset.block=16", f"dataset.tokens_dir={gettempdir()}"]
TEXT += ["model=gpt", "model.layers=2", "model.width=16", "trainer.batch_size=8", "loader.validation=0.1"]
PLAIN = ["optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.fused=false"]  # for sparse gradients
UNUSED = "strategy.find_unused_parameters=true"
ENDS = "its run ends with an error"
Animal = tuple[Any, ...]  # what it is, its words, and of a wrong one the row and a part of the reason

FIRST_WRONG: list[Animal] = [  # those that the first edition named
    (Centred, [], "two", "layers,"),
    (Scaled, [], "two", "layers,"),
    (OverBatch, [], "two", "OverBatch gives other outputs"),
    (Mixes, [], "two", "layer (Linear) gives other outputs"),
    (BySize, [], "two", "layers,"),
    (Clamped, [], "two", "gradients,"),
    (Normalised, [], "two", "gradients,"),
    (Running, [], "two", "mean: changed by a rank's own share"),
    (Queue, [], "two", "queue: changed by"),
    (Codebook, [], "two", "weights,"),
    (FrozenCodes, [], "two", "layer (Linear)", ENDS),
    (Annealed, [], "resumed", "keeps what no snapshot has"),
    (Unsaved, [], "resumed", "Unsaved: the model, the loss or a hook keeps"),
    (Remembers, [], "resumed", "keeps what no snapshot has"),
    (Clock, [], "again", "asks the clock"),
    (Entropy, [], "again", "asks the clock"),
    (OwnWeights, [], "again", "start,"),
    (OwnNumbers, [], "resumed", "keeps what no snapshot has"),
    (Listed, [], "learns", "no optimizer has"),
    (CutOff, [], "learns", "head2.weight, head2.bias: no gradient"),
]
FIRST_RIGHT: list[Animal] = [  # those that it did not doubt
    (LayerNormed, []),
    (GroupNormed, ["optimizer=adamw"]),
    (Dropping, ["optimizer=adamw", ema(0.9)]),
    (BatchNormed, [ema(0.9)]),
    (Tied, []),
    (Teacher, []),
    (Recurrent, []),
    (LayerDropped, []),
    (Counts, ["optimizer.fused=false"]),
]
WRONG: list[Animal] = [
    *FIRST_WRONG,
    (NoiseOfAll, [], "two", "layer (Linear) gives other outputs"),
    (NumpyNoise, [], "two", "layer (Linear) gives other outputs"),
    (BatchNormed, ["sync_bn=off"], "two", "1 (BatchNorm1d) sees a rank's share"),
    (ByData, [], "two", "mean: changed by a rank's own share"),
    (ByNumpy, [], "two", "mean: changed by a rank's own share"),
    (ByForeach, [], "two", "mean: changed by a rank's own share"),
    (Cached, [], "resumed", "keeps what no snapshot has"),
    (ByCallback, [], "resumed", "keeps what no snapshot has"),
    (Follows, [], "again", "an evaluation changes"),
    (Loose, [], "learns", "no optimizer has the weight of shape [4]"),
    (Spare, [], "learns", "spare.weight, spare.bias: no gradient"),
    (Spare, [], "two", "type strategy.find_unused_parameters=true", ENDS),
    (Simple, [OwnGenerator], "two", "samples,"),
    (Simple, [OwnGenerator], "resumed", "samples,"),
    (Simple, [InPlace], "resumed", "samples,"),
    (Simple, [Keeping], "resumed", "samples,"),
    (Simple, [Unseeded], "again", "samples,"),
    (Simple, [Unseeded], "two", "data", ENDS),
    (Simple, [COLLATE], "resumed", "samples,"),
    (Simple, [f"{TASK}WeighedByBatch"], "two", "loss,", ENDS),
    (Simple, [f"{TASK}DrawnLoss"], "two", "another number of the same weights"),  # an evaluation draws for a rank
    (Simple, [f"{TASK}Memory"], "resumed", "keeps what no snapshot has"),
    (Simple, [f"{OPTIMIZER}Outside", "optimizer.lr=0.05"], "resumed", "the optimizer keeps"),
    (Simple, ["gradient_sync=powersgd"], "two", "type gradient_sync=auto"),
    (Simple, ["trainer.batch_size_per_rank=7"], "two", "type trainer.batch_size=<all>"),
    (Expert, [], "two", "type strategy.find_unused_parameters=true", ENDS),
    (SparseTable, PLAIN, "two", "make it with sparse=False", ENDS),
    (BatchNormed, PIPELINE, "two", "type strategy=ddp"),
    (Dropped, PIPELINE, "two", "type strategy=ddp"),
    (Mixes, ["trainer.gradient_accumulation_steps=2"], "cut", "type trainer.gradient_accumulation_steps=1"),
    (InEvaluation, [], "two", "evaluation, "),
    (Renamed, [], "resumed", "", ENDS),
    (Simple, ["loader.collate_fn={_target_:support.own_data.mixed}"], "two", "samples,"),
    (Dropped, ["trainer.compile=true"], "compiled", "type trainer.compile=false"),
]
RIGHT: list[Animal] = [
    *FIRST_RIGHT,
    (Simple, [Noisy]),
    (BatchNormed, ["optimizer=adamw"]),
    (DropsPaths, []),
    (Folding, []),
    (SpectralNormed, []),
    (WeightNormed, []),
    (Attends, []),
    (Adapted, []),
    (Constant, []),
    (InFloat32, []),
    (Vmapped, []),
    (Activated, ["optimizer=muon"]),
    (Complex, []),
    (LateBuffer, []),
    (Simple, ["trainer.gradient_accumulation_steps=2"]),
    (Spare, [UNUSED]),
    (Coin, ["trainer.gradient_accumulation_steps=2"]),
    (Table, []),
    (OtherNames, []),
    (LayerNormed, ["strategy=fsdp", "trainer.gradient_accumulation_steps=2"]),
    (Activated, ["strategy=tensor_parallel", "strategy.parallelize_plan=[{0:colwise},{2:rowwise}]"]),
    (BatchNormed, ["strategy=virtual_ranks"]),
    (LayerNormed, PIPELINE),
    ("a gpt with dropout", [*TEXT, "model.dropout=0.1", ema(0.9), "optimizer=adamw"]),
    ("a compiled gpt", [*TEXT, "model.dropout=0", "trainer.compile=true"]),
    ("a convnet by a plateau", ["scheduler=plateau", "loader.validation=0.1"]),
]
