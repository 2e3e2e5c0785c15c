"""Weights, gradients and optimizer state in parts, one a rank (ZeRO, Rajbhandari et al. 2020; torch's FSDP2)."""

from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from lockstep.strategy import examine, own, part, whole


def fsdp(module, world, reshard_after_forward):
    """Cut every parameter along its first dimension, one part a rank; each child of `module` is gathered while it computes.

    A world of one has nobody to share with, and stays bare. reshard_after_forward: whether gathered weights are let go
    between forward and backward pass.
    """
    if world.size == 1:
        return module
    module.to(memory_format=torch.contiguous_format)  # what FSDP2 can cut
    mesh = init_device_mesh(world.device.type, (world.size,))
    for net in [*(child for child in module.children() if any(True for _ in child.parameters())), module]:
        fully_shard(net, mesh=mesh, reshard_after_forward=reshard_after_forward)
        # The loss is weighed for a sum over ranks, and gloo knows no average.
        net.set_gradient_divide_factor(1.0)
        net.set_force_sum_reduction_for_comms(True)
    return module


@part.register
def _(module: FSDPModule, last):
    module.set_requires_gradient_sync(last)
    return nullcontext()


@examine.register
def _(module: FSDPModule, *arguments):
    examine.dispatch(torch.nn.Module)(module, *arguments)
    for net in filter(lambda child: isinstance(child, FSDPModule), module.modules()):
        net.reshard()  # no backward pass will let go of what the forward pass has gathered


@whole.register
def _(module: FSDPModule, named):
    def full(tensor):
        gathered = tensor.full_tensor()  # by all ranks
        return gathered.cpu() if tensor.device_mesh.get_rank() == 0 else None

    return tree_map_only(DTensor, full, named)


@own.register
def _(module: FSDPModule, named):
    parameters = dict(module.named_parameters())

    def cut(name, tensor):
        like = parameters.get(name)
        if like is None or tensor.shape != like.shape:  # a buffer, a step count
            return tensor
        return distribute_tensor(tensor.contiguous().to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    return {name: tree_map_only(torch.Tensor, lambda tensor, name=name: cut(name, tensor), tree) for name, tree in named.items()}
