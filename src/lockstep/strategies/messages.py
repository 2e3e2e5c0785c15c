"""Tensors of several types in one message, without rounding: gloo knows few types, and no backend sparse tensors."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all `tensors`, one tensor behind the other: (n,) uint8. Sparse ones as dense."""
    dense = [tensor.detach().to_dense().to(tensors[0].device) for tensor in tensors]
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in dense])


@torch.no_grad()
def from_bytes(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of `to_bytes`: copy the values into `tensors`, in place."""
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        aligned = part.clone()  # torch cannot read an int64 that begins at any byte
        values = aligned.view(tensor.dtype).view(tensor.shape)
        tensor.copy_(values.to_sparse(layout=tensor.layout) if tensor.layout != torch.strided else values)


def broadcast(tensors: Sequence[Tensor], source: int = 0) -> None:
    """Copy the `tensors` of rank `source` to every rank. They may have any type and memory layout."""
    if tensors:
        packed = to_bytes(tensors)
        dist.broadcast(packed, src=source)
        from_bytes(packed, tensors)
