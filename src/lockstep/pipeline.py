"""A net in stages, one a rank: micro-batches pass through them like cars through a factory (GPipe, Huang et al. 2019).

Every rank reads every batch; the first uses its inputs, the last its targets.
"""

from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_map_only

from lockstep.model_parallel import groups
from lockstep.refusal import Refusal
from lockstep.strategy import agree_on_buffers, bare, clip, examine, learn, own, reader, whole


def pipeline(module, world, schedule, micro_batches):
    """This rank's stage of `module`, a torch.nn.Sequential, whose layers are shared out as `groups` does.

    schedule: GPipe, all forward passes before all backward passes; or 1F1B (Narayanan et al. 2019), which holds fewer
    activations. Batch norm, as in any pipeline, normalises each micro-batch by itself. A world of one stays bare.
    """
    if world.size == 1:
        return module
    if not isinstance(module, nn.Sequential):
        raise Refusal("strategy=pipeline wants a model that is a plain sequence of layers; try model=convnet, model=mlp or model=toy_parallel")
    return Pipeline([Stage(OrderedDict(layers)) for layers in groups(module, world.size)], world, get_schedule_class(schedule), micro_batches)


class Stage(nn.Sequential):
    """Neighbouring layers that hand on rows in memory order and in the type they got, as the next rank expects them."""

    precise = nullcontext()  # the autocast context of the pass under way

    def forward(self, rows):
        with self.precise:
            outputs = super().forward(rows)
        return outputs.to(rows.dtype).contiguous()


class Pipeline(nn.Module):
    """One rank's stage and the schedules that move it: one for each number and size of micro-batches, with or without backward pass."""

    def __init__(self, stages, world, schedule, micro_batches):
        super().__init__()
        self.stage, self.world, self.schedule, self.micro_batches = stages[world.rank], world, schedule, micro_batches
        self.outlines = [deepcopy(stage).to("meta").eval() for stage in stages[: world.rank + 1]]
        self.schedules = {}

    def travel(self, inputs, targets, loss, precise):
        """All of a batch forward and, with gradients on, backward, in micro-batches of one size and perhaps a smaller last one."""
        self.stage.precise, self.loss = precise, loss
        rows = max(1, -(-len(inputs) // self.micro_batches))
        even = len(inputs) // rows * rows
        for some, theirs in ((inputs[:even], targets[:even]), (inputs[even:], targets[even:])):
            if len(some):
                schedule = self._schedule(-(-len(some) // rows), some[:rows], torch.is_grad_enabled())
                step = schedule.step if torch.is_grad_enabled() else schedule.eval
                step(*([some] if self.world.leads else []), target=theirs if self.world.rank == self.world.size - 1 else None)

    def _schedule(self, count, inputs, learning):
        key = (count, len(inputs), learning)
        if key not in self.schedules:
            *before, outline = self.outlines
            entering = torch.empty_like(inputs, device="meta")
            for stage in before:
                entering = stage(entering)
            metadata = [rows.detach().requires_grad_(learning) for rows in (entering, outline(entering))]
            stage = PipelineStage(self.stage, self.world.rank, self.world.size, self.world.device, *metadata)
            schedule = self.schedule if count >= self.world.size else ScheduleGPipe  # 1F1B wants each rank busy
            self.schedules[key] = schedule(stage, count, lambda outputs, targets: self.loss(outputs, targets), scale_grads=False)
        return self.schedules[key]


@bare.register
def _(module: Pipeline):
    return module.stage


@reader.register
def _(module: Pipeline, world):
    return replace(world, rank=0, size=1)


@learn.register(Pipeline)
@examine.register(Pipeline)
def _(module, inputs, targets, loss, precise):
    module.travel(inputs, targets, loss, precise)


@clip.register
def _(module: Pipeline, limit):
    norm = get_total_norm([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
    clip_grads_with_norm_(module.parameters(), limit, module.world.total(norm.square()).sqrt())


@agree_on_buffers.register
def _(module: Pipeline, world):
    """No two ranks hold the same buffers."""


@whole.register
def _(module: Pipeline, named):
    parts = [None] * module.world.size if module.world.leads else None
    dist.gather_object(tree_map_only(torch.Tensor, torch.Tensor.cpu, named), parts, group=module.world.control)
    return {name: tree for part in parts or [] for name, tree in part.items()}


@own.register
def _(module: Pipeline, named):
    mine = module.stage.state_dict()
    return {name: tree for name, tree in named.items() if name in mine}
