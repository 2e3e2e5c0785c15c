"""How long this process has waited for other ranks, in collectives that block the host."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_waited = 0.0


def seconds_waited() -> float:
    """Since the process began."""
    return _waited


@contextmanager
def waiting() -> Iterator[None]:
    """The time in the block counts as waiting."""
    global _waited
    start = time.perf_counter()
    try:
        yield
    finally:
        _waited += time.perf_counter() - start


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum `tensor` over all ranks, in place. Returns it. On a GPU the host does not wait."""
    with waiting():
        dist.all_reduce(tensor)
    return tensor
