"""Compares the weights of all ranks now and then: a flipped bit on one rank is found and named."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.errors import RanksDiffer, first_of
from lockstep.strategies.base import local_part

if TYPE_CHECKING:
    from lockstep.training.run import Run


def require_same_weights(run: "Run") -> None:
    """Raise RanksDiffer, on all ranks, if those hold different weights that shall hold the same ones. A collective."""
    tensors, world = run.strategy.replicated_tensors(), run.world
    if world.size == 1 or not tensors or not run.config.watch.weights_every:
        return
    hashes = torch.stack([hash_of(local_part(tensor)).to(world.device) for tensor in tensors.values()]).tolist()
    apart = run.strategy.ranks_per_model  # ranks so far apart hold the same
    of_all = world.all_gather_json(hash(tuple(hashes)))
    if all(total == of_all[rank % apart] for rank, total in enumerate(of_all)):
        return
    of_each, found = world.all_gather_json(hashes), list[str]()
    for rank, own in enumerate(of_each):
        first = rank % apart
        names = [name for name, ours, theirs in zip(tensors, own, of_each[first], strict=True) if ours != theirs]
        if names:
            found.append(f"rank {rank} has other values in {first_of(names, 3)} than rank {first}")
    what = f"the weights differ between ranks at step {run.progress.step}: {'; '.join(found)}"
    advice = "type the command again to go on from the last snapshot, with watch.weights_every=0"
    raise RanksDiffer(f"{what}; {advice} if ranks compute on different hardware")


def hash_of(tensor: Tensor) -> Tensor:
    """0-d int64 on the same device: every bit of `tensor` counts, and the order of values does not."""
    values = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    real = torch.view_as_real(values) if values.is_complex() else values
    if not real.numel():
        return torch.zeros((), dtype=torch.int64, device=real.device)
    exact = real.float() if real.element_size() < 4 else real  # it takes no float8
    return torch.hash_tensor(exact).view(torch.int64)
