"""Gradients travel as float16."""

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.world import World
from lockstep.strategies.gradient_sync.base import GradientSync


class Float16(GradientSync):
    """All-reduce of float16: half the bytes, 11 bits of precision. Gradients beyond 65504 overflow."""

    name = "fp16"
    is_exact = False
    needs_hooks = True

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
