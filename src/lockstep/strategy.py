"""How a model is spread over the ranks: each strategy is (module, world) -> module."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.shards import Shards


def ddp(module, world, gradient_as_bucket_view, static_graph, bucket_cap_mb, find_unused_parameters):
    """One replica a rank, gradients averaged while the backward pass runs (Li et al. 2020).

    A world of one has nobody to average with and a module without parameters nothing to average: both stay bare.
    Buffers are not broadcast before every forward pass, which reads none of them; `agree_on_buffers` does it where
    they are read.
    """
    if world.size == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(
        module, device_ids=[world.device.index] if world.device.type == "cuda" else None, forward_sync_buffers=False,
        gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph, bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
    )  # fmt: skip


def bare(module):
    """The net inside a strategy's wrapper: its parameters carry the names the model gave them."""
    return module.module if isinstance(module, (DistributedDataParallel, Shards)) else module


def part(module, last):
    """Around the forward and backward pass of one part of a step: DDP averages in the `last` one only."""
    if isinstance(module, Shards):
        return module.shard()
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


def divisor(module, world):
    """What a strategy divides the sum of the ranks' gradients by: DDP averages, the others add up."""
    return world.size if isinstance(module, DistributedDataParallel) else 1


def average_drift(module, tensors):
    """The ranks' mean of `tensors` on every rank, where gradient_sync=local_sgd lets them drift apart; no other run is touched."""
    getattr(module, "average", lambda tensors: None)(tensors)


@torch.no_grad()
def agree_on_buffers(module, world):
    """Rank 0's buffers on every rank, as DDP has it: running statistics differ between ranks with sync_bn=off."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
