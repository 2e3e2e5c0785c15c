"""One replica per rank, gradients averaged while the backward pass runs (torch.nn.parallel.DistributedDataParallel)."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.schema import Positive
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, first_of
from lockstep.strategies.base import JobSpec, Outputs, Strategy, refuse_sparse_gradients
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.strategies.messages import TYPES_SENT, broadcast

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
        if self.options["static_graph"] and job.gradient_accumulation_steps > 1 and job.world_size > 1:
            what = "strategy.static_graph=true needs gradients averaged in every backward pass"
            raise ConfigError(f"{what}; type strategy.static_graph=false, or trainer.gradient_accumulation_steps=1")

    def validate_gradient_sync(self, gradient_sync: GradientSync, job: JobSpec) -> None:
        gradient_sync.validate(job)

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        refuse_sparse_gradients(model, world_size)

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        self.bits_equal, self.plain = gradient_sync.replicas_bitwise_equal, self.module
        self.wrapper: DistributedDataParallel | None = None
        self.waited_for: list[tuple[str, nn.Parameter]] = []  # those without whose gradient no rank gets on
        if world.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return
        devices = {parameter.device for parameter in model.parameters()}
        on_one_gpu = devices == {world.device} and world.device.type == "cuda"
        tensors = [*model.parameters(), *model.buffers()]
        can_send = all(tensor.dtype in TYPES_SENT and tensor.layout == torch.strided for tensor in tensors)
        if not can_send:
            broadcast(tensors)
        devices_used = [world.device.index] if on_one_gpu else None
        options = self.options | {BUFFERS_IN_FORWARD: False}
        self.module = self.wrapper = DistributedDataParallel(
            self.plain, device_ids=devices_used, init_sync=can_send, **options
        )
        gradient_sync.attach(self.wrapper, world)
        if not (self.options["find_unused_parameters"] or self.options["static_graph"]):
            self.waited_for = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.wrapper is None else self.wrapper.no_sync()

    def require_gradients(self) -> None:
        """torch would find these weights in the next step, after an update with gradients that are not averaged."""
        names = [name for name, parameter in self.waited_for if parameter.grad is None]
        if names:
            what = f"no gradient of {first_of(names)} in some step, and all ranks wait for each gradient"
            freeze = f"parameters.freeze=[{','.join(names[:2])}]"
            raise ConfigError(f"{what}; type strategy.find_unused_parameters=true, or {freeze}")

    def gradient_divisor(self) -> int:
        return 1 if self.wrapper is None else self.world.size

    def evaluated_module(self) -> nn.Module:
        return self.plain

    def replicated_tensors(self) -> dict[str, Tensor]:
        return super().replicated_tensors() if self.bits_equal else {}
