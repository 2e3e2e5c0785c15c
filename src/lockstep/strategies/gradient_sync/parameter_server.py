"""A synchronous parameter server, written to be read and measured."""

from torch import Tensor
from torch.distributed import P2POp, irecv, isend
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.world import World
from lockstep.strategies.gradient_sync.base import GradientSync, mean_hook
from lockstep.strategies.gradient_sync.point_to_point import exchange


class ParameterServer(GradientSync):
    """Rank 0 adds up what all other ranks send, and sends them the sum, see `server_sum`."""

    name = "parameter_server"
    needs_hooks = True

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        module.register_comm_hook(None, mean_hook(world, server_sum))


def server_sum(vector: Tensor, rank: int, size: int) -> None:
    """Sum `vector` (n,) over `size` ranks in place, on rank 0 (Li et al. 2014).

    A worker sends one vector and receives one. The server sends and receives size - 1 of them, so its connection is
    what all ranks wait for.
    """
    if rank == 0:
        gradients = vector.new_empty(size - 1, len(vector))
        exchange(*(P2POp(irecv, gradient, worker) for worker, gradient in enumerate(gradients, start=1)))
        vector.add_(gradients.sum(0))
        exchange(*(P2POp(isend, vector, worker) for worker in range(1, size)))
    else:
        exchange(P2POp(isend, vector, 0))
        exchange(P2POp(irecv, vector, 0))
