"""The contract of a strategy: how a model, its data and its training step are spread over ranks.

The base class serves a plain module, whole on every rank. A strategy overrides what differs and nothing else.
To add one: a class in a file of its own here, and `conf/strategy/<name>.yaml` with its `_target_`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lockstep.config.schema import RunConfig
from lockstep.data import partition
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import Part
from lockstep.data.source import map_tensors, tensors_in, without_samples
from lockstep.distributed.sync_batch_norm import SyncBatchNorm
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, first_of
from lockstep.models.base import sparse_parameters
from lockstep.strategies.gradient_sync import GradientSync

Outputs = Callable[[nn.Module, Any], Any]  # (model, inputs) -> what a task takes, or the second pass of a Step
Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the sum of the losses of these samples, 0-d


@dataclass(frozen=True)
class JobSpec:
    """What the command asks for, as far as options can contradict each other. `lockstep.build` fills it."""

    config: RunConfig
    world_size: int
    on_gpus: bool
    has_own_step: bool
    gradient_sync: Any  # the class

    def refusable(self) -> dict[str, tuple[bool, str]]:
        """{what a strategy or a gradient sync may refuse: (whether this job asks for it, what to type instead)}."""
        config, trainer, steps = self.config, self.config.trainer, "trainer.gradient_accumulation_steps"
        return {
            "a gradient_sync of DDP": (self.gradient_sync.needs_hooks, "gradient_sync=auto, or strategy=ddp"),
            "a step of your own": (self.has_own_step, "step=default, or strategy=ddp"),
            "one rank": (self.world_size == 1, "launch=spawn launch.nproc_per_node=3"),
            "several ranks": (self.world_size > 1, "strategy=ddp, or launch=env"),
            "snapshot.every=<n>steps": ("step" in config.snapshot.every, "snapshot.every=1epochs"),
            "sync_bn=on": (config.sync_bn.mode == "on", "sync_bn=off"),
            "trainer.compile": (bool(trainer.compile), "trainer.compile=false"),
            "trainer.deterministic=true": (trainer.deterministic, "trainer.deterministic=false"),
            steps: (trainer.gradient_accumulation_steps > 1, f"{steps}=1"),
            "trainer.precision=fp16": (trainer.precision == "fp16", "trainer.precision=bf16"),
            "watch.nan=skip": (config.watch.nan == "skip", "watch.nan=stop"),
        }


class Computed(nn.Module):
    """What a strategy wraps: its forward pass is `outputs(model, inputs)`, so all that a task calls lies inside it."""

    def __init__(self, model: nn.Module, outputs: Outputs, autocast: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.model, self.outputs, self.autocast = model, outputs, autocast

    def forward(self, inputs: Any, outputs: Outputs | None = None) -> Any:
        with self.autocast:
            return (outputs or self.outputs)(self.model, inputs)


class Strategy:
    """A plain module, the same on every rank. `setup` sets the attributes that have no value here."""

    world: World
    gradient_sync: GradientSync
    precision: str
    autocast: AbstractContextManager[Any]
    loss_type: torch.dtype
    model: nn.Module  # the net inside, whose parameters carry the names that the model gave them
    module: nn.Module  # what a forward pass calls
    evaluated: nn.Module  # what an evaluation calls: no wrapper that waits for other ranks
    trained: list[tuple[str, nn.Parameter]]  # those of this rank
    ranks_per_model = 1  # that hold a model together, each a part of it; ranks this far apart hold the same
    counts = True  # False on a rank whose sums another rank adds up, too
    gradient_divisor = 1  # of the sum of the ranks' gradients, in averaging; the loss is multiplied by it before
    waits_for_gradients = False  # whether ranks average gradients in the backward pass, of all trained weights

    name = "own"
    refused: tuple[str, ...] = ("a gradient_sync of DDP",)  # keys of `JobSpec.refusable`; with "sync_bn=on" auto is off
    passes_whole_batches = True  # a rank passes its share of a batch forward at once
    replicas_equal = True  # all ranks hold the same weights and gradients, after every step
    binds_one_device = True  # a rank computes on one device only
    cut_on_cpu = False  # several ranks set up a model on the CPU, as only a part of it goes to `world.device`

    def validate(self, job: JobSpec) -> None:
        """Raise ConfigError for what this strategy cannot do or would do wrong. Called before any process starts."""
        refusable = job.refusable()
        for who, part in (("strategy", self), ("gradient_sync", job.gradient_sync)):
            for what in part.refused:
                is_asked, instead = refusable[what]
                if is_asked:
                    raise ConfigError(f"{who}={part.name} cannot have {what}; type {instead}")

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        """Take over `model` and spread it over the ranks. Raises ConfigError for a model that cannot be. outputs: what
        a forward pass computes. precision: as trainer.precision."""
        if world.size > 1 and sparse_parameters(model):
            what = "several ranks add up dense gradients, and the model has an embedding with sparse=True"
            raise ConfigError(f"{what}; make it with sparse=False, or type launch=env")
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        if world.size > 1 and any(embedding.max_norm is not None for embedding in embeddings):
            what = "an embedding with max_norm= changes the weights of the samples that a rank sees"
            raise ConfigError(f"{what}; leave max_norm out, or type launch=env")
        self.world, self.model, self.gradient_sync, self.precision = world, model, gradient_sync, precision
        self.autocast = autocast(world.device, precision)
        self.loss_type = torch.float64 if precision == "fp64" else torch.float32
        self.module = self.evaluated = Computed(model, outputs, self.autocast)
        self.spread()
        self.trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]

    def spread(self) -> None:
        """The part of `setup` that differs: wrap, cut or move `model` and `module`."""

    def data_share_of(self, world_size: int) -> int:
        """How many different shares a global batch is cut into. Ranks that work on the same samples count once."""
        return world_size

    def data_share(self, world: World) -> tuple[int, int]:
        """(which of the shares of a batch or an evaluation is this rank's, how many there are). Neighbours share."""
        shares = self.data_share_of(world.size)
        return world.rank * shares // world.size, shares

    def parts(self, number: int, count: int, micro_batches: int) -> Sequence[Part]:
        """This rank's parts of an epoch's `number`-th batch, of `count` samples: one forward pass each, or no work."""
        return partition.parts(count, micro_batches, *self.data_share(self.world))

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        """One forward and backward pass, the only way to one. The gradients are of `weight` times the loss. last: this
        is the last part of the step, after which gradients are averaged. outputs: another function for a second pass,
        such as of a part of the model."""
        with nullcontext() if last else getattr(self.module, "no_sync", nullcontext)():  # as DDP's
            found = forward(self.module, part.inputs, outputs)
            loss(found, part.targets).backward(weight)

    def require_gradients(self) -> None:
        """Raise ConfigError for weights that the last step left without a gradient, if all ranks wait for each."""
        names = [name for name, weight in self.trained if weight.grad is None]
        if names and self.waits_for_gradients:
            what = f"no gradient of {first_of(names)} in some step, and all ranks wait for each gradient"
            what += "; type strategy=ddp strategy.find_unused_parameters=true"
            raise ConfigError(f"{what}, or parameters.freeze=[{','.join(names[:2])}]")

    def sum_counts(self, counts: Tensor) -> tuple[Any, Tensor]:
        """counts: (parts,), of this rank's. Returns what waits for the others, and numbers that sum to the batch's."""
        sharing = self.world.size // self.data_share_of(self.world.size)  # as many ranks have these samples
        count = counts.sum().double() / sharing
        return self.world.all_reduce_async(count), count

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients so that the norm over the whole model is at most `max_norm`. Returns it, 0-d."""
        if self.ranks_per_model == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        total, gradients = torch.zeros((), dtype=torch.float64, device=self.world.device), self.gradients_of(parameters)
        for copies, parts in gradients.items():
            total += get_total_norm(parts).to(total).square() / copies
        norm = self.world.all_reduce_sum(total).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        for part in itertools.chain(*gradients.values()):
            part.mul_(factor)
        return norm

    def gradients_of(self, parameters: Sequence[nn.Parameter]) -> Mapping[int, Sequence[Tensor]]:
        """Of ranks that hold parts of a model: {how many ranks hold the same values: gradients of this rank's}."""
        return {1: [parameter.grad for parameter in parameters if parameter.grad is not None]}

    def evaluate(self, part: LoadedPart, count: Callable[[Any, Any], None]) -> None:
        """One forward pass without gradients; `count(outputs, targets)` takes its outputs."""
        count(forward(self.evaluated, part.inputs), part.targets)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is. Without the import of DTensor, which takes long."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def layer_groups(module: nn.Module, count: int) -> list[dict[str, nn.Module]]:
    """The children of `module` in `count` groups of neighbours, [{name: child}, ...], of about equally many layers with
    parameters. A layer without parameters stays with the one before it. Raises ConfigError if there are too few."""
    children = list(module.named_children())
    filled = [place for place, (_, child) in enumerate(children) if any(True for _ in child.parameters())]
    if len(filled) < count:
        what = f"this model has {len(filled)} layers with parameters, too few for {count} places"
        raise ConfigError(f"{what}; type model=mlp model.depth={count - 1}")
    firsts = [int(group[0]) for group in torch.tensor(filled).tensor_split(count)]
    return [dict(children[start:end]) for start, end in itertools.pairwise([0, *firsts[1:], len(children)])]


def model_dtype(precision: str) -> torch.dtype:
    """The type of inputs and ordinary parameters. fp16 and bf16 are autocast over float32 parameters."""
    return {"fp64": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The autocast context of `precision`. fp32 and fp64 compute in the parameters' own type."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, types[precision]) if precision in types else nullcontext()


def forward(module: nn.Module, inputs: Any, outputs: Outputs | None = None) -> Any:
    """`module(inputs)`, also for the inputs of a rank whose share of a batch has no samples. Many models cannot compute
    those. So two samples of ones stand in, and their outputs are cut off: two, because batch norm refuses one, and
    ones, because these are token numbers, masks and pixels that any model takes. Their gradient is zero, and
    synchronised batch norm does not count them."""
    has_samples = isinstance(inputs, Tensor) and inputs.dim() and inputs.shape[0]
    if has_samples or next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 1):
        return module(inputs, outputs)
    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, SyncBatchNorm):
                stack.enter_context(layer.without_samples())
        ones = map_tensors(lambda tensor: tensor.new_ones(2, *tensor.shape[1:]) if tensor.dim() else tensor, inputs)
        return without_samples(module(ones, outputs))


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all `tensors`, one behind the other: (n,) uint8. gloo knows few types, and none has sparse ones."""
    dense = (tensor.detach().to_dense().to(tensors[0].device) for tensor in tensors)
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in dense])


@torch.no_grad()
def from_bytes(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of `to_bytes`: copy the values into `tensors`, in place."""
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        values = part.clone().view(tensor.dtype).view(tensor.shape)  # torch cannot read an int64 at any byte
        tensor.copy_(values.to_sparse(layout=tensor.layout) if tensor.layout != torch.strided else values)


def broadcast(tensors: Sequence[Tensor], source: int = 0) -> None:
    """Copy the `tensors` of rank `source` to every rank. They may have any type and memory layout."""
    if tensors:
        packed = to_bytes(tensors)
        dist.broadcast(packed, src=source)
        from_bytes(packed, tensors)
