"""Local SGD: ranks step on their own gradients and average their weights now and then."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Strategy
from lockstep.strategies.gradient_sync.base import GradientSync, finished_future


class LocalSGD(GradientSync):
    """Every `sync_every` steps the ranks average their weights (Stich 2019)."""

    name = "local_sgd"
    is_exact = False
    needs_hooks = True
    ranks_agree = False

    def __init__(self, sync_every: int) -> None:
        self.sync_every = sync_every
        self.steps_apart = 0  # steps since all ranks held the same weights

    def validate(self, job: JobSpec, strategy: Strategy) -> None:
        super().validate(job, strategy)
        if job.precision == "fp16":
            raise ConfigError(
                "gradient_sync=local_sgd would scale each rank's fp16 loss differently; type trainer.precision=bf16"
            )

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        self.world = world
        module.register_comm_hook(None, self._no_communication)

    def _no_communication(self, _: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.steps_apart += bucket.is_last()
        return finished_future(bucket.buffer())

    def before_forward(self, module: DistributedDataParallel) -> None:
        if self.steps_apart >= self.sync_every:
            self.average_replicas(module.parameters())

    @torch.no_grad()
    def average_replicas(self, tensors: Iterable[Tensor]) -> None:
        """Average in place, unless no step was taken since the last average."""
        if not self.steps_apart:
            return
        tensors = list(tensors)
        vector = torch.cat([tensor.reshape(-1) for tensor in tensors])
        mean = self.world.all_reduce_sum(vector).div_(self.world.size)
        for tensor, values in zip(tensors, mean.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))
        self.steps_apart = 0
