"""Weights, gradients and optimizer state in parts, one per rank (ZeRO, Rajbhandari et al. 2020; torch's FSDP2).

With copies of these parts in other groups of ranks (HSDP, Zhao et al. 2023, section 3.2.2).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.distributed.host import return_large_blocks
from lockstep.distributed.sync_batch_norm import BatchNorm
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, first_of
from lockstep.strategies.base import (
    JobSpec,
    Loss,
    Outputs,
    Strategy,
    refuse_gradient_hooks,
    refuse_scripted,
    refuse_sparse_gradients,
)
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.strategies.sharded_state import cut_like_parameters, gather_full, own_blocks
from lockstep.strategies.tensor_bytes import parameters_on_disk

WHOLE_WEIGHTS = (torch.optim.Adafactor, torch.optim.Rprop)  # their steps fail on DTensors
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class UsedWeights:
    """Which blocks a rank calls in a step, and which weights get a gradient there.

    FSDP2 gathers a block on all ranks at once, in the order in which each calls it. For weights without a gradient it
    adds up zeros, by which an optimizer would move them: by momentum and weight decay.

    finds_unused: the ranks tell each other in each step, and a weight that no rank has used gets no gradient. Else they
        do so in the first step, and each must do the same as then.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], world: World, finds_unused: bool) -> None:
        """blocks: {name: block} that FSDP2 has wrapped, and has gathered for no pass yet."""
        self.world, self.finds_unused, self.is_first = world, finds_unused, True
        self.weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.calls, self.used = list[str](), set[str]()  # of this rank, in this step
        self.expected_calls, self.expected = list[str](), set[str]()
        self.watched = set[str]()  # blocks
        for name, block in blocks.items():
            block.register_forward_pre_hook(partial(self._begin, name))

    def _begin(self, block_name: str, block: nn.Module, inputs: Any) -> None:
        """FSDP2 has gathered the weights of the block."""
        if not block.training:
            return
        self.calls.append(block_name)
        if block_name in self.watched:
            return
        self.watched.add(block_name)
        for name, weight in gathered(block, block_name).items():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(partial(self._use, name))

    def _use(self, name: str, weight: Tensor) -> None:
        self.used.add(name)

    def end_step(self) -> None:
        """After the last backward pass of a step.

        Raises ConfigError, on this rank or on all of them, for calls and gradients that ranks do not have in common.
        """
        calls, used, self.calls, self.used = self.calls, self.used, [], set()
        if self.finds_unused or self.is_first:
            everyone = self.world.all_gather_json((calls, sorted(used)))
            ranks = {rank: (there, set(names)) for rank, (there, names) in enumerate(everyone)}
            self.expected_calls, self.expected = ranks[0][0], set.union(*(names for _, names in ranks.values()))
            self.is_first = False
        else:
            ranks = {self.world.rank: (calls, used)}
        for rank, (calls, used) in ranks.items():
            if calls != self.expected_calls:
                counts = Counter(calls), Counter(self.expected_calls)
                others = sorted((counts[0] - counts[1]) | (counts[1] - counts[0])) or sorted(counts[0])
                raise ConfigError(
                    f"the ranks call {first_of(others)} in unlike orders or not at all in a step, and strategy=fsdp "
                    f"gathers such a block on all of them at once; type strategy=ddp, or strategy.wrap_classes=[<the "
                    f"class of a block that holds them>]"
                )
            if used != self.expected and not self.finds_unused:
                names = first_of(sorted(self.expected ^ used))
                what = f"rank {rank} has no gradient of {names} in some step, and the ranks add up the same ones"
                raise ConfigError(f"{what}; type strategy.find_unused_parameters=true, or parameters.freeze=[<them>]")
        for name, parameter in self.weights.items():
            if name not in self.expected:
                parameter.grad = None


def gathered(block: nn.Module, block_name: str) -> dict[str, nn.Parameter]:
    """{name: weight} of those that FSDP2 gathers for this block: those of blocks inside of it are in parts."""
    root = getattr(block, "model", block) if not block_name else block  # the wrapper of a whole model
    named = root.named_parameters(prefix=block_name)
    return {name: weight for name, weight in named if not isinstance(weight, DTensor)}


