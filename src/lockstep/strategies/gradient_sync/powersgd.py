"""Low-rank gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Strategy
from lockstep.strategies.gradient_sync.base import GradientSync


class PowerSGD(GradientSync):
    """Low-rank gradients with error feedback (Vogels, Karimireddy and Jaggi 2019), by torch.

    rank: of the approximation. start_step: steps of plain all-reduce first, at least 2. min_compression: a matrix that
    would shrink by less than this factor is sent whole. epsilon: prevents a division by zero for columns of zeros.
    """

    name = "powersgd"
    is_exact = False
    rounds_alike = False  # on some CPUs a few weights differ between ranks in their last bit
    needs_hooks = True

    def __init__(self, rank: int, start_step: int, min_compression: float, epsilon: float) -> None:
        self.state_options: dict[str, Any] = {
            "matrix_approximation_rank": rank,
            "start_powerSGD_iter": start_step,
            "min_compression_rate": min_compression,
            "orthogonalization_epsilon": epsilon,
        }

    def validate(self, job: JobSpec, strategy: Strategy) -> None:
        super().validate(job, strategy)
        if job.nan == "skip":
            raise ConfigError(
                "gradient_sync=powersgd adds the error of each step to the next, a NaN too; "
                "type watch.nan=rollback, or gradient_sync=auto"
            )

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        module.register_comm_hook(PowerSGDState(None, **self.state_options), _one_bucket_at_a_time)


def _one_bucket_at_a_time(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """torch's hook without overlap: with several buckets at once it deadlocks on gloo.

    It waits, on gloo's threads, for all-reduces that only gloo's threads can run.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future
