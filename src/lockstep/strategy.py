"""How a model is spread over the ranks: each strategy is (module, world) -> module.

The rooms above never ask which strategy that was. They ask the module, by the functions below: each answers for a net
that is whole and alone, and a strategy whose module must answer otherwise registers its answer beside itself.
"""

from contextlib import nullcontext
from functools import singledispatch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@singledispatch
def bare(module):
    """The net inside a strategy's wrapper: its parameters carry the names the model gave them."""
    return module


@singledispatch
def reader(module, world):
    """This rank's place among the readers of the data. Ranks that work on the same samples are one reader."""
    return world


@singledispatch
def part(module, last):
    """Around the forward and backward pass of one part of a step; `last` is true for the step's last part."""
    return nullcontext()


@singledispatch
def learn(module, inputs, targets, loss, precise):
    """One forward pass, in the autocast context `precise`, and one backward pass from the sum `loss(outputs, targets)`."""
    with precise:
        outputs = module(inputs)
    loss(outputs, targets).backward()


@singledispatch
def examine(module, inputs, targets, loss, precise):
    """One forward pass, and `loss(outputs, targets)` for what it counts."""
    with precise:
        outputs = bare(module)(inputs)
    loss(outputs, targets)


@singledispatch
def divisor(module, world):
    """What the sum of the ranks' gradients is divided by."""
    return 1


@singledispatch
def clip(module, limit):
    """Scale the gradients of the whole net so that their norm is at most `limit`."""
    torch.nn.utils.clip_grad_norm_(module.parameters(), limit)


@singledispatch
@torch.no_grad()
def agree_on_buffers(module, world):
    """Rank 0's buffers on every rank, as DDP has it: running statistics differ between ranks with sync_bn=off."""
    for buffer in bare(module).buffers():
        dist.broadcast(buffer, src=0)


@singledispatch
def average_drift(module, tensors):
    """The ranks' mean of `tensors`, an iterator, on every rank. Where ranks never drift apart nothing is drawn from it."""


@singledispatch
def whole(module, named):
    """{name: tensors}, of parameters and buffers as this rank holds them -> the same of the whole net, on rank 0.

    Every rank calls this. The tensors may be nested: a parameter's optimizer state is a dict of them.
    """
    return named


@singledispatch
def own(module, named):
    """The reverse of `whole`, which every rank calls with all of it: this rank's part, in the form its module holds it."""
    return named


def ddp(module, world, gradient_as_bucket_view, static_graph, bucket_cap_mb, find_unused_parameters):
    """One replica a rank, gradients averaged while the backward pass runs (Li et al. 2020).

    A world of one has nobody to average with and a module without parameters nothing to average: both stay bare.
    Buffers are not broadcast before every forward pass, which reads none of them; `agree_on_buffers` does it where
    they are read.
    """
    if world.size == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    devices = {parameter.device for parameter in module.parameters()}
    return DistributedDataParallel(
        module, device_ids=[world.device.index] if devices == {world.device} and world.device.type == "cuda" else None,
        forward_sync_buffers=False, gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph,
        bucket_cap_mb=bucket_cap_mb, find_unused_parameters=find_unused_parameters,
    )  # fmt: skip


@bare.register
def _(module: DistributedDataParallel):
    return module.module


@part.register
def _(module: DistributedDataParallel, last):
    return nullcontext() if last else module.no_sync()


@divisor.register
def _(module: DistributedDataParallel, world):
    return world.size
