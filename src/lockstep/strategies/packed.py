"""Tensors of several types in one vector of bytes, so that one message carries them without rounding."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all `tensors`, one tensor behind the other: (n,) uint8."""
    return torch.cat([tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def from_bytes(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of `to_bytes`: copy the values into `tensors`, in place."""
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        aligned = part.clone()  # torch cannot read an int64 that begins at any byte
        tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))