class FSDP(Strategy):
    """Cuts every parameter along its first dimension, one part per rank, and gathers a block while it computes.

    A block is gathered inside a group of ranks that holds all parts; gradients are added up inside it, and then each
    part over the groups. In a world of one rank the model stays a plain module.

    replicas: groups of neighbouring ranks with a model each, in parts.
    reshard_after_forward: free gathered weights until the backward pass.
    wrap_classes: class names of the blocks to gather one at a time, see `blocks_to_wrap`.
    wrap_min_parameters: smaller blocks are gathered with their parent.
    find_unused_parameters: some parameters get no gradient in some steps, or not on all ranks.
    """

    replicas_equal = False  # each rank holds its own part
    shards_state = True

    def __init__(
        self,
        replicas: Count,
        reshard_after_forward: bool,
        wrap_classes: Sequence[str],
        wrap_min_parameters: Count,
        find_unused_parameters: bool,
    ) -> None:
        self.replicas, self.reshard_after_forward = replicas, reshard_after_forward
        self.wrap_classes, self.wrap_min_parameters = list(wrap_classes), wrap_min_parameters
        self.find_unused_parameters = find_unused_parameters

    def validate(self, job: JobSpec) -> None:
        validate_replicas("strategy=fsdp", self.replicas, job.world_size)
        if self.find_unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"strategy.find_unused_parameters=true needs a later torch than {torch.__version__} for fsdp; "
                f"type strategy=ddp strategy.find_unused_parameters=true"
            )
        if job.optimizer is torch.optim.SGD and job.fused_optimizer:
            raise ConfigError("strategy=fsdp has no fused SGD in torch; type optimizer.fused=false")
        if job.optimizer in WHOLE_WEIGHTS and job.world_size > 1:
            raise ConfigError(f"torch's {job.optimizer.__name__} cannot step on parts of weights; type strategy=ddp")

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        blocks = blocks_to_wrap(model, self.wrap_classes, self.wrap_min_parameters)
        if world_size == 1:
            return
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0 or not parameter.numel():
                length = "no numbers" if parameter.dim() else "none"
                raise ConfigError(
                    f"strategy=fsdp cuts each parameter along its first dimension, and {name} has "
                    f"{length}; make it one with the shape (1,), or type strategy=ddp"
                )
        refuse_scripted(model, "fsdp")
        refuse_gradient_hooks(model, "fsdp")
        refuse_sparse_gradients(model, world_size)
        gathered = set[nn.Parameter]()
        for block in [*blocks, model]:
            types = {p.dtype: name for name, p in block.named_parameters() if p.requires_grad and p not in gathered}
            gathered.update(block.parameters())
            if len(types) > 1:
                shown = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in types.items())
                raise ConfigError(
                    f"strategy=fsdp adds up the gradients of a block in one type, and {shown}; type strategy=ddp, or "
                    f"strategy.wrap_classes=[<the class of the part with a type of its own>]"
                )

    def building(self, world_size: int) -> AbstractContextManager[None]:
        if world_size == 1:
            return nullcontext()
        return_large_blocks()
        return parameters_on_disk()

    def device_before_setup(self, world: World) -> torch.device:
        return world.device if world.size == 1 else torch.device("cpu")

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        if world.size == 1:
            self.replicas_equal = True
            return
        self.ranks_per_model = world.size // self.replicas
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP2 cannot cut another layout
        if self.replicas == 1:
            mesh = init_device_mesh(world.device.type, (world.size,))
        else:  # a row for each replica, whose columns torch keeps equal
            ranks, shares_model, holds_same = replica_groups(self.replicas, world)
            groups, axes = [holds_same, shares_model], ("replicate", "shard")
            mesh = DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=axes)
        # With autocast alone each weight would be gathered in float32, and its copy in bf16 kept for the backward pass.
        # A batch norm needs its weights in the type of its running statistics.
        precisions = MixedPrecisionPolicy(cast_forward_inputs=False)
        if precision == "bf16" and not any(isinstance(module, BatchNorm) for module in model.modules()):
            precisions = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        names = {module: name for name, module in model.named_modules()} | {self.module: ""}
        blocks = [*blocks_to_wrap(model, self.wrap_classes, self.wrap_min_parameters), self.module]
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=precisions)
        self.used = UsedWeights(model, {names[block]: block for block in blocks}, world, self.find_unused_parameters)
        for wrapped in self._wrapped_modules():
            # The loss is weighted for a sum over ranks, and gloo has no average.
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)
            if hasattr(wrapped, "set_reduce_scatter_unused_params"):
                wrapped.set_reduce_scatter_unused_params(True)  # else gradients are added up by their places

    def _wrapped_modules(self) -> Iterator[FSDPModule]:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                yield module

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        if self.world.size > 1:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(last)
        super().forward_backward(part, loss, weight, last, outputs)
        if last and self.world.size > 1:
            self.used.end_step()

    def evaluate(self, part: LoadedPart, count: Callable[[Any, Any], None]) -> None:
        super().evaluate(part, count)
        for wrapped in self._wrapped_modules():
            wrapped.reshard()  # without a backward pass nothing else frees the gathered weights

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def full_state(self, named: dict[str, Any]) -> dict[str, Any]:
        return gather_full(named, self.world)

    def shard_state(self, named: dict[str, Any]) -> dict[str, Any]:
        return cut_like_parameters(named, self.model)

    def own_blocks(self, named: dict[str, Any]) -> dict[str, Any]:
        return own_blocks(named, self.world)


