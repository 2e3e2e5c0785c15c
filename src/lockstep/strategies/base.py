"""The contract of a strategy: how a model, its data and its training step are spread over ranks.

The base class serves a plain module, whole on every rank. A strategy overrides what differs and nothing else.
To add one: a class in a file of its own here, and `conf/strategy/<name>.yaml` with its `_target_`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lockstep import compat
from lockstep.data.dataset import map_tensors, tensors_in, without_samples
from lockstep.data.partition import Part, micro_batch_parts, seeded
from lockstep.distributed.sync_batch_norm import SyncBatchNorm
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, first_of
from lockstep.models.base import sparse_parameters
from lockstep.strategies.tensor_bytes import broadcast

if TYPE_CHECKING:
    from lockstep.strategies.gradient_sync import GradientSync

log = logging.getLogger(__name__)

WATCHED_STEPS = 20  # of a process, in which it looks for what would go wrong without a word
NAMED = 4  # parameters that a sentence names
OF_ROUNDING = 0.05  # relative, also in bfloat16; a hook that is not linear is off by half

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> the loss of these samples as one number, summed and weighted as the step needs it."""


class UnusedParameters(ConfigError):
    """A rank has no gradient of parameters whose gradients the ranks add up."""

    def __init__(self, names: Sequence[str], rank: int) -> None:
        super().__init__(
            f"rank {rank} has no gradient of {first_of(names)} in some step, and the ranks add up the same ones; "
            f"type strategy.find_unused_parameters=true, "
            f"or parameters.freeze=[{','.join(names[:NAMED])}] if they are never used"
        )


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
    profile: bool
    nan: str  # "stop" or "skip"
    save_unit: str  # "epoch", "step" or "min"
    optimizer: Any  # the class, or whatever `optimizer._target_` names
    fused_optimizer: bool


