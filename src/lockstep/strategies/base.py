"""The contract of a strategy: how a model, its data and its training step are spread over ranks.

The base class serves a plain module, whole on every rank. A strategy overrides what differs and nothing else.
To add one: a class in a file of its own here, and `conf/strategy/<name>.yaml` with its `_target_`.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep import compat
from lockstep.data import partition
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import Part
from lockstep.data.source import map_tensors, tensors_in, without_samples
from lockstep.distributed.sync_batch_norm import SyncBatchNorm
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, first_of
from lockstep.models.base import sparse_parameters
from lockstep.strategies.messages import broadcast

if TYPE_CHECKING:
    from lockstep.strategies.gradient_sync import GradientSync

log = logging.getLogger(__name__)

Outputs = Callable[[nn.Module, Any], Any]
"""(model, inputs) -> what a task takes: `Task.outputs`, or that of a Step's second pass."""

Loss = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> the sum of the losses of these samples, 0-d."""


@dataclass(frozen=True)
class JobSpec:
    """What the command asks for, as far as options can contradict each other. `lockstep.preflight` fills it."""

    world_size: int
    ranks_here: int  # ranks on this machine
    device_type: str  # "cpu", "cuda" or "mps"
    precision: str
    sync_bn: str  # "auto", "on" or "off"
    gradient_accumulation_steps: int
    compile: bool | str
    deterministic: bool
    nan: str  # "stop" or "skip"
    save_unit: str  # "epoch", "step" or "min"
    optimizer: Any  # the class, or whatever `optimizer._target_` names
    fused_optimizer: bool
    has_own_step: bool


AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Computed(nn.Module):
    """What a strategy wraps: its forward pass is `outputs(model, inputs)`, so all that a task calls lies inside it."""

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, inputs: Any, outputs: Outputs | None = None) -> Any:
        return (outputs or self.outputs)(self.model, inputs)


class Strategy:
    """A plain module, the same on every rank.

    `module` is what a forward pass calls; `model` is the net inside it, whose parameters carry the names that the
    model gave them. `ranks_per_model` is how many ranks hold a model together, each a part of it: ranks this far apart
    hold the same. `counts` is False on a rank whose sums another rank adds up, too. `setup` sets them.
    """

    module: nn.Module
    model: nn.Module
    world: World
    ranks_per_model: int
    counts: bool
    loss_type: torch.dtype

    supports_sync_bn = True
    """Whether batch norms of several ranks can add up their statistics in each forward pass."""
    passes_whole_batches = True
    """Whether a rank passes its share of a batch forward at once."""
    replicas_equal = True
    """Whether all ranks hold the same weights and gradients, after every step."""

    def validate(self, job: JobSpec) -> None:
        """Raise ConfigError for what this strategy cannot do or would do wrong. Called before any process starts."""

    def validate_gradient_sync(self, gradient_sync: "GradientSync", job: JobSpec) -> None:
        """Raise ConfigError for a gradient sync that cannot work here. Called before any process starts."""
        if gradient_sync.needs_hooks:
            raise ConfigError(
                f"gradient_sync={gradient_sync.name} is a communication hook of DDP; "
                f"type strategy=ddp gradient_sync={gradient_sync.name}, or gradient_sync=auto"
            )

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        """Raise ConfigError for a model that this strategy cannot spread over `world_size` ranks."""

    def binds_one_device(self) -> bool:
        """Whether a rank computes on one device only."""
        return True

    def building(self, world_size: int) -> AbstractContextManager[None]:
        """Inside the block the model of a run of `world_size` ranks is built, which `setup` takes over later."""
        return nullcontext()

    def device_before_setup(self, world: World) -> torch.device:
        """Where the model is that `setup` takes over: the CPU, if only a part of it goes to `world.device`."""
        return world.device

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: "GradientSync", precision: str = "fp32"
    ) -> None:
        """Take over `model`, which is on `device_before_setup`, and spread it over the ranks.

        outputs: what a forward pass computes. gradient_sync: how DistributedDataParallel averages gradients. precision:
        as trainer.precision.
        """
        self.world, self.model, self.module = world, model, Computed(model, outputs)
        self.ranks_per_model, self.counts = 1, True
        self.autocast = autocast(world.device, precision)
        self.loss_type = torch.float64 if model_dtype(precision) == torch.float64 else torch.float32

    def syncs_batch_norm(self, mode: str, world_size: int) -> bool:
        """Whether batch norm covers the whole global batch. mode: conf/sync_bn's "on", "off" or "auto"."""
        if mode == "auto":
            return self.supports_sync_bn and self.data_share_of(world_size) > 1
        return mode == "on"

    # Data: who reads which samples.

    def data_share_of(self, world_size: int) -> int:
        """How many different shares a global batch is cut into. Ranks that work on the same samples count once."""
        return world_size

    def data_share(self, world: World) -> tuple[int, int]:
        """(which of the shares of a global batch is this rank's, how many there are)."""
        return world.rank, world.size

    def evaluation_share(self, world: World) -> tuple[int, int]:
        """The same of an evaluation."""
        return self.data_share(world)

    def parts(self, number: int, count: int, micro_batches: int) -> Sequence[Part]:
        """This rank's parts of a global batch of `count` samples, the `number`-th of its epoch: one forward pass each.

        Empty is no work.
        """
        return partition.parts(count, micro_batches, *self.data_share(self.world))

    # One step.

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        """One forward and backward pass, the only way to one. The gradients are of `weight` times the loss.

        last: this is the last part of the step, after which gradients are averaged. outputs: another function for a
        second pass, such as of a part of the model.
        """
        with nullcontext() if last else self.accumulating():
            with self.autocast:
                found = forward(self.module, part.inputs, outputs)
            loss(found, part.targets).backward(weight)

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside the block a pass averages no gradients: the last part of the step does."""
        return nullcontext()

    def require_gradients(self) -> None:
        """Raise ConfigError for weights that the last step left without a gradient, where all ranks wait for each."""

    def sum_counts(self, counts: Tensor) -> tuple[Any, Tensor]:
        """counts: (parts,), of each part that this rank has of a global batch. Returns what waits for the others, and
        numbers whose sum is then that of the whole batch."""
        count = counts.sum().double()
        return self.world.all_reduce_async(count), count

    def gradient_divisor(self) -> int:
        """What gradient averaging divides the sum of the ranks' gradients by. The loss is multiplied by it before."""
        return 1

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients so that the norm over the whole model is at most `max_norm`. Returns it, 0-d."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def evaluate(self, part: LoadedPart, count: Callable[[Any, Any], None]) -> None:
        """One forward pass without gradients; `count(outputs, targets)` takes its outputs."""
        with self.autocast:
            outputs = forward(self.evaluated_module(), part.inputs)
        count(outputs, part.targets)

    def evaluated_module(self) -> nn.Module:
        """What an evaluation calls: no wrapper that waits for other ranks."""
        return self.module

    # What a rank holds.

    def replicated_tensors(self) -> dict[str, Tensor]:
        """{name: parameter or buffer} that has the same bits on several ranks after every step. A damaged one is found.

        These are all ranks, or those `ranks_per_model` apart. Buffers: those of synchronised batch norms.
        """
        if not (self.replicas_equal or 1 < self.ranks_per_model < self.world.size):
            return {}
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        for name, module in self.model.named_modules():
            if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
                tensors.update(module.named_buffers(prefix=name, recurse=False))
        return tensors

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to every rank: running statistics differ between ranks with sync_bn=off.

        A buffer that has another shape here, as one that grows may have, takes that of rank 0.
        """
        if self.world.size == 1:
            return
        mine = {name: list(buffer.shape) for name, buffer in self.model.named_buffers()}
        shapes = self.world.broadcast_json(mine)
        for name, shape in shapes.items():
            if mine.get(name) != shape:
                owner, _, last = name.rpartition(".")
                module = self.model.get_submodule(owner)
                setattr(module, last, getattr(module, last).new_empty(shape))
        broadcast([self.model.get_buffer(name) for name in shapes])


def layer_groups(module: nn.Module, count: int) -> list[dict[str, nn.Module]]:
    """The children of `module` in `count` groups of neighbours, [{name: child}, ...].

    Groups have about equally many layers with parameters. A layer without parameters stays with the one before it.
    Raises ConfigError if there are fewer layers with parameters than groups.
    """
    children = list(module.named_children())
    with_parameters = [index for index, (_, child) in enumerate(children) if any(True for _ in child.parameters())]
    if len(with_parameters) < count:
        what = f"this model has {len(with_parameters)} layers with parameters, too few for {count} places"
        raise ConfigError(f"{what}; type model=mlp model.depth={count - 1}")
    first_of_group = [int(group[0]) for group in torch.tensor(with_parameters).tensor_split(count)]
    starts = [0, *first_of_group[1:], len(children)]
    return [dict(children[start:end]) for start, end in zip(starts, starts[1:], strict=False)]


def model_dtype(precision: str) -> torch.dtype:
    """The type of inputs and ordinary parameters. fp16 and bf16 are autocast over float32 parameters."""
    return {"fp64": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The autocast context of `precision`. fp32 and fp64 compute in the parameters' own type."""
    return torch.autocast(device.type, AUTOCAST_TYPES[precision]) if precision in AUTOCAST_TYPES else nullcontext()