def blocks_to_wrap(model: nn.Module, class_names: Sequence[str], min_parameters: int) -> list[nn.Module]:
    """The blocks of `model` that are gathered one at a time; the rest is gathered with the whole model.

    With class names: every module of these classes. Without: the model's children with at least `min_parameters`
    parameters, where a container (Sequential, ModuleList, ModuleDict, any module without a forward pass) is not a block
    but a list of blocks. A module that shares a parameter with the rest of the model (tied weights) is left to the
    whole model.
    """
    if class_names:
        blocks = [module for module in model.modules() if type(module).__name__ in class_names and module is not model]
        blocks.reverse()  # fully_shard needs inner modules before outer ones
        if not blocks and type(model).__name__ not in class_names:
            classes = ", ".join(sorted({type(module).__name__ for module in model.modules() if module is not model}))
            raise ConfigError(
                f"strategy.wrap_classes={list(class_names)} names no class of this model ({classes}); "
                f"type strategy.wrap_classes=[]"
            )
    else:
        blocks = [block for block in _children_of_containers(model) if _parameter_count(block) >= min_parameters]
    return [block for block in blocks if not _shares_parameters(block, model)]


def _children_of_containers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_called = getattr(type(child), "forward", None) is not nn.Module.forward
        if isinstance(child, CONTAINERS) or not is_called:
            yield from _children_of_containers(child)
        elif _parameter_count(child):
            yield child


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares_parameters(block: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of `block` has a second name outside of it."""
    inside = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
    everywhere = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return any(everywhere[key] > count for key, count in inside.items())


def validate_replicas(strategy: str, replicas: int, world_size: int) -> None:
    """Raise ConfigError if `world_size` ranks cannot form `replicas` groups of two or more. strategy: as typed."""
    if world_size % replicas or world_size == replicas > 1:
        raise ConfigError(
            f"{strategy} cannot make {replicas} groups of two or more of {world_size} ranks; "
            f"type strategy.replicas=1, or strategy=ddp"
        )


def replica_groups(replicas: int, world: World) -> tuple[Tensor, dist.ProcessGroup, dist.ProcessGroup]:
    """(ranks, the group that shares this rank's model, the group that holds what this rank holds). A collective.

    ranks: (replicas, ranks of a group). Neighbours share a model: they are the likeliest to be on one machine.
    """
    ranks = torch.arange(world.size).view(replicas, -1)
    return ranks, _own_group(ranks, world.timeout), _own_group(ranks.T, world.timeout)


def _own_group(ranks: Tensor, timeout: float) -> dist.ProcessGroup:
    """Each row of `ranks` becomes a group. Returns this rank's. A collective."""
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group
