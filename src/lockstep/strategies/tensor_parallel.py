"""Each matrix in parts, one per rank, which computes with it (Shoeybi et al. 2019; torch's parallelize_module)."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import fold_in
from lockstep.data.source import tensors_in
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, first_of
from lockstep.strategies.base import (
    JobSpec,
    Loss,
    Outputs,
    Strategy,
    refuse_gradient_hooks,
    refuse_sparse_gradients,
)
from lockstep.strategies.fsdp import replica_groups, validate_replicas
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.strategies.sharded_state import cut_like_parameters, gather_full, own_blocks

NAME = "strategy=tensor_parallel"


Plan = Sequence[Mapping[Any, Any]]


class TensorParallel(Strategy):
    """Neighbouring ranks share one model and compute the same samples. Several such groups share each batch.

    Layers that the plan does not name are whole on every rank. In a world of one rank the model stays a plain module.

    replicas: groups of ranks with a model each, that share a batch.
    plan: how layers are cut: colwise, rowwise, gathered, or a ParallelStyle of torch, by the name of a module; see
        `TensorPlan`.
    """

    replicas_equal = False  # each rank holds its own part
    shards_state = True
    supports_sync_bn = False  # the ranks of a group compute the same samples, which a sum over all would count again

    def __init__(self, replicas: Count, plan: Plan) -> None:
        self.replicas, self.plan = replicas, TensorPlan(plan)

    def validate(self, job: JobSpec) -> None:
        validate_replicas(NAME, self.replicas, job.world_size)
        if job.sync_bn == "on":
            raise ConfigError(f"{NAME} has the same samples on several ranks; type sync_bn=off")
        if job.precision == "fp16":
            raise ConfigError(f"{NAME} has a part of some gradients only to scale; type trainer.precision=bf16")
        if job.compile:
            raise ConfigError(f"{NAME} runs the layers, not the compiled model; type trainer.compile=false")
        if job.fused_optimizer:
            raise ConfigError(f"{NAME} has parameters that torch's fused kernels mix up; type optimizer.fused=false")

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        self.plan.validate(model, world_size // self.replicas)
        if world_size > 1:
            refuse_gradient_hooks(model, "tensor_parallel")
            refuse_sparse_gradients(model, world_size)

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        if world.size == 1:
            self.replicas_equal = True
            return
        self.ranks_per_model = world.size // self.replicas
        ranks, shares_model, self.shares_batch = replica_groups(self.replicas, world)
        self.counts = world.rank in ranks[:, 0]
        model.to(memory_format=torch.contiguous_format)  # DTensor cannot cut another layout
        self.shares_model = shares_model
        mesh = DeviceMesh.from_group(shares_model, world.device.type)
        self.region = CutRegion(world.rank % self.ranks_per_model, model, world.device)
        styles = self.plan.styles(model)
        for name, style in self.plan.named(model).items():
            if style == "rowwise" and isinstance(model.get_submodule(name), nn.Linear):
                model.get_submodule(name).register_forward_pre_hook(self.region.leave)  # sees the rank's own inputs
        parallelize_module(model, mesh, styles, src_data_rank=None)
        changes_in_place = any(getattr(module, "inplace", False) for module in model.modules())
        for name, style in self.plan.named(model).items():
            if style == "colwise":
                model.get_submodule(name).register_forward_hook(self.region.enter)
            if changes_in_place:  # torch refuses that for what comes out of a DTensor
                model.get_submodule(name).register_forward_hook(lambda layer, inputs, outputs: outputs.clone())

    def data_share_of(self, world_size: int) -> int:
        return self.replicas

    def data_share(self, world: World) -> tuple[int, int]:
        return world.rank // (world.size // self.replicas), self.replicas

    def sum_counts(self, counts: Tensor) -> tuple[Any, Tensor]:
        count = counts.sum().double()
        if self.replicas == 1:
            return _no_wait, count
        work: Any = dist.all_reduce(count, group=self.shares_batch, async_op=True)
        return work.wait, count

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        if self.world.size > 1:
            self.region.begin()
        super().forward_backward(part, loss, weight, last, outputs)
        if last and self.world.size > 1:
            self._sum_gradients_inside()
        if last and self.replicas > 1:
            self._sum_gradients()

    @torch.no_grad()
    def _sum_gradients_inside(self) -> None:
        """Of whole weights between colwise and rowwise layers: each rank has the gradient of its part of the rows."""
        for parameter in self.region.whole_weights():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=self.shares_model)

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Over the replicas, all in one vector. Some may lack a gradient that others have, as of an expert."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter, is_used in zip(trained, self.world.any_of([p.grad is not None for p in trained]), strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [_local_gradient(p) for p in self.model.parameters() if p.grad is not None]
        vector = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(vector, group=self.shares_batch)
        for gradient, values in zip(gradients, vector.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view(gradient.shape))

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """torch cannot mix DTensors with others in one call."""
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        cut: list[nn.Parameter] = [parameter for parameter in trained if isinstance(parameter, DTensor)]
        whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        both = [some for some in (cut, whole) if some]
        norms = [get_total_norm([p.grad for p in some if p.grad is not None]) for some in both]
        norm = get_total_norm([one.full_tensor() if isinstance(one, DTensor) else one for one in norms])
        for some in both:
            clip_grads_with_norm_(some, max_norm, norm)
        return norm

    def full_state(self, named: dict[str, Any]) -> dict[str, Any]:
        return gather_full(named, self.world)

    def shard_state(self, named: dict[str, Any]) -> dict[str, Any]:
        return cut_like_parameters(named, self.model)

    def own_blocks(self, named: dict[str, Any]) -> dict[str, Any]:
        return own_blocks(named, self.world, self.data_share(self.world)[0] == 0)


class CutRegion:
    """Where ranks hold parts of one activation: from the outputs of colwise layers to the inputs of rowwise ones.

    In there each rank draws its own random numbers, as its part needs another dropout mask than the others'. Outside
    of it all ranks of a group draw the same. The weights in there that the plan leaves whole are found in the graph of
    the first backward pass: each rank computes a part of their gradient.

    number: of this rank in its group.
    """

    def __init__(self, number: int, model: nn.Module, device: torch.device) -> None:
        self.number, self.model = number, model
        model.register_forward_hook(self.end)
        on_cpu = device.type == "cpu"
        self.generator = torch.default_generator if on_cpu else torch.cuda.default_generators[device.index]
        self.outside: Tensor | None = None  # the generator's state, while this rank is inside
        self.begins: list[Any] = []  # nodes of the graph that made the outputs of colwise layers
        self.ends: list[Any] = []  # that made the inputs of rowwise layers
        self.outputs: list[Any] = []  # that made the outputs of the model
        self.found: list[Tensor] | None = None

    def begin(self) -> None:
        """A forward pass begins, with the generator seeded as on the other ranks: styles of torch may not leave."""
        self.outside = None

    def enter(self, layer: nn.Module, inputs: Any, outputs: Tensor) -> None:
        """A colwise layer has computed its part."""
        if not layer.training:
            return
        if self.found is None:
            self.begins.append(outputs.grad_fn)
        if self.outside is None:
            seed = torch.randint(2**62, (), generator=self.generator, device=self.generator.device)
            self.outside = self.generator.get_state()
            self.generator.manual_seed(fold_in(int(seed), self.number))

    def leave(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """A rowwise layer is about to compute with its part."""
        if self.found is None and layer.training:
            self.ends.append(inputs[0].grad_fn)
        if self.outside is not None:
            self.generator.set_state(self.outside)
            self.outside = None

    def end(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """The model has computed its outputs."""
        if self.found is None and model.training:
            self.outputs += [output.grad_fn for output in tensors_in(outputs)]

    def whole_weights(self) -> list[Tensor]:
        """The weights inside that are whole on each rank. Call it after the first backward pass, and then always.

        Raises ConfigError, on all ranks, if something enters a rowwise layer beside what colwise layers have made of
        its part: the gradient of that would be one rank's. So does a weight that is used in there and outside, too.
        """
        if self.found is None:
            self.found = weights_behind(self.ends, self.begins)
            if any(isinstance(weight, DTensor) for weight in self.found):
                raise ConfigError(
                    f"{NAME} cuts a layer behind which something joins that is not cut; type strategy.plan=[...] "
                    f"without it, or strategy=fsdp"
                )
            begins = filter(None, self.begins)  # without a graph before it, or in a checkpointed block's first pass
            before = [following for node in begins for following, _ in node.next_functions]
            outside = {id(weight) for weight in weights_behind([*self.outputs, *before], self.ends)}
            both = {id(weight) for weight in self.found} & outside
            if both:
                names = [name for name, weight in self.model.named_parameters() if id(weight) in both]
                raise ConfigError(
                    f"{first_of(names)} is used between layers that {NAME} cuts and outside of them, too; type "
                    f"strategy.plan=[...] without these layers, or strategy=fsdp"
                )
            self.begins, self.ends, self.outputs = [], [], []
        return self.found


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a gradient, in the gradient's own memory."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:  # so torch cuts it after an empty micro-batch
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    local: Tensor = gradient.to_local()
    return local


STYLES = ("colwise", "rowwise", "gathered")
EXAMPLE = "strategy.plan=[{<module>:colwise},{<the next one>:rowwise}]"


class TensorPlan:
    """Styles of layers by patterns of their names, such as `*.widen`; where several match, the last one wins.

    colwise cuts the outputs of a linear layer or an embedding, rowwise its inputs and adds up what the ranks found, and
    gathered is colwise with whole outputs on every rank. Other styles are ParallelStyle objects of torch. Raises
    ConfigError for a style of another name.
    """

    def __init__(self, entries: Sequence[Mapping[Any, str | ParallelStyle]]) -> None:
        self.entries = [(str(pattern), style) for entry in entries for pattern, style in entry.items()]
        for pattern, style in self.entries:
            if style not in STYLES and not isinstance(style, ParallelStyle):
                raise ConfigError(
                    f"strategy.plan: {style} is none of the styles {', '.join(STYLES)}; "
                    f"type strategy.plan=[{{{pattern}:colwise}}]"
                )

    def styles(self, model: nn.Module) -> dict[str, ParallelStyle]:
        """{name of a layer: how it is cut}, as torch's parallelize_module takes it."""
        return {name: _parallel_style(style, model.get_submodule(name)) for name, style in self.named(model).items()}

    def validate(self, model: nn.Module, size: int) -> None:
        """Raise ConfigError if a pattern names no layer, or one that cannot be cut into `size` parts, or if cut outputs
        are nowhere put together."""
        named = self.named(model)
        for name, style in named.items():
            if not isinstance(style, ParallelStyle):
                _require_cuttable(name, model, style, size)
        if size > 1:
            _require_both_halves(model, named)

    def named(self, model: nn.Module) -> dict[str, str | ParallelStyle]:
        """{first name of a module: its style}."""
        modules = [name for name, _ in model.named_modules()]
        found: dict[str, str | ParallelStyle] = {}
        for pattern, style in self.entries:
            matched = [name for name in modules if fnmatchcase(name, pattern)]
            if not matched:
                near = difflib.get_close_matches(pattern, modules[1:], 3, 0.0)
                hint = f"; the nearest names are {', '.join(near)}" if near else ", as it is one layer"
                raise ConfigError(f"strategy.plan: the model has no {pattern}{hint}; type model=gpt, or {EXAMPLE}")
            found |= dict.fromkeys(matched, style)
        return found


