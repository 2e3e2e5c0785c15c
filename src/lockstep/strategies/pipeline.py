"""A model in stages, one per rank; micro-batches pass from stage to stage (GPipe, Huang et al. 2019).

Every rank reads every batch. The first stage uses its inputs, the last one its targets.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import Part
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import (
    JobSpec,
    Loss,
    Outputs,
    Strategy,
    layer_groups,
    refuse_own_step,
    refuse_scripted,
)
from lockstep.strategies.gradient_sync import GradientSync


class Stage(nn.Sequential):
    """Neighbouring layers of the model. Outputs are contiguous and not of autocast's type, as the next rank expects."""

    def __init__(self, layers: Mapping[str, nn.Module], autocast: AbstractContextManager[Any]) -> None:
        super().__init__(OrderedDict(layers))
        self.autocast = autocast

    def forward(self, rows: Tensor) -> Tensor:
        with self.autocast:
            outputs: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
            # Shapes are found with tensors on the device "meta", of which autocast knows nothing.
            has_autocast = rows.device.type != "meta" and torch.is_autocast_enabled(rows.device.type)
            if has_autocast and outputs.is_floating_point():
                outputs = outputs.float()
        return outputs.contiguous()


class Pipeline(Strategy):
    """Each rank holds one stage of a torch.nn.Sequential and passes micro-batches on, by torch's schedules.

    GPipe runs all forward passes before all backward passes. 1F1B (Narayanan et al. 2019) holds fewer activations.
    Batch norm, as in any pipeline, normalises each micro-batch by itself. A world of one rank keeps a plain module.

    schedule: order of the forward and backward passes. micro_batches: parts of a global batch that are in the pipeline.
    """

    replicas_equal = False  # each rank holds its own layers
    supports_sync_bn = False  # each layer is on one rank, which has all of its statistics

    def __init__(self, schedule: Literal["1F1B", "GPipe"], micro_batches: Count) -> None:
        self.schedule_name, self.micro_batches = schedule, micro_batches
        self.schedules: dict[tuple[int, torch.Size, bool], PipelineScheduleSingle] = {}

    def validate(self, job: JobSpec) -> None:
        name = "strategy=pipeline"
        if job.sync_bn == "on":
            raise ConfigError(f"{name} has each layer on one rank, so no statistics can be shared; type sync_bn=off")
        if job.precision == "fp16":
            raise ConfigError(f"{name} cannot scale a loss that only the last rank has; type trainer.precision=bf16")
        if job.compile:
            raise ConfigError(f"{name} runs the layers, not the compiled model; type trainer.compile=false")
        refuse_own_step(job, "pipeline")

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        if world_size == 1:
            return
        if not isinstance(model, nn.Sequential):
            what = "strategy=pipeline needs a model that is a plain sequence of layers (torch.nn.Sequential)"
            raise ConfigError(f"{what}; type model=convnet, model=mlp or model=toy_parallel")
        refuse_scripted(model, "pipeline")
        owners: dict[int, int] = {}
        for stage, layers in enumerate(layer_groups(model, world_size)):
            for of, parameter in ((of, one) for of, layer in layers.items() for one in layer.parameters()):
                if owners.setdefault(id(parameter), stage) != stage:  # each of these ranks would train its own
                    what = f"strategy=pipeline puts layers on different ranks, and a weight of {of} is also one of"
                    raise ConfigError(f"{what} another rank's; type model.tied=false if model=gpt, or strategy=ddp")

    def device_before_setup(self, world: World) -> torch.device:
        return world.device if world.size == 1 else torch.device("cpu")

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        if world.size == 1:
            self.replicas_equal = True
            return
        stages = [Stage(layers, self.autocast) for layers in layer_groups(model, world.size)]
        self.module = self.model = self.stage = stages[world.rank].to(world.device)
        # This rank needs the shapes that enter its stage, so it keeps the stages before it without their weights.
        self.shapes = [_without_values(stage) for stage in stages[: world.rank + 1]]

    def data_share_of(self, world_size: int) -> int:
        return 1

    def data_share(self, world: World) -> tuple[int, int]:
        return 0, 1

    def parts(self, number: int, count: int, micro_batches: int) -> Sequence[Part]:
        """Every rank has all samples, and numbers of its own: each stage draws other random numbers than the others."""
        parts = super().parts(number, count, micro_batches)
        return [part._replace(number=part.number * self.world.size + self.world.rank) for part in parts]

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        if self.world.size == 1:
            super().forward_backward(part, loss, weight, last, outputs)
        else:  # torch's schedule calls backward, with 1 for the root
            self._run(part.inputs, part.targets, lambda found, targets: loss(found, targets) * weight)

    def evaluate(self, part: LoadedPart, count: Callable[[Any, Any], None]) -> None:
        if self.world.size == 1:
            super().evaluate(part, count)
        else:
            self._run(part.inputs, part.targets, count)

    def _run(self, inputs: Tensor, targets: Tensor, loss_function: Callable[[Tensor, Tensor], Any]) -> None:
        """All of a batch, in micro-batches of one size and perhaps a smaller last one."""
        for name, values in (("sample", inputs), ("target", targets)):
            if not isinstance(values, Tensor):
                what = f"strategy=pipeline passes one tensor from rank to rank, and a {name} here is a"
                raise ConfigError(f"{what} {type(values).__name__} of tensors; type strategy=fsdp")
        self.loss_function = loss_function
        rows = max(1, -(-len(inputs) // self.micro_batches))
        even = len(inputs) // rows * rows
        is_first, is_last = self.world.rank == 0, self.world.rank == self.world.size - 1
        with_backward = torch.is_grad_enabled()
        for some, some_targets in ((inputs[:even], targets[:even]), (inputs[even:], targets[even:])):
            if len(some):
                schedule = self._schedule(-(-len(some) // rows), some[:rows], with_backward)
                run = schedule.step if with_backward else schedule.eval
                run(*([some] if is_first else []), target=some_targets if is_last else None)

    def _schedule(self, count: int, inputs: Tensor, with_backward: bool) -> PipelineScheduleSingle:
        """The schedule for `count` micro-batches of this shape. It is built once and kept.

        Its shapes are found here: torch would find them by a forward pass, which moves running statistics.
        """
        key = (count, inputs.shape, with_backward)
        if key not in self.schedules:
            shapes = [torch.empty_like(inputs, device="meta")]
            for before in self.shapes:
                shapes.append(before(shapes[-1]))
            entering, leaving = (shape.detach() for shape in shapes[-2:])
            entering.requires_grad_(with_backward and entering.is_floating_point())
            leaving.requires_grad_(with_backward)
            world = self.world
            stage = PipelineStage(self.stage, world.rank, world.size, world.device, entering, leaving)
            # 1F1B needs at least as many micro-batches as ranks.
            chosen: Any = ScheduleGPipe if count < world.size else get_schedule_class(self.schedule_name)
            self.schedules[key] = chosen(stage, count, self._loss, scale_grads=False)
        return self.schedules[key]

    def _loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.loss_function(outputs, targets)

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.world.size > 1:
            norm = norm.to(self.world.device, torch.float64)  # of frozen layers torch's norm is a float32 on the CPU
            norm = self.world.all_reduce_sum(norm.square()).sqrt()
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def sync_buffers(self) -> None:
        """No two ranks hold the same buffers."""


def _without_values(stage: Stage) -> nn.Module:
    """A copy that computes shapes: it has no values, also where a layer keeps a tensor that is no buffer."""
    copied = deepcopy(stage).to("meta").eval()
    for layer in copied.modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.dim() > 0:  # of one number the layer may want the value
                setattr(layer, name, value.to("meta"))
    return copied