class Strategy:
    """A plain module, the same on every rank.

    `module` is what a forward pass calls; `model` is the net inside it, whose parameters carry the names that the
    model gave them. `ranks_per_model` is how many ranks hold a model together, each a part of it: ranks this far apart
    hold the same. `setup` sets them.
    """

    module: nn.Module
    model: nn.Module
    world: World
    ranks_per_model: int

    supports_sync_bn = True
    """Whether batch norms of several ranks can add up their statistics in each forward pass."""
    ranks_agree = True
    """Whether all ranks have the same gradient, and so the same weights, after every step."""
    communicates_in_forward = False
    """Whether a rank waits for the work of others in its passes: then its own time for a step cannot be told."""
    shards_state = False
    """Whether the ranks can save the state in parts: see `own_blocks`."""

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

    def setup(self, model: nn.Module, world: World, gradient_sync: "GradientSync", precision: str = "fp32") -> None:
        """Take over `model`, which is on `device_before_setup`, and spread it over the ranks.

        gradient_sync: how DistributedDataParallel averages gradients. Other strategies do not use it.
        precision: as trainer.precision.
        """
        self.world = world
        self.module = self.model = model
        self.ranks_per_model = 1

    def syncs_batch_norm(self, mode: str, world_size: int) -> bool:
        """Whether batch norm covers the whole global batch. mode: conf/sync_bn's "on", "off" or "auto"."""
        if mode == "auto":
            return self.supports_sync_bn and self.data_parallel_size(world_size) > 1
        return mode == "on"

    def batch_norm_sees(self) -> str:
        """Which part of a batch a batch norm sees that is not synchronised, such as "a rank's share".

        Empty if that does not depend on the number of ranks.
        """
        return "a rank's share" if self.supports_sync_bn else ""

    # Data: who reads which samples.

    def data_parallel_size(self, world_size: int) -> int:
        """How many different shares a global batch is cut into. Ranks that work on the same samples count once."""
        return world_size

    def data_parallel_rank(self, world: World) -> int:
        """Which of these shares is this rank's."""
        return world.rank

    def evaluation_share(self, world: World) -> tuple[int, int]:
        """Which share of an evaluation is this rank's, and of how many: those of a global batch."""
        return self.data_parallel_rank(world), self.data_parallel_size(world.size)

    def parts(self, batch: Tensor, accumulation_steps: int) -> list[Part]:
        """This rank's parts of a global batch of sample indices (N,), one forward pass each."""
        size = self.data_parallel_size(self.world.size)
        return micro_batch_parts(batch, accumulation_steps, self.data_parallel_rank(self.world), size)

    # One step.

    def own_epoch(self) -> Callable[..., int] | None:
        """What trains an epoch in place of `lockstep.training.loop.train_epoch`, with its arguments and its result.

        For steps that are not one forward, backward and update on all ranks together. None: they are.
        """
        return None

    def forward_backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss_function: LossFunction,
        autocast: AbstractContextManager[Any],
        is_last: bool,
    ) -> None:
        """One forward and backward pass. `is_last`: this is the last part of the step, so gradients can be averaged."""
        with autocast:
            outputs = forward(self.module, inputs)
        loss_function(outputs, targets).backward()

    def unfreeze(self, parameters: list[nn.Parameter], what: str) -> None:
        """From this step on `parameters`, which were frozen in `setup`, are trained, too.

        what: the fact as a sentence's beginning. Raises ConfigError where it cannot be followed.
        """
        raise ConfigError(f"{what}, which only strategy=ddp can follow; type strategy=ddp, or train it from the start")

    def freeze(self, what: str) -> None:
        """Parameters that were trained are no longer. Raises ConfigError, which begins with `what`, as `unfreeze`."""

    def average_apart(self) -> None:
        """Average the gradients that no backward pass has averaged: sparse ones, and those of `unfreeze`."""

    def counts_samples(self) -> bool:
        """Whether this rank's sums are added up, after `setup`. False if another rank computes the same samples."""
        return True

    def sum_counts(self, counts: Tensor) -> Tensor:
        """(parts,), of each part that this rank has of a global batch -> 0-d, of the whole batch. A collective."""
        count = counts.sum()
        return count if self.data_parallel_size(self.world.size) == 1 else self.world.all_reduce_sum(count)

    def gradient_divide_factor(self) -> int:
        """What gradient averaging divides the sum of the ranks' gradients by. The loss is multiplied by it before."""
        return 1

    def clip_grad_norm(self, max_norm: float) -> None:
        """Scale the gradients so that the norm over the whole model is at most `max_norm`."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def grad_norm(self) -> Tensor:
        """The norm of the gradients, 0-d: over the whole model, or of this rank's own where ranks do not average."""
        return get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def eval_step(
        self,
        inputs: Tensor,
        targets: Tensor,
        count: Callable[[Tensor, Tensor], None],
        autocast: AbstractContextManager[Any],
    ) -> None:
        """One forward pass without gradients; `count(outputs, targets)` takes its outputs."""
        with autocast:
            outputs = forward(self.model, inputs)
        if self.counts_samples():
            count(outputs, targets)

    def epoch_metrics(self) -> dict[str, float]:
        """{tag: number} of the epoch just trained, beside loss and metrics."""
        return {}

    # State: what ranks hold, and what a snapshot holds.

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

    def average_replicas(self, tensors: Iterable[Tensor]) -> None:
        """Average `tensors` over the ranks in place. Ranks that never differ draw nothing from the iterable."""

    def replicated_tensors(self) -> dict[str, Tensor]:
        """{name: parameter or buffer} that has the same bits on several ranks after every step. A damaged one is found.

        These are all ranks, or those `ranks_per_model` apart. Buffers: those of synchronised batch norms.
        """
        has_replicas = 1 < self.ranks_per_model < self.world.size
        if not (self.ranks_agree or has_replicas):
            return {}
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        for name, module in self.model.named_modules():
            if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
                tensors.update(module.named_buffers(prefix=name, recurse=False))
        return tensors

    def full_state(self, named: dict[str, Any]) -> dict[str, Any]:
        """{parameter or buffer name: nested tensors}, as this rank holds them -> the whole model's, on rank 0.

        Every rank calls this. The values may be nested: a parameter's optimizer state is a dict of tensors.
        """
        return named

    def shard_state(self, named: dict[str, Any]) -> dict[str, Any]:
        """The reverse of `full_state`, called by every rank with the whole state: this rank's part of it.

        Of a sharded snapshot the values are StoredTensors. Those of this rank's part that stay so are read as a whole.
        """
        return named

    def own_blocks(self, named: dict[str, Any]) -> dict[str, Any]:
        """As `full_state`, but each tensor becomes the `Block` that this rank saves. With `shards_state`.

        The ranks save all of each tensor together, and nothing twice.
        """
        raise NotImplementedError


def refuse_changing_weights(model: nn.Module, world_size: int) -> None:
    """Raise ConfigError for a layer whose forward pass changes the weights of the samples that it sees.

    On several ranks these are other weights on each of them.
    """
    for name, module in model.named_modules():
        if world_size > 1 and getattr(module, "max_norm", None) is not None and hasattr(module, "num_embeddings"):
            raise ConfigError(
                f"{name or 'the model'} has max_norm={module.max_norm}, so its forward pass changes the weights of the "
                f"samples that a rank sees, which are others on each rank; leave max_norm out, or type launch=env"
            )