def forward(module: nn.Module, inputs: Any, outputs: Outputs | None = None) -> Any:
    """`module(inputs)`, also for the inputs of a rank whose share of a batch has no samples.

    Many models cannot compute those: `view(len(x), -1)` has no answer for a tensor without elements. So two samples of
    ones stand in for them, and their outputs are cut off: two, because batch norm refuses one, and ones, because these
    are token numbers, masks and pixels that any model takes. Their gradient is zero, and synchronised batch norm does
    not count them.
    """
    given = () if outputs is None else (outputs,)
    has_samples = isinstance(inputs, Tensor) and inputs.dim() and inputs.shape[0]
    if has_samples or next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 1):
        return module(inputs, *given)
    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, SyncBatchNorm):
                stack.enter_context(layer.without_samples())
        ones = map_tensors(lambda tensor: tensor.new_ones(2, *tensor.shape[1:]) if tensor.dim() else tensor, inputs)
        return without_samples(module(ones, *given))


def refuse_changing_weights(model: nn.Module, world_size: int) -> None:
    """Raise ConfigError for a layer whose forward pass changes the weights of the samples that it sees.

    On several ranks these are other weights on each of them.
    """
    for name, module in model.named_modules():
        if world_size > 1 and getattr(module, "max_norm", None) is not None and hasattr(module, "num_embeddings"):
            what = f"{name or 'the model'} has max_norm={module.max_norm}, so its forward pass changes the weights of "
            what += "the samples that a rank sees, which are others on each rank"
            raise ConfigError(f"{what}; leave max_norm out, or type launch=env")


