"""The contract of a gradient sync: how DistributedDataParallel averages gradients over ranks.

A communication hook gets one bucket of gradients after the other, the same on every rank, while the backward pass runs
(Li et al. 2020, section 4). To add one: a class in a file of its own here, and `conf/gradient_sync/<name>.yaml`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Strategy

SumInPlace = Callable[[Tensor, int, int], None]
"""(vector (n,), rank, world size) -> None: the vector becomes the sum over all ranks."""


class GradientSync:
    """DDP's own way: one all-reduce per bucket, by whatever algorithm the backend prefers."""

    name = "all_reduce"
    ranks_agree = True  # whether all ranks have the same gradient afterwards
    rounds_alike = True  # whether it has the same bits, too, so that the ranks' weights can be compared
    is_exact = True  # whether that gradient is the mean of the ranks' own, up to rounding
    needs_hooks = False  # whether it works only in a strategy that runs DistributedDataParallel

    def validate(self, job: JobSpec, strategy: Strategy) -> None:
        """Raise ConfigError for what does not go together. Called before any process starts."""
        if self.needs_hooks and not strategy.uses_communication_hooks:
            raise ConfigError(
                f"gradient_sync={self.name} is a communication hook of DDP; "
                f"type strategy=ddp gradient_sync={self.name}, or gradient_sync=auto"
            )

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        """Register a communication hook on `module`."""

    def before_forward(self, module: DistributedDataParallel) -> None:
        """Called before every forward pass in training."""

    def average_replicas(self, tensors: Iterable[Tensor]) -> None:
        """Average `tensors` over the ranks in place, if ranks hold different weights between two averages."""


def mean_hook(world: World, sum_in_place: SumInPlace) -> Callable[[Any, GradBucket], torch.futures.Future[Tensor]]:
    """A communication hook that averages each bucket by `sum_in_place`."""

    def hook(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        vector = bucket.buffer().div_(world.size)  # before the sum, as DDP does: float16 cannot overflow
        sum_in_place(vector, world.rank, world.size)
        return finished_future(vector)

    return hook


def finished_future(vector: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds `vector` already. DDP expects a future from a hook."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[vector.device] if vector.is_cuda else [])
    future.set_result(vector)
    return future
