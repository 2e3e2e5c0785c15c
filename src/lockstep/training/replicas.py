"""Compares the weights of all ranks now and then: a flipped bit on one rank is found and named."""

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.errors import RanksDiffer, first_of
from lockstep.strategies.base import local_part

if TYPE_CHECKING:
    from lockstep.training.run import Run

PIECE = 2**16  # words that are multiplied by the same weights


def require_same_weights(run: "Run") -> None:
    """Raise RanksDiffer, on all ranks, if those hold different weights that shall hold the same ones. A collective."""
    tensors, world = run.strategy.replicated_tensors(), run.world
    if world.size == 1 or not tensors or not run.config.watch.weights_every:
        return
    digests = torch.stack([digest(local_part(tensor)).to(world.device) for tensor in tensors.values()])
    apart = run.strategy.ranks_per_model  # ranks so far apart hold the same
    totals = world.all_gather_json(int(digest(digests)))
    if all(total == totals[rank % apart] for rank, total in enumerate(totals)):
        return
    parts, found = world.all_gather_json(digests.tolist()), list[str]()
    for rank, own in enumerate(parts):
        first = rank % apart
        names = [name for name, ours, theirs in zip(tensors, own, parts[first], strict=True) if ours != theirs]
        if names:
            found.append(f"rank {rank} has other values in {first_of(names, 3)} than rank {first}")
    what = f"the weights differ between ranks at step {run.progress.step}: {'; '.join(found)}"
    advice = "type the command again to go on from the last snapshot, with watch.weights_every=0"
    raise RanksDiffer(f"{what}; {advice} if ranks compute on different hardware")


def digest(tensor: Tensor) -> Tensor:
    """A 0-d int64 tensor on the same device, in which every bit of `tensor` counts.

    It is the sum of all values, read as 64-bit words, times odd weights that depend on the position, modulo 2**64. A
    change of one bit changes a word by a power of two, and an odd multiple of that is never 0 modulo 2**64.
    """
    values = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    bytes = flat.numel() * flat.element_size()
    if bytes % 8 or flat.storage_offset() * flat.element_size() % 8:  # zeros up to whole words
        words = torch.zeros(-(-bytes // 8), dtype=torch.int64, device=flat.device)
        words.view(flat.dtype)[: flat.numel()] = flat
    else:
        words = flat.view(torch.int64)
    if len(words) <= PIECE:
        return (words * _odd_weights(words.device)[: len(words)]).sum()
    return digest(torch.stack([digest(rows) for rows in words.split(PIECE)]))


@cache
def _odd_weights(device: torch.device) -> Tensor:
    """PIECE odd int64 numbers, the same on every rank and in every run."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (PIECE,), generator=draw) | 1).to(device)
