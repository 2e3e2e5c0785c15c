"""Gradients travel as bfloat16."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.world import World
from lockstep.strategies.gradient_sync.base import GradientSync


class BFloat16(GradientSync):
    """All-reduce of bfloat16: half the bytes, 8 bits of precision, float32's range."""

    name = "bf16"
    is_exact = False
    needs_hooks = True

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        module.register_comm_hook(None, _bf16_hook)


def _bf16_hook(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    # DDP accepts torch's hook, which it knows by name, with NCCL alone. gloo adds bfloat16 just as well.
    return default_hooks.bf16_compress_hook(group, bucket)