def _parallel_style(style: str | ParallelStyle, layer: nn.Module) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style == "rowwise" and isinstance(layer, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())  # every rank has all token numbers
    if style == "rowwise":
        return RowwiseParallel()
    return ColwiseParallel(output_layouts=Replicate()) if style == "gathered" else ColwiseParallel()


def _require_cuttable(name: str, model: nn.Module, style: str, size: int) -> None:
    """Raise ConfigError for a layer that cannot be cut in this style into `size` equal parts, one for each rank."""
    layer = model.get_submodule(name)
    if not isinstance(layer, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"strategy.plan: {name} is a {type(layer).__name__}, and {style} is for torch.nn.Linear and "
            f"torch.nn.Embedding; type {EXAMPLE}"
        )
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        raise ConfigError(
            f"strategy.plan: {name} computes its weight from others, as with spectral_norm or weight_norm, and has no "
            f"part of it to hold; type strategy.plan=[...] without it, or strategy=fsdp"
        )
    outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
    length = inputs if style == "rowwise" else outputs
    if length % size:
        ranks = max(part for part in range(1, size) if length % part == 0)
        raise ConfigError(
            f"strategy.plan: {style} cannot cut the {length} {'inputs' if style == 'rowwise' else 'outputs'} of {name} "
            f"into {size} equal parts; type --nproc_per_node={ranks} or launch.nproc_per_node={ranks}"
        )
    parent = name.rpartition(".")[0]  # an attention says by `heads` how many it has
    heads = getattr(model.get_submodule(parent), "heads", size)
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"strategy=tensor_parallel cannot share the {heads} heads of {parent} among {size} ranks; "
            f"type model.heads={size}, or another number of ranks"
        )
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is layer.weight and other != f"{name}.weight":  # only one of them would be cut
            raise ConfigError(
                f"strategy.plan cuts {name}.weight, which is also {other}; type model.tied=false if model=gpt, or "
                f"strategy.plan=[...] without it"
            )


def _require_both_halves(model: nn.Module, named: Mapping[str, str | ParallelStyle]) -> None:
    """Raise ConfigError for colwise layers without any rowwise one, whose ranks would compute with parts as if they
    were the whole, and for the reverse. Styles of torch may do the other half."""
    if any(isinstance(style, ParallelStyle) for style in named.values()):
        return
    colwise = [name for name, style in named.items() if style == "colwise"]
    rowwise = [name for name, style in named.items() if style == "rowwise"]
    linear = [name for name in rowwise if isinstance(model.get_submodule(name), nn.Linear)]
    if colwise and not linear:
        raise ConfigError(
            f"strategy.plan cuts the outputs of {colwise[0]}, and no rowwise layer adds them up again; "
            f"type {EXAMPLE}, or strategy.plan=[{{{colwise[0]}:gathered}}]"
        )
    if linear and not colwise:
        raise ConfigError(
            f"strategy.plan needs the inputs of {linear[0]} in parts, and no colwise layer makes them; type {EXAMPLE}"
        )


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


def _no_wait() -> None:
    """This rank has all there is."""