def refuse_sparse_gradients(model: nn.Module, world_size: int) -> None:
    """Raise ConfigError for an embedding whose gradients are sparse, which several ranks do not add up."""
    if world_size > 1 and sparse_parameters(model):
        what = "several ranks add up dense gradients, and the model has an embedding with sparse=True"
        raise ConfigError(f"{what}; make it with sparse=False, or type launch=env")


def refuse_gradient_hooks(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for a weight with a hook for its gradient: `strategy` makes other tensors of the weights."""
    names = [name for name, parameter in model.named_parameters() if compat.has_gradient_hooks(parameter)]
    if names:
        what = f"{first_of(names)} has a hook for its gradient (register_hook), which strategy={strategy} would lose"
        raise ConfigError(f"{what}; type strategy=ddp, or change the gradient in a layer's forward pass")


def refuse_scripted(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for a layer that takes none of the hooks by which `strategy` works."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"strategy={strategy} cannot wrap {name or 'the model'}, which torch.jit has made"
            raise ConfigError(f"{what}; type strategy=ddp")


def refuse_own_step(job: JobSpec, strategy: str) -> None:
    if job.has_own_step:
        what = f"strategy={strategy} computes forward and backward passes itself, and this step calls its own"
        raise ConfigError(f"{what}; type step=default, or strategy=ddp")
