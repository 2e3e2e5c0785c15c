"""A model in parts, one per rank: fsdp, HSDP and tensor parallel, by torch's functions on one mesh of ranks.

fsdp (ZeRO, Rajbhandari et al. 2020; torch's fully_shard) cuts weights, gradients and optimizer state, and gathers a
block of the model while it computes. HSDP (Zhao et al. 2023, section 3.2.2) has several copies of these parts. Tensor
parallel (Shoeybi et al. 2019; torch's parallelize_module) cuts layers, and each rank computes with its part.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lockstep.compat import has_gradient_hooks, quiet_redistribution
from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import fold_in
from lockstep.distributed.sync_batch_norm import BatchNorm
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Loss, Outputs, Strategy, local_part


@dataclass
class Sharded(Strategy):
    """Ranks are in `replicate` groups of neighbours with a model each, in parts. A world of one has a plain module.

    Without a plan each parameter is cut along its first dimension, and all ranks have samples of their own. With one,
    the layers that it names are cut, and the ranks that share a layer compute the same samples: colwise cuts outputs of
    a linear layer or an embedding, rowwise its inputs and adds up what the ranks found, gathered is colwise with whole
    outputs on every rank. Of several patterns that match a module the last one wins.
    """

    replicate: Count
    reshard_after_forward: bool
    wrap_classes: Sequence[str]
    wrap_min_parameters: Count
    parallelize_plan: Sequence[Mapping[Any, Any]] = ()
    shard: Count = 1
    replicas_equal = False  # each rank holds its own part
    cut_on_cpu = True

    def __post_init__(self) -> None:
        self.outside: Tensor | None = None  # the generator's state, while this rank computes between cut layers
        self.plan = [(str(pattern), style) for entry in self.parallelize_plan for pattern, style in entry.items()]
        self.name = "tensor_parallel" if self.plan else "fsdp"
        if self.plan:
            self.refused = (*self.refused, "sync_bn=on", "trainer.precision=fp16", "trainer.compile")

    def validate(self, job: JobSpec) -> None:
        super().validate(job)
        groups = self.replicate * (self.shard if self.plan else 1)
        if job.world_size % groups or job.world_size == groups > 1:
            what = f"strategy={self.name} cannot make {groups} groups of two or more of {job.world_size} ranks"
            raise ConfigError(f"{what}; type strategy.replicate=1 and strategy.shard=1, or strategy=ddp")

    def sizes(self, world_size: int) -> dict[str, int]:
        """How many copies of the model there are, parts that fsdp makes of one, and ranks that share a layer."""
        shard = self.shard if self.plan else world_size // self.replicate
        return {"replicate": self.replicate, "shard": shard, "tensor": world_size // (self.replicate * shard)}

    def data_share_of(self, world_size: int) -> int:
        return world_size // self.sizes(world_size)["tensor"]

    def spread(self) -> None:
        self.blocks, self.tensor = list[Any](), 1  # what fsdp gathers one at a time; how many ranks share a layer
        model, world = self.model, self.world
        if world.size == 1:
            return
        if any(map(has_gradient_hooks, model.parameters())):
            what = f"a weight has a hook for its gradient (register_hook), which strategy={self.name} would lose"
            raise ConfigError(f"{what}; type strategy=ddp, or change the gradient in a layer's forward pass")
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # torch cannot cut another layout
        sizes = self.sizes(world.size)
        self.tensor, self.ranks_per_model = sizes["tensor"], world.size // self.replicate
        self.counts = world.rank % self.tensor == 0
        axes = tuple(axis for axis, size in sizes.items() if size > 1 or (axis == "shard" and self.replicate > 1))
        mesh = init_device_mesh(world.device.type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
        for axis in axes:
            mesh.get_group(axis).set_timeout(timedelta(seconds=world.timeout))
        quiet_redistribution()
        if self.tensor > 1:
            self._cut_layers(mesh["tensor"])
        is_whole = [not isinstance(parameter, DTensor) for parameter in model.parameters()]
        if "shard" in axes:
            self._cut_blocks(mesh[tuple(axis for axis in axes if axis != "tensor")])
        self.whole = list(itertools.compress(model.parameters(), is_whole))  # that no layer of the plan has

    def _cut_layers(self, mesh: DeviceMesh) -> None:
        device = self.world.device
        self.shares_layers, is_gpu = mesh.get_group(), device.type == "cuda"
        self.generator = torch.cuda.default_generators[device.index] if is_gpu else torch.default_generator
        styles = styles_of_plan(self.model.to(device), self.plan)
        parallelize_module(self.model, mesh, dict(styles), src_data_rank=None)
        for name, style in styles.items():
            layer = self.model.get_submodule(name)
            if isinstance(style, RowwiseParallel) and all(isinstance(layout, Shard) for layout in style.input_layouts):
                layer.register_forward_pre_hook(self._leave, prepend=True)  # sees the rank's own inputs
            if isinstance(style, ColwiseParallel) and all(isinstance(layout, Shard) for layout in style.output_layouts):
                layer.register_forward_hook(self._enter)
            if isinstance(style, ColwiseParallel | RowwiseParallel):
                # A change in place of what comes out of a DTensor is refused, and would lose fully_shard's hook.
                layer.register_forward_hook(lambda layer, inputs, outputs: outputs.clone())

    # From the outputs of colwise layers to the inputs of rowwise ones, each rank has a part of an activation. In there
    # each rank draws its own random numbers, as its part needs another dropout mask than the others'. Gradients are
    # `tensor` times as large there. So of a weight that every rank has as a whole, the mean of the ranks' gradients is
    # the right one: in there each rank computes a part of the gradient, and outside all of them compute all of it.

    def _enter(self, layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        """A colwise layer has computed its part."""
        if layer.training and self.outside is None:
            seed = torch.randint(2**62, (), generator=self.generator, device=self.generator.device)
            self.outside = self.generator.get_state()
            self.generator.manual_seed(fold_in(int(seed), self.world.rank % self.tensor))
        return with_gradient_times(1 / self.tensor, outputs)

    def _leave(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A rowwise layer is about to compute with its part."""
        if self.outside is not None:
            self.generator.set_state(self.outside)
            self.outside = None
        return with_gradient_times(self.tensor, inputs[0]), *inputs[1:]

    def _cut_blocks(self, mesh: DeviceMesh) -> None:
        # With autocast alone each weight would be gathered in float32, and its copy in bf16 kept for the backward pass.
        # A batch norm needs its weights in the type of its running statistics.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.precision == "bf16" and not any(isinstance(module, BatchNorm) for module in self.model.modules()):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self.blocks = [*blocks_to_wrap(self.model, self.wrap_classes, self.wrap_min_parameters), self.module]
        self.waits_for_gradients = True
        self.calls, self.expected = list[int](), list[int]()  # of blocks: in this step, and in each on each rank
        for number, block in enumerate(self.blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
            # The loss is weighted for a sum over ranks, and gloo has no average.
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)
            block.register_forward_pre_hook(lambda block, _, n=number: self.calls.append(n) if block.training else None)

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        self.outside = None  # a style of torch's may not have left it
        if self.blocks:
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        super().forward_backward(part, loss, weight, last, outputs)
        if last and self.blocks:  # before the update: ranks that call blocks in another order have gathered wrong parts
            self.require_gradients()
            calls, self.calls = self.calls, []
            everyone = [calls] if self.expected else self.world.all_gather_json(calls)
            self.expected = self.expected or everyone[0]
            if any(there != self.expected for there in everyone):
                what = f"strategy={self.name} needs the same blocks in the same order on all ranks, in all steps"
                raise ConfigError(f"{what}; type strategy=ddp strategy.find_unused_parameters=true")
        if last and self.tensor > 1:
            with torch.no_grad():
                for gradient in [local_part(parameter.grad) for parameter in self.whole if parameter.grad is not None]:
                    total = gradient.contiguous()
                    dist.all_reduce(total, group=self.shares_layers)
                    gradient.copy_(total / self.tensor)

    def evaluate(self, part: LoadedPart, count: Callable[[Any, Any], None]) -> None:
        super().evaluate(part, count)
        for block in self.blocks:
            block.reshard()  # without a backward pass nothing else frees the gathered weights

    def gradients_of(self, parameters: Sequence[nn.Parameter]) -> Mapping[int, Sequence[Tensor]]:
        """The parts: torch cannot mix DTensors of several meshes, or with other tensors, in one call."""
        found = defaultdict[int, list[Tensor]](list)
        for parameter in parameters:
            gradient, parts = parameter.grad, 1
            if isinstance(gradient, DTensor):
                placements = parameter.placements  # type: ignore[attr-defined]
                if gradient.placements != placements:
                    parameter.grad = gradient = gradient.redistribute(placements=placements)
                lengths = zip(gradient.device_mesh.shape, placements, strict=True)
                parts = prod(length for length, placed in lengths if not placed.is_replicate())
            if gradient is not None:
                found[self.world.size // parts].append(local_part(gradient))
        return found


def with_gradient_times(factor: float, tensor: Tensor) -> Tensor:
    """The values of `tensor`, with `factor` times its gradient."""
    same = tensor.view_as(tensor)
    if same.requires_grad:
        same.register_hook(lambda gradient: gradient * factor)
    return same


def blocks_to_wrap(model: nn.Module, class_names: Sequence[str], min_parameters: int) -> list[nn.Module]:
    """The blocks of `model` that are gathered one at a time; the rest is gathered with the whole model. With class
    names: every module of these classes. Without: the model's children with at least `min_parameters` parameters, where
    a container (any module without a forward pass of its own) is not a block but a list of blocks. A module that shares
    a parameter with the rest of the model (tied weights) is left to the whole model."""
    if class_names:
        blocks = [module for module in model.modules() if type(module).__name__ in class_names and module is not model]
        blocks.reverse()  # fully_shard needs inner modules before outer ones
        if not blocks:
            what = f"strategy.wrap_classes={list(class_names)} names no class inside this model"
            raise ConfigError(f"{what}; type strategy.wrap_classes=[]")
    else:
        blocks = [block for block in _children(model) if sum(map(torch.numel, block.parameters())) >= min_parameters]
    names = names_of_weights(model)
    return [block for block in blocks if all(names[one] == count for one, count in names_of_weights(block).items())]


def names_of_weights(module: nn.Module) -> Counter[nn.Parameter]:
    """How many names each parameter has in `module`: tied weights have several."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.Sequential) or getattr(type(child), "forward", None) is nn.Module.forward:
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


def styles_of_plan(model: nn.Module, plan: Sequence[tuple[str, str | ParallelStyle]]) -> dict[str, ParallelStyle]:
    """{name of a module that the plan cuts: how}. Raises ConfigError for a pattern of no module and for a weight with
    two names, of which only one would be cut."""
    found, names = dict[str, ParallelStyle](), names_of_weights(model)
    for pattern, style in plan:
        matched = [(name, layer) for name, layer in model.named_modules() if fnmatchcase(name, pattern)]
        if not matched:
            example = "strategy.parallelize_plan=[{<module>:colwise},{<the next one>:rowwise}]"
            raise ConfigError(f"strategy.parallelize_plan: no module is named {pattern}; type model=gpt, or {example}")
        for name, layer in matched:
            if any(names[parameter] > 1 for parameter in layer.parameters(recurse=False)):
                what = f"strategy.parallelize_plan cuts {name}, whose weight is also one of another layer"
                raise ConfigError(f"{what}; type model.tied=false if model=gpt, or a plan without it")
            # Every rank has all token numbers of an embedding.
            entering = Replicate() if isinstance(layer, nn.Embedding) else Shard(-1)
            styles: dict[Any, ParallelStyle] = {
                "colwise": ColwiseParallel(output_layouts=Shard(-1)),
                "gathered": ColwiseParallel(output_layouts=Replicate()),
                "rowwise": RowwiseParallel(input_layouts=entering),
            }
            found[name] = style if isinstance(style, ParallelStyle) else styles[style]
    return found
