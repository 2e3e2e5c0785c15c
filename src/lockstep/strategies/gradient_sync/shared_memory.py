"""Sums in memory that all ranks of one machine share: the fastest way between CPU ranks."""

from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.shared_memory import SharedMemorySum
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.gradient_sync.base import GradientSync, mean_hook


class SharedMemory(GradientSync):
    """Every rank adds up one part of each bucket, see `lockstep.distributed.shared_memory`."""

    name = "shared_memory"
    needs_hooks = True

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        """Raises ConfigError, on all ranks, for GPUs, several machines, and weights of several types."""
        parameters = list(module.parameters())
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise ConfigError("gradient_sync=shared_memory needs weights of one type; type gradient_sync=all_reduce")
        length = sum(parameter.numel() for parameter in parameters)
        sum_in_place = SharedMemorySum(world, length, parameters[0].dtype)
        module.register_comm_hook(None, mean_hook(world, sum_in_place))