def refuse_sparse_gradients(model: nn.Module, strategy: str) -> None:
    if sparse_parameters(model):
        raise ConfigError(
            f"strategy={strategy} adds up dense gradients, and the model has an embedding with sparse=True; "
            f"type strategy=ddp, or make the embedding with sparse=False"
        )


def refuse_gradient_hooks(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for a weight with a hook for its gradient: `strategy` makes other tensors of the weights."""
    for name, parameter in model.named_parameters():
        if compat.has_gradient_hooks(parameter):
            raise ConfigError(
                f"{name} has a hook for its gradient (register_hook), which strategy={strategy} would lose; "
                f"type strategy=ddp, or change the gradient in a layer's forward pass"
            )


def warn_of_gradient_hooks(model: nn.Module) -> None:
    """Log a warning for weights with a hook for their gradient that is not linear: what it gives for the parts of a
    batch does not add up to what it gives for the whole."""
    hooks = {name: (parameter, compat.gradient_hooks(parameter)) for name, parameter in model.named_parameters()}
    names = [name for name, (weight, own) in hooks.items() if not all(_is_linear(hook, weight) for hook in own)]
    if names:
        log.warning(
            "%s has a hook for its gradient (register_hook) that is not linear, such as a clamp, and sees that of a "
            "part of a batch: the numbers depend on the ranks and on trainer.gradient_accumulation_steps; type "
            "trainer.max_grad_norm=<number> to clip the gradient of the whole batch, or change it in the optimizer",
            first_of(names),
        )


@torch.no_grad()
def _is_linear(hook: Callable[[Tensor], Tensor | None], weight: Tensor) -> bool:
    """Whether hook(a + b) = hook(a) + hook(b), and hook(size * a) = size * hook(a). True if it takes no such gradients,
    as one for sparse ones does."""
    numbers = torch.Generator().manual_seed(0)

    def changed(gradient: Tensor) -> Tensor:
        given = gradient.clone()
        with seeded(0):  # it may draw
            found = hook(given)
        return given if found is None else found

    with suppress(Exception):
        a, b = (torch.randn(weight.shape, generator=numbers, dtype=weight.dtype).to(weight.device) for _ in range(2))
        first, second = changed(a), changed(b)
        pairs = [(changed(a + b), first + second), *((changed(size * a) / size, first) for size in (1e-6, 1e6))]
        apart = [(one - other).abs().max() / torch.maximum(one.abs(), other.abs()).max() for one, other in pairs]
        return not any(distance > OF_ROUNDING for distance in apart)  # NaN: of zeros
    return True


def refuse_scripted(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for a layer that takes none of the hooks by which `strategy` works."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"strategy={strategy} cannot wrap {name or 'the model'}, which torch.jit has made; type strategy=ddp"
            )


def forward(module: nn.Module, inputs: Any) -> Any:
    """`module(inputs)`, also for the inputs of a rank whose share of a batch has no samples."""
    if next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 1):
        return module(inputs)
    return forward_empty_batch(module, inputs)


def forward_empty_batch(module: nn.Module, inputs: Any) -> Any:
    """The outputs for inputs without samples, such as of an epoch's last batch of one sample.

    Many models cannot compute those: `view(len(x), -1)` has no answer for a tensor without elements. So two samples of
    ones stand in for them, and their outputs are cut off: two, because batch norm refuses one, and ones, because these
    are token numbers, masks and pixels that any model takes. Their gradient is zero, and synchronised batch norm does
    not count them.
    """
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, SyncBatchNorm):
                stack.enter_context(part.without_samples())
        ones = map_tensors(lambda tensor: tensor.new_ones(2, *tensor.shape[1:]) if tensor.dim() else tensor, inputs)
        outputs = module(ones)
    return without_samples(outputs)


# until issue 44
def weights_behind(starts: Iterable[Any], ends: Iterable[Any] = ()) -> list[Tensor]:
    """The weights in autograd's graph from the nodes `starts` on, up to the nodes `ends`."""
    weights, seen, nodes = list[Tensor](), set(ends), list(starts)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        weight = getattr(node, "variable", None)  # of the nodes that add to .grad
        if weight is not None:
            weights.append(weight)
        with suppress(RuntimeError):  # before torch 2.14 a function of the user's may not tell
            nodes += [following for following, _ in node.next_functions]
    return weights
