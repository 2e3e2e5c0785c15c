"""A model in parts, one per rank: fsdp, HSDP and tensor parallel, by torch's functions on one mesh of ranks.

fsdp (ZeRO, Rajbhandari et al. 2020; torch's fully_shard) cuts weights, gradients and optimizer state, and gathers a
block of the model while it computes. HSDP (Zhao et al. 2023, section 3.2.2) has several copies of these parts. Tensor
parallel (Shoeybi et al. 2019; torch's parallelize_module) cuts layers, and each rank computes with its part.
"""

import difflib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from lockstep.compat import quiet_redistribution
from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import fold_in
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
from lockstep.strategies.messages import on_disk

WHOLE_WEIGHTS = (torch.optim.Adafactor, torch.optim.Rprop)  # their steps fail on DTensors
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
STYLES = ("colwise", "rowwise", "gathered")
EXAMPLE = "strategy.parallelize_plan=[{<module>:colwise},{<the next one>:rowwise}]"


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

    def __init__(
        self,
        replicate: Count,
        reshard_after_forward: bool,
        wrap_classes: Sequence[str],
        wrap_min_parameters: Count,
        parallelize_plan: Sequence[Mapping[Any, Any]] = (),
        shard: Count = 1,
    ) -> None:
        self.replicate, self.shard = replicate, shard
        self.reshard_after_forward = reshard_after_forward
        self.wrap_classes, self.wrap_min_parameters = list(wrap_classes), wrap_min_parameters
        self.plan = [(str(pattern), style) for entry in parallelize_plan for pattern, style in entry.items()]
        self.name = "tensor_parallel" if self.plan else "fsdp"
        self.supports_sync_bn = not self.plan  # a sum over ranks would count samples of several ranks again
        for pattern, style in self.plan:
            if style not in STYLES and not isinstance(style, ParallelStyle):
                what = f"strategy.parallelize_plan: {style} is none of the styles {', '.join(STYLES)}"
                raise ConfigError(f"{what}; type strategy.parallelize_plan=[{{{pattern}:colwise}}]")

    def sizes(self, world_size: int) -> tuple[int, int, int]:
        """(copies of the model, parts that fsdp makes of one, ranks that share a layer). Their product is all ranks."""
        shard = self.shard if self.plan else world_size // self.replicate
        return self.replicate, shard, world_size // (self.replicate * shard)

    def validate(self, job: JobSpec) -> None:
        name = f"strategy={self.name}"
        groups = self.replicate * (self.shard if self.plan else 1)
        if job.world_size % groups or job.world_size == groups > 1:
            what = f"{name} cannot make {groups} groups of two or more of {job.world_size} ranks"
            one = "strategy.replicate=1 strategy.shard=1" if self.shard > 1 else "strategy.replicate=1"
            raise ConfigError(f"{what}; type {one}, or strategy=ddp")
        if job.optimizer in WHOLE_WEIGHTS and job.world_size > 1:
            raise ConfigError(f"torch's {job.optimizer.__name__} cannot step on parts of weights; type strategy=ddp")
        has_fused_sgd = job.optimizer is torch.optim.SGD and job.fused_optimizer
        fused = "has parameters that torch's fused kernels mix up" if self.plan else "has no fused SGD in torch"
        refused = [(job.fused_optimizer if self.plan else has_fused_sgd, fused, "optimizer.fused=false")]
        if self.plan:
            refused += [
                (job.sync_bn == "on", "has the same samples on several ranks", "sync_bn=off"),
                (job.precision == "fp16", "has a part of some gradients only to scale", "trainer.precision=bf16"),
                (bool(job.compile), "runs the layers, not the compiled model", "trainer.compile=false"),
            ]
        for is_asked, what, advice in refused:
            if is_asked:
                raise ConfigError(f"{name} {what}; type {advice}")

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        replicate, shard, tensor = self.sizes(world_size)
        blocks = blocks_to_wrap(model, self.wrap_classes, self.wrap_min_parameters)
        if self.plan:
            require_cuttable(model, self.styles_by_name(model), tensor)
        if world_size == 1:
            return
        refuse_gradient_hooks(model, self.name)
        refuse_sparse_gradients(model, world_size)
        if replicate * shard > 1:
            refuse_scripted(model, self.name)
            self._require_shardable(model, blocks)

    def _require_shardable(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        name = f"strategy={self.name}"
        for of, parameter in model.named_parameters():
            if parameter.dim() == 0 or not parameter.numel():
                length = "no numbers" if parameter.dim() else "none"
                what = f"{name} cuts each parameter along its first dimension, and {of} has {length}"
                raise ConfigError(f"{what}; make it one with the shape (1,), or type strategy=ddp")
        gathered = set[nn.Parameter]()
        for block in [*blocks, model]:
            types = {p.dtype: of for of, p in block.named_parameters() if p.requires_grad and p not in gathered}
            gathered.update(block.parameters())
            if len(types) > 1:
                shown = ", ".join(f"{of} is {str(dtype).removeprefix('torch.')}" for dtype, of in types.items())
                advice = "strategy=ddp, or strategy.wrap_classes=[<the class of the part with a type of its own>]"
                raise ConfigError(f"{name} adds up the gradients of a block in one type, and {shown}; type {advice}")

    def building(self, world_size: int) -> AbstractContextManager[None]:
        if world_size == 1 or self.plan:
            return nullcontext()
        return_large_blocks()
        return parameters_on_disk()

    def device_before_setup(self, world: World) -> torch.device:
        return world.device if world.size == 1 else torch.device("cpu")

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        self.blocks: list[Any] = []  # that fsdp gathers one at a time
        if world.size == 1:
            self.replicas_equal = True
            return
        replicate, shard, self.tensor = self.sizes(world.size)
        self.ranks_per_model, self.counts = shard * self.tensor, world.rank % self.tensor == 0
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # torch cannot cut another layout
        lengths = {"replicate": replicate, "shard": shard, "tensor": self.tensor}
        axes = tuple(name for name, length in lengths.items() if length > 1 or (name == "shard" and replicate > 1))
        mesh = init_device_mesh(world.device.type, tuple(lengths[name] for name in axes), mesh_dim_names=axes)
        for name in axes:
            mesh.get_group(name).set_timeout(timedelta(seconds=world.timeout))
        if self.tensor > 1:
            model.to(world.device)
            self._cut_layers(model, mesh["tensor"])
            quiet_redistribution()
        is_cut = [isinstance(parameter, DTensor) for parameter in model.parameters()]
        if "shard" in axes:
            self._cut_blocks(model, mesh["replicate", "shard"] if replicate > 1 else mesh["shard"], precision)
        self.whole = [parameter for parameter, cut in zip(model.parameters(), is_cut, strict=True) if not cut]

    def _cut_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.shares_layers = mesh.get_group()
        self.region = CutRegion(mesh.get_local_rank(), self.tensor, self.world.device)
        styles = {name: parallel_style(style, layer) for name, (style, layer) in self.styles_by_name(model).items()}
        for name, style in styles.items():
            if isinstance(style, RowwiseParallel) and all(isinstance(layout, Shard) for layout in style.input_layouts):
                model.get_submodule(name).register_forward_pre_hook(self.region.leave)  # sees the rank's own inputs
        parallelize_module(model, mesh, styles, src_data_rank=None)
        # torch refuses a change in place of what comes out of a DTensor; fully_shard's hook would be lost by one.
        clones = self.shard > 1 or any(getattr(module, "inplace", False) for module in model.modules())
        for name, style in styles.items():
            layer = model.get_submodule(name)
            if isinstance(style, ColwiseParallel) and all(isinstance(layout, Shard) for layout in style.output_layouts):
                layer.register_forward_hook(self.region.enter)
            if clones:
                layer.register_forward_hook(lambda layer, inputs, outputs: outputs.clone())

    def _cut_blocks(self, model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
        # With autocast alone each weight would be gathered in float32, and its copy in bf16 kept for the backward pass.
        # A batch norm needs its weights in the type of its running statistics.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if precision == "bf16" and not any(isinstance(module, BatchNorm) for module in model.modules()):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        names = {module: name for name, module in model.named_modules()} | {self.module: ""}
        self.blocks = [*blocks_to_wrap(model, self.wrap_classes, self.wrap_min_parameters), self.module]
        for block in self.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
            # The loss is weighted for a sum over ranks, and gloo has no average.
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)
            if hasattr(block, "set_reduce_scatter_unused_params"):
                block.set_reduce_scatter_unused_params(True)  # else gradients are added up by their places
        self.uses = SameUses(self.name, model, {names[block]: block for block in self.blocks}, self.world)

    def data_share_of(self, world_size: int) -> int:
        replicate, shard, _ = self.sizes(world_size)
        return replicate * shard

    def data_share(self, world: World) -> tuple[int, int]:
        *_, tensor = self.sizes(world.size)
        return world.rank // tensor, world.size // tensor

    def sum_counts(self, counts: Tensor) -> tuple[Any, Tensor]:
        return super().sum_counts(counts / self.sizes(self.world.size)[2])  # as many ranks have these samples

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        in_layers = self.world.size > 1 and self.tensor > 1
        if self.blocks:
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        if in_layers:
            self.region.begin()
        super().forward_backward(part, loss, weight, last, outputs)
        if last and self.blocks:
            self.uses.end_step()
        if last and in_layers:
            self._average_whole_weights()

    @torch.no_grad()
    def _average_whole_weights(self) -> None:
        """The gradients of weights that no layer of the plan has, over the ranks that share layers: see `CutRegion`."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.whole:
            if parameter.grad is not None:
                by_type.setdefault(parameter.grad.dtype, []).append(local_part(parameter.grad))
        for gradients in by_type.values():
            vector = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(vector, group=self.shares_layers)
            vector /= self.tensor
            for gradient, values in zip(gradients, vector.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(values.view(gradient.shape))

    def evaluate(self, part: LoadedPart, count: Callable[[Any, Any], None]) -> None:
        super().evaluate(part, count)
        for block in self.blocks:
            block.reshard()  # without a backward pass nothing else frees the gathered weights

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """On the parts: torch cannot mix DTensors of several meshes, or with other tensors, in one call."""
        if self.world.size == 1:
            return super().clip_grad_norm(parameters, max_norm)
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        by_parts = defaultdict[int, list[Tensor]](list)
        for gradient in gradients:
            by_parts[parts_of(gradient)].append(local_part(gradient))
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for parts, tensors in by_parts.items():
            total += get_total_norm(tensors).double().square() * (parts / self.world.size)  # what several hold, once
        norm = self.world.all_reduce_sum(total).sqrt()
        for tensor in itertools.chain(*by_parts.values()):
            tensor.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    def styles_by_name(self, model: nn.Module) -> dict[str, tuple[str | ParallelStyle, nn.Module]]:
        """{first name of a module that the plan cuts: (style, module)}. Raises ConfigError for a pattern of none."""
        modules = dict(model.named_modules())
        found: dict[str, tuple[str | ParallelStyle, nn.Module]] = {}
        for pattern, style in self.plan:
            matched = {name: (style, layer) for name, layer in modules.items() if fnmatchcase(name, pattern)}
            if not matched:
                near = difflib.get_close_matches(pattern, list(modules)[1:], 3, 0.0)
                hint = f"; the nearest names are {', '.join(near)}" if near else ", as it is one layer"
                what = f"strategy.parallelize_plan: the model has no {pattern}{hint}"
                raise ConfigError(f"{what}; type model=gpt, or {EXAMPLE}")
            found |= matched
        return found


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

    def begin(self) -> None:
        """A forward pass begins, with the generator seeded as on the other ranks: styles of torch may not leave."""
        self.outside = None

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


class SameUses:
    """Which blocks a rank calls in a step, in order, and which weights get a gradient: the same in all steps and ranks.

    fully_shard gathers a block on all ranks at once, in the order in which each calls it, and adds up gradients by
    their places. Of a weight without a gradient it may add up zeros, by which an optimizer would move it.
    """

    def __init__(self, name: str, model: nn.Module, blocks: Mapping[str, nn.Module], world: World) -> None:
        """name: of the strategy. blocks: {name: block} that fully_shard has cut."""
        self.name, self.world = name, world
        self.weights = {of: parameter for of, parameter in model.named_parameters() if parameter.requires_grad}
        self.calls, self.used = list[str](), set[str]()  # of this rank, in this step
        self.expected: tuple[list[str], set[str]] | None = None
        self.watched = set[str]()  # blocks
        for of, block in blocks.items():
            block.register_forward_pre_hook(partial(self._begin, of))

    def _begin(self, block_name: str, block: nn.Module, inputs: Any) -> None:
        """The weights of the block are gathered; those of blocks inside of it are still in parts."""
        if not block.training:
            return
        self.calls.append(block_name)
        if block_name not in self.watched:
            self.watched.add(block_name)
            root = block if block_name else getattr(block, "model", block)  # the wrapper of a whole model
            for of, weight in root.named_parameters(prefix=block_name):
                if weight.requires_grad and weight is not self.weights[of]:
                    weight.register_post_accumulate_grad_hook(partial(self._use, of))

    def _use(self, of: str, weight: Tensor) -> None:
        self.used.add(of)

    def end_step(self) -> None:
        """After the last backward pass of a step. Raises ConfigError for other uses than in the first step."""
        calls, used, self.calls, self.used = self.calls, self.used, [], set()
        everyone = [(calls, used)]
        if self.expected is None:
            everyone = [(there, set(names)) for there, names in self.world.all_gather_json((calls, sorted(used)))]
            self.expected = everyone[0]
        expected_calls, expected = self.expected
        for calls, used in everyone:
            differing = sorted((used ^ expected) or set(calls) ^ set(expected_calls) or set(calls))
            if (calls, used) != (expected_calls, expected):
                raise ConfigError(
                    f"{first_of(differing)} is used in some steps or on some ranks, and strategy={self.name} needs the "
                    f"same use in all of them; type strategy=ddp strategy.find_unused_parameters=true"
                )
        for of in self.weights.keys() - expected:
            self.weights[of].grad = None


def parts_of(tensor: Tensor) -> int:
    """Into how many parts a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    return prod(
        length
        for length, placed in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        if not placed.is_replicate()
    )


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, in its memory; any other tensor as it is."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


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
            what = f"strategy.wrap_classes={list(class_names)} names no class of this model ({classes})"
            raise ConfigError(f"{what}; type strategy.wrap_classes=[]")
    else:
        blocks = [block for block in _children(model) if _numbers(block) >= min_parameters]
    everywhere = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    inside = [Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False)) for block in blocks]
    alone = [all(everywhere[key] == count for key, count in names.items()) for names in inside]
    return [block for block, is_alone in zip(blocks, alone, strict=True) if is_alone]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_called = getattr(type(child), "forward", None) is not nn.Module.forward
        if isinstance(child, CONTAINERS) or not is_called:
            yield from _children(child)
        elif _numbers(child):
            yield child


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parallel_style(style: str | ParallelStyle, layer: nn.Module) -> ParallelStyle:
    """As torch's parallelize_module takes it."""
    if isinstance(style, ParallelStyle):
        return style
    if style == "rowwise":  # every rank has all token numbers of an embedding
        return RowwiseParallel(input_layouts=Replicate() if isinstance(layer, nn.Embedding) else Shard(-1))
    return ColwiseParallel(output_layouts=Replicate() if style == "gathered" else Shard(-1))


