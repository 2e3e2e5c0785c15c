"""A model in stages, one per rank; micro-batches pass from stage to stage (GPipe, Huang et al. 2019).

Every rank reads every batch. The first stage uses its inputs, the last one its targets.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import Part
from lockstep.errors import ConfigError
from lockstep.strategies.base import Computed, Loss, Outputs, Strategy, layer_groups


@dataclass
class Pipeline(Strategy):
    """Each rank holds one stage of a torch.nn.Sequential and passes micro-batches on, by torch's schedules. GPipe runs
    all forward passes before all backward passes. 1F1B (Narayanan et al. 2019) holds fewer activations. Batch norm, as
    in any pipeline, normalises each micro-batch by itself. A world of one rank keeps a plain module."""

    schedule: Literal["1F1B", "GPipe"]
    micro_batches: Count
    name = "pipeline"
    # Each layer is on one rank, which has all of its statistics; only the last rank has a loss to scale.
    refused = (*Strategy.refused, "a step of your own", "sync_bn=on", "trainer.compile", "trainer.precision=fp16")
    replicas_equal = False  # each rank holds its own layers
    cut_on_cpu = True

    def spread(self) -> None:
        model, world = self.model, self.world
        if world.size == 1:
            return
        if not isinstance(model, nn.Sequential):
            what = "strategy=pipeline needs a model that is a plain sequence of layers (torch.nn.Sequential)"
            raise ConfigError(f"{what}; type model=convnet, model=mlp or model=toy_parallel")
        is_bf16, layers = self.precision == "bf16", layer_groups(model, world.size)

        def outputs_of(stage: nn.Module, rows: Tensor) -> Tensor:
            """Contiguous and not of autocast's type, as the next rank expects."""
            found: Tensor = stage(rows)
            return (found.float() if is_bf16 and found.is_floating_point() else found).contiguous()

        stages = [Computed(nn.Sequential(OrderedDict(group)), outputs_of, self.autocast) for group in layers]
        if sum(len(list(stage.parameters())) for stage in stages) > len(list(model.parameters())):
            what = "strategy=pipeline puts layers on different ranks, and two of them share a weight"
            raise ConfigError(f"{what}; type model.tied=false if model=gpt, or strategy=ddp")
        self.module = self.evaluated = stages[world.rank].to(world.device)
        self.model, self.ranks_per_model = self.module.model, world.size
        # This rank needs the shapes that enter its stage, so it keeps the stages before it without their weights.
        self.shapes = [deepcopy(stage).to("meta").eval() for stage in stages[: world.rank + 1]]
        self.schedules = dict[Any, Any]()

    def data_share_of(self, world_size: int) -> int:
        return 1

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
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            what = "strategy=pipeline passes one tensor from rank to rank, and samples or targets here are several"
            raise ConfigError(f"{what}; type strategy=fsdp")
        self.loss_function = loss_function
        rows = max(1, -(-len(inputs) // self.micro_batches))
        even = len(inputs) // rows * rows
        for some, some_targets in ((inputs[:even], targets[:even]), (inputs[even:], targets[even:])):
            if len(some):
                schedule = self._schedule(-(-len(some) // rows), some[:rows], torch.is_grad_enabled())
                run = schedule.step if torch.is_grad_enabled() else schedule.eval
                first, last = self.world.rank == 0, self.world.rank == self.world.size - 1
                run(*([some] if first else []), target=some_targets if last else None)

    def _schedule(self, count: int, inputs: Tensor, with_backward: bool) -> Any:
        """The schedule for `count` micro-batches of this shape. It is built once and kept. Its shapes are found here:
        torch would find them by a forward pass, which moves running statistics."""
        key = (count, inputs.shape, with_backward)
        if key not in self.schedules:
            shapes = [torch.empty_like(inputs, device="meta")]
            for before in self.shapes:
                shapes.append(before(shapes[-1]).detach())
            entering, leaving = shapes[-2:]
            entering.requires_grad_(with_backward and entering.is_floating_point())
            leaving.requires_grad_(with_backward)
            world = self.world
            stage = PipelineStage(self.module, world.rank, world.size, world.device, entering, leaving)
            # 1F1B needs at least as many micro-batches as ranks.
            chosen: Any = get_schedule_class("GPipe" if count < world.size else self.schedule)
            self.schedules[key] = chosen(stage, count, lambda *of: self.loss_function(*of), scale_grads=False)
        return self.schedules[key]
