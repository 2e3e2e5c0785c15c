"""Ring all-reduce, written to be read and measured."""

import torch
from torch import Tensor
from torch.distributed import P2POp, irecv, isend
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.world import World
from lockstep.strategies.gradient_sync.base import GradientSync, mean_hook
from lockstep.strategies.gradient_sync.point_to_point import exchange


class Ring(GradientSync):
    """Every rank talks to its two neighbours only, see `ring_sum`."""

    name = "ring"
    needs_hooks = True

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        module.register_comm_hook(None, mean_hook(world, ring_sum))


def ring_sum(vector: Tensor, rank: int, size: int) -> None:
    """Sum `vector` (n,) over `size` ranks in place (Patarasuk and Yuan 2009; Gibiansky 2017, Baidu).

    The vector is cut into `size` parts; some are empty if it is shorter. In the reduce-scatter every part goes once
    round the ring and collects each rank's values. It ends as the whole sum on the rank before the one it started
    from. In the all-gather the finished parts go round again. A rank sends 2 (size - 1) parts, which is
    2 (size - 1) / size vectors for any number of ranks. No algorithm sends less.
    """
    parts = vector.tensor_split(size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        outgoing, incoming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        received = torch.empty_like(incoming)
        exchange(P2POp(irecv, received, left), P2POp(isend, outgoing, right))
        incoming.add_(received)
    for step in range(size - 1):
        outgoing, incoming = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        exchange(P2POp(irecv, incoming, left), P2POp(isend, outgoing, right))