def require_cuttable(model: nn.Module, named: Mapping[str, tuple[str | ParallelStyle, nn.Module]], size: int) -> None:
    """Raise ConfigError for a layer that cannot be cut into `size` equal parts, one for each rank, and for outputs in
    parts that are nowhere put together. Styles of torch are not looked at."""
    key, halves = "strategy.parallelize_plan", {style: name for name, (style, _) in named.items()}
    for name, (style, layer) in named.items():
        if isinstance(style, ParallelStyle):
            halves = {}  # it may be the other half
            continue
        if not isinstance(layer, nn.Linear | nn.Embedding):
            what = f"{key}: {name} is a {type(layer).__name__}, and {style} is for torch.nn.Linear and"
            raise ConfigError(f"{what} torch.nn.Embedding; type {EXAMPLE}")
        if "weight" not in dict(layer.named_parameters(recurse=False)):
            what = f"{key}: {name} computes its weight from others, as with spectral_norm or weight_norm, and has no"
            raise ConfigError(f"{what} part of it to hold; type {key}=[...] without it, or strategy=fsdp")
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        side, length = ("inputs", inputs) if style == "rowwise" else ("outputs", outputs)
        if length % size:
            ranks = max(part for part in range(1, size) if length % part == 0)
            what = f"{key}: {style} cannot cut the {length} {side} of {name} into {size} equal parts"
            raise ConfigError(f"{what}; type --nproc_per_node={ranks} or launch.nproc_per_node={ranks}")
        parent = name.rpartition(".")[0]  # an attention says by `heads` how many it has
        heads = getattr(model.get_submodule(parent), "heads", size)
        if isinstance(heads, int) and heads % size:
            what = f"strategy=tensor_parallel cannot share the {heads} heads of {parent} among {size} ranks"
            raise ConfigError(f"{what}; type model.heads={size}, or another number of ranks")
        for other, parameter in model.named_parameters(remove_duplicate=False):
            if parameter is layer.weight and other != f"{name}.weight":  # only one of them would be cut
                advice = f"type model.tied=false if model=gpt, or {key}=[...] without it"
                raise ConfigError(f"{key} cuts {name}.weight, which is also {other}; {advice}")
        if style == "rowwise" and isinstance(layer, nn.Embedding):
            halves.pop(style, None)
    if size > 1 and ("colwise" in halves) != ("rowwise" in halves):
        if "colwise" in halves:
            what = f"{key} cuts the outputs of {halves['colwise']}, and no rowwise layer adds them up again"
            raise ConfigError(f"{what}; type {EXAMPLE}, or {key}=[{{{halves['colwise']}:gathered}}]")
        what = f"{key} needs the inputs of {halves['rowwise']} in parts, and no colwise layer makes them"
        raise ConfigError(f"{what}; type {EXAMPLE}")


@contextmanager
def parameters_on_disk() -> Iterator[None]:
    """Inside the block a large parameter moves to a mapped file when a module gets it, before it is initialised.

    A model larger than the memory can be built so, with the numbers of any other. It is for models that are cut soon:
    a step on such parameters would write them to the disk.
    """
    handle = register_module_parameter_registration_hook(_to_disk)
    try:
        yield
    finally:
        handle.remove()


def _to_disk(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None and not is_lazy(parameter) and parameter.untyped_storage().filename is None:
        parameter.data = on_disk(parameter.data)
