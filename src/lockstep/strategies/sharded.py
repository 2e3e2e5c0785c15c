"""A model in parts, one per rank: fsdp, HSDP and tensor parallel, by torch's functions on one mesh of ranks.

fsdp (ZeRO, Rajbhandari et al. 2020; torch's fully_shard) cuts weights, gradients and optimizer state, and gathers a
block of the model while it computes. HSDP (Zhao et al. 2023, section 3.2.2) has several copies of these parts. Tensor
parallel (Shoeybi et al. 2019; torch's parallelize_module) cuts layers, and each rank computes with its part.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from lockstep.compat import has_gradient_hooks, quiet_redistribution
from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import fold_in
from lockstep.distributed.sync_batch_norm import BatchNorm
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Loss, Outputs, Strategy, clip_parts, local_part

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
REFUSED_WITH_PLAN = ("sync_bn=on", "trainer.precision=fp16", "trainer.compile")


class Sharded(Strategy):
    """Ranks are in `replicate` groups of neighbours with a model each, in parts. A world of one has a plain module.

    Without a plan each parameter is cut along its first dimension, and all ranks have samples of their own. With one,
    the layers that it names are cut; the ranks that share one layer compute the same samples.

    replicate: copies of the model.
    reshard_after_forward: free gathered weights until the backward pass.
    wrap_classes: class names of the blocks to gather one at a time, see `blocks_to_wrap`.
    wrap_min_parameters: smaller blocks are gathered with their parent.
    parallelize_plan: {a module's name, or a pattern: colwise, rowwise, gathered, or a ParallelStyle of torch}, ...; of
        several that match, the last one wins. colwise cuts the outputs of a linear layer or an embedding, rowwise its
        inputs and adds up what the ranks found, gathered is colwise with whole outputs on every rank.
    shard: with a plan, into how many parts fsdp cuts what a rank holds of a model.
    """

    replicas_equal = False  # each rank holds its own part
    cut_on_cpu = True

    def __init__(
        self,
        replicate: Count,
        reshard_after_forward: bool,
        wrap_classes: Sequence[str],
        wrap_min_parameters: Count,
        parallelize_plan: Sequence[Mapping[Any, Any]] = (),
        shard: Count = 1,
    ) -> None:
        self.replicate, self.shard, self.reshard_after_forward = replicate, shard, reshard_after_forward
        self.wrap_classes, self.wrap_min_parameters = list(wrap_classes), wrap_min_parameters
        self.plan = [(str(pattern), style) for entry in parallelize_plan for pattern, style in entry.items()]
        self.name = "tensor_parallel" if self.plan else "fsdp"
        self.refused = (*Strategy.refused, *(REFUSED_WITH_PLAN if self.plan else ()))

    def validate(self, job: JobSpec) -> None:
        super().validate(job)
        groups = self.replicate * (self.shard if self.plan else 1)
        if job.world_size % groups or job.world_size == groups > 1:
            what = f"strategy={self.name} cannot make {groups} groups of two or more of {job.world_size} ranks"
            raise ConfigError(f"{what}; type strategy.replicate=1 and strategy.shard=1, or strategy=ddp")

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        """(copies of the model, parts that fsdp makes of one, ranks that share a layer). Their product is all ranks."""
        shard = self.shard if self.plan else world_size // self.replicate
        return self.replicate, shard, world_size // (self.replicate * shard)

    def data_share_of(self, world_size: int) -> int:
        replicate, shard, _ = self.sizes(world_size)
        return replicate * shard

    def spread(self) -> None:
        self.blocks: list[Any] = []  # that fsdp gathers one at a time
        self.tensor, model, world = 1, self.model, self.world
        if world.size == 1:
            return
        replicate, shard, self.tensor = self.sizes(world.size)
        self.ranks_per_model, self.counts = shard * self.tensor, world.rank % self.tensor == 0
        if any(map(has_gradient_hooks, model.parameters())):
            what = f"a weight has a hook for its gradient (register_hook), which strategy={self.name} would lose"
            raise ConfigError(f"{what}; type strategy=ddp, or change the gradient in a layer's forward pass")
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # torch cannot cut another layout
        lengths = {"replicate": replicate, "shard": shard, "tensor": self.tensor}
        axes = tuple(name for name, length in lengths.items() if length > 1 or (name == "shard" and replicate > 1))
        mesh = init_device_mesh(world.device.type, tuple(lengths[name] for name in axes), mesh_dim_names=axes)
        for name in axes:
            mesh.get_group(name).set_timeout(timedelta(seconds=world.timeout))
        quiet_redistribution()
        if self.tensor > 1:
            model.to(world.device)
            self._cut_layers(mesh["tensor"])
        is_cut = [isinstance(parameter, DTensor) for parameter in model.parameters()]
        if "shard" in axes:
            self._cut_blocks(mesh["replicate", "shard"] if replicate > 1 else mesh["shard"])
        self.whole = [parameter for parameter, cut in zip(model.parameters(), is_cut, strict=True) if not cut]

    def _cut_layers(self, mesh: DeviceMesh) -> None:
        self.region = CutRegion(mesh.get_local_rank(), self.tensor, self.world.device)
        self.shares_layers = mesh.get_group()
        layers = layers_of_plan(self.model, self.plan)
        parallelize_module(self.model, mesh, {name: style for name, (_, style) in layers.items()}, src_data_rank=None)
        for layer, style in layers.values():
            if isinstance(style, RowwiseParallel) and all(isinstance(layout, Shard) for layout in style.input_layouts):
                layer.register_forward_pre_hook(self.region.leave, prepend=True)  # sees the rank's own inputs
            if isinstance(style, ColwiseParallel) and all(isinstance(layout, Shard) for layout in style.output_layouts):
                layer.register_forward_hook(self.region.enter)
            if isinstance(style, ColwiseParallel | RowwiseParallel):
                # A change in place of what comes out of a DTensor is refused, and would lose fully_shard's hook.
                layer.register_forward_hook(lambda layer, inputs, outputs: outputs.clone())

    def _cut_blocks(self, mesh: DeviceMesh) -> None:
        # With autocast alone each weight would be gathered in float32, and its copy in bf16 kept for the backward pass.
        # A batch norm needs its weights in the type of its running statistics.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.precision == "bf16" and not any(isinstance(module, BatchNorm) for module in self.model.modules()):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self.blocks = [*blocks_to_wrap(self.model, self.wrap_classes, self.wrap_min_parameters), self.module]
        self.waits_for_gradients = True
        self.calls, self.used, self.watched = list[int](), set[str](), set[str]()  # blocks and weights of this step
        self.expected: list[int] | None = None  # the calls of each step, on each rank
        for number, block in enumerate(self.blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
            # The loss is weighted for a sum over ranks, and gloo has no average.
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)
            if hasattr(block, "set_reduce_scatter_unused_params"):
                block.set_reduce_scatter_unused_params(True)  # else gradients are added up by their places
            block.register_forward_pre_hook(partial(self._note_uses, number))

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        if self.blocks:
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        if self.tensor > 1:
            self.region.outside = None  # a style of torch's may not have left it
        super().forward_backward(part, loss, weight, last, outputs)
        if last and self.blocks:
            self._require_same_uses()
        if last and self.tensor > 1:
            self._average_whole_weights()

    def _note_uses(self, number: int, block: nn.Module, inputs: Any) -> None:
        """Of a block whose weights fully_shard has just gathered: these get the gradients."""
        if block.training:
            self.calls.append(number)
        if len(self.watched) == len(self.trained):
            return
        parts = dict(self.trained)
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and name not in self.watched and weight is not parts[name]:
                self.watched.add(name)
                weight.register_post_accumulate_grad_hook(partial(self._use, name))

    def _use(self, name: str, weight: Tensor) -> None:
        self.used.add(name)

    def _require_same_uses(self) -> None:
        """Before the update. Ranks that call blocks in another order have gathered parts of several blocks as one, and
        a weight that no rank has used has a gradient of zeros, by which an optimizer would move it."""
        calls, used, self.calls, self.used = self.calls, self.used, [], set()
        for name, weight in self.trained:
            if name not in used:
                weight.grad = None
        self.require_gradients()
        everyone = [calls]
        if self.expected is None:
            everyone = self.world.all_gather_json(calls)
            self.expected = everyone[0]
        if any(there != self.expected for there in everyone):
            what = f"strategy={self.name} needs the same blocks in the same order on all ranks, in all steps"
            raise ConfigError(f"{what}; type strategy=ddp strategy.find_unused_parameters=true")

    @torch.no_grad()
    def _average_whole_weights(self) -> None:
        """The gradients of weights that no layer of the plan has, over the ranks that share layers: see `CutRegion`."""
        for gradient in [local_part(parameter.grad) for parameter in self.whole if parameter.grad is not None]:
            total = gradient.contiguous()
            dist.all_reduce(total, group=self.shares_layers)
            gradient.copy_(total / self.tensor)

    def evaluate(self, part: LoadedPart, count: Callable[[Any, Any], None]) -> None:
        super().evaluate(part, count)
        for block in self.blocks:
            block.reshard()  # without a backward pass nothing else frees the gathered weights

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """On the parts: torch cannot mix DTensors of several meshes, or with other tensors, in one call."""
        if self.world.size == 1:
            return super().clip_grad_norm(parameters, max_norm)
        by_copies = defaultdict[int, list[Tensor]](list)
        for parameter in parameters:
            gradient, parts = parameter.grad, 1
            if isinstance(gradient, DTensor):
                placements = parameter.placements  # type: ignore[attr-defined]
                if gradient.placements != placements:
                    parameter.grad = gradient = gradient.redistribute(placements=placements)
                lengths = zip(gradient.device_mesh.shape, placements, strict=True)
                parts = prod(length for length, placed in lengths if not placed.is_replicate())
            if gradient is not None:
                by_copies[self.world.size // parts].append(local_part(gradient))
        return clip_parts(by_copies, max_norm, self.world)


class CutRegion:
    """From the outputs of colwise layers to the inputs of rowwise ones, each rank has a part of an activation.

    In there each rank draws its own random numbers, as its part needs another dropout mask than the others'. Gradients
    are `size` times as large there. So of a weight that every rank has as a whole, the mean of the ranks' gradients is
    the right one: in there each rank computes a part of the gradient, and outside all of them compute all of it.

    number: of this rank among the `size` ones that share a layer.
    """

    def __init__(self, number: int, size: int, device: torch.device) -> None:
        self.number, self.size = number, size
        on_cpu = device.type == "cpu"
        self.generator = torch.default_generator if on_cpu else torch.cuda.default_generators[device.index]
        self.outside: Tensor | None = None  # the generator's state, while this rank is inside

    def enter(self, layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        """A colwise layer has computed its part."""
        if layer.training and self.outside is None:
            seed = torch.randint(2**62, (), generator=self.generator, device=self.generator.device)
            self.outside = self.generator.get_state()
            self.generator.manual_seed(fold_in(int(seed), self.number))
        return with_gradient_times(1 / self.size, outputs)

    def leave(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A rowwise layer is about to compute with its part."""
        if self.outside is not None:
            self.generator.set_state(self.outside)
            self.outside = None
        return with_gradient_times(self.size, inputs[0]), *inputs[1:]


def with_gradient_times(factor: float, tensor: Tensor) -> Tensor:
    """The values of `tensor`, with `factor` times its gradient."""
    if not tensor.requires_grad:
        return tensor
    same = tensor.view_as(tensor)
    same.register_hook(lambda gradient: gradient * factor)
    return same


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
        if not blocks:
            what = f"strategy.wrap_classes={list(class_names)} names no class inside this model"
            raise ConfigError(f"{what}; type strategy.wrap_classes=[]")
    else:
        blocks = [block for block in _children(model) if sum(map(torch.numel, block.parameters())) >= min_parameters]
    everywhere = names_of_weights(model)
    return [
        block for block in blocks if all(everywhere[one] == count for one, count in names_of_weights(block).items())
    ]


def names_of_weights(module: nn.Module) -> Counter[nn.Parameter]:
    """How many names each parameter has in `module`: tied weights have several."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_called = getattr(type(child), "forward", None) is not nn.Module.forward
        if isinstance(child, CONTAINERS) or not is_called:
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


def layers_of_plan(
    model: nn.Module, plan: Sequence[tuple[str, str | ParallelStyle]]
) -> dict[str, tuple[nn.Module, ParallelStyle]]:
    """{name of a module: (module, style)} of those that the plan cuts.

    Raises ConfigError for a pattern of no module and for a weight with two names, of which only one would be cut.
    """
    layers, names = {}, names_of_weights(model)
    for pattern, style in plan:
        matched = {name: layer for name, layer in model.named_modules() if fnmatchcase(name, pattern)}
        if not matched:
            example = "strategy.parallelize_plan=[{<module>:colwise},{<the next one>:rowwise}]"
            raise ConfigError(f"strategy.parallelize_plan: no module is named {pattern}; type model=gpt, or {example}")
        for name, layer in matched.items():
            if any(names[parameter] > 1 for parameter in layer.parameters(recurse=False)):
                what = f"strategy.parallelize_plan cuts {name}, whose weight is also one of another layer"
                raise ConfigError(f"{what}; type model.tied=false if model=gpt, or a plan without it")
            layers[name] = layer, _parallel_style(style, layer)
    return layers


def _parallel_style(style: str | ParallelStyle, layer: nn.Module) -> ParallelStyle:
    styles: dict[Any, ParallelStyle] = {
        "colwise": ColwiseParallel(output_layouts=Shard(-1)),
        "gathered": ColwiseParallel(output_layouts=Replicate()),
        # Every rank has all token numbers of an embedding.
        "rowwise": RowwiseParallel(input_layouts=Replicate() if isinstance(layer, nn.Embedding) else Shard(-1)),
    }
    return style if isinstance(style, ParallelStyle) else styles[style]
