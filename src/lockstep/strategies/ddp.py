"""One replica per rank, gradients averaged while the backward pass runs (torch.nn.parallel.DistributedDataParallel)."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.schema import Positive
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Strategy, refuse
from lockstep.strategies.messages import broadcast

# The second name is that of torch before 2.13.
ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
BUFFERS_IN_FORWARD = "forward_sync_buffers" if "forward_sync_buffers" in ARGUMENTS else "broadcast_buffers"


class DDP(Strategy):
    """A replica per rank (Li et al. 2020). `gradient_sync` says how gradients are averaged.

    In a world of one rank, and without trainable parameters, nothing is averaged and the model stays a plain module.
    Buffers are not broadcast before every forward pass, because batch norm does not read them in training;
    `sync_buffers` does it before an evaluation.

    gradient_as_bucket_view: gradients lie in the buffers that are sent.
    static_graph: every step uses the same parameters.
    bucket_cap_mb: megabytes of gradients that are sent at once.
    find_unused_parameters: some parameters get no gradient in some steps.
    """

    name = "ddp"
    refused = ()

    def __init__(
        self,
        gradient_as_bucket_view: bool,
        static_graph: bool,
        bucket_cap_mb: Positive,
        find_unused_parameters: bool,
    ) -> None:
        self.options: dict[str, Any] = {
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
        }

    def validate(self, job: JobSpec) -> None:
        super().validate(job)
        refuse(f"gradient_sync={job.gradient_sync.name}", job.gradient_sync.refused, job)
        if self.options["static_graph"] and job.config.trainer.gradient_accumulation_steps > 1 and job.world_size > 1:
            what = "strategy.static_graph=true needs gradients averaged in every backward pass"
            raise ConfigError(f"{what}; type strategy.static_graph=false, or trainer.gradient_accumulation_steps=1")

    def spread(self) -> None:
        world, parameters = self.world, list(self.model.parameters())
        self.wrapper: DistributedDataParallel | None = None
        if world.size == 1 or not any(parameter.requires_grad for parameter in parameters):
            return
        for tensor in (*parameters, *self.model.buffers()):
            broadcast([tensor])  # DDP does so with few types
        on_one_gpu = world.device.type == "cuda" and {parameter.device for parameter in parameters} == {world.device}
        self.module = self.wrapper = DistributedDataParallel(
            self.module,
            device_ids=[world.device.index] if on_one_gpu else None,
            init_sync=False,
            **(self.options | {BUFFERS_IN_FORWARD: False}),
        )
        self.gradient_divisor = world.size
        self.waits_for_gradients = not (self.options["find_unused_parameters"] or self.options["static_graph"])
        self.gradient_sync.attach(self.wrapper, world)

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.wrapper is None else self.wrapper.no_sync()

    def replicated_tensors(self) -> dict[str, Tensor]:
        return super().replicated_tensors() if self.gradient_sync.replicas_bitwise_equal else {}
