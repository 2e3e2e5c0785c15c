"""Each matrix in parts, one per rank, which computes with it (Shoeybi et al. 2019; torch's parallelize_module)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, LossFunction, Strategy
from lockstep.strategies.gradient_sync.base import GradientSync
from lockstep.strategies.replicas import replica_groups, validate_replicas
from lockstep.strategies.sharded_state import cut_like_parameters, gather_full, own_blocks
from lockstep.strategies.tensor_plan import TensorPlan

NAME = "strategy=tensor_parallel"


class TensorParallel(Strategy):
    """Neighbouring ranks share one model and compute the same samples. `replicas` such groups share each batch.

    plan: see `TensorPlan`. Layers that it does not name are whole on every rank. In a world of one rank the model
    stays a plain module.
    """

    ranks_agree = False  # each rank holds its own part
    shards_state = True
    waits_in_passes = True
    supports_sync_bn = False  # the ranks of a group compute the same samples, which a sum over all would count again

    def __init__(self, replicas: int, plan: Sequence[Mapping[Any, Any]]) -> None:
        self.replicas, self.plan = replicas, TensorPlan(plan)

    def validate(self, job: JobSpec) -> None:
        validate_replicas(NAME, self.replicas, job.world_size)
        if job.sync_bn == "on":
            raise ConfigError(f"{NAME} has the same samples on several ranks; type sync_bn=off")
        if job.precision == "fp16":
            raise ConfigError(f"{NAME} has a part of some gradients only to scale; type trainer.precision=bf16")
        if job.compile:
            raise ConfigError(f"{NAME} runs the layers, not the compiled model; type trainer.compile=false")
        if job.fused_optimizer:
            raise ConfigError(f"{NAME} has parameters that torch's fused kernels mix up; type optimizer.fused=false")

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        self.plan.validate(model, world_size // self.replicas)

    def setup(self, model: nn.Module, world: World, gradient_sync: GradientSync) -> None:
        super().setup(model, world, gradient_sync)
        if world.size == 1:
            self.ranks_agree = True
            return
        self.ranks_per_model = world.size // self.replicas
        ranks, shares_model, self.shares_batch = replica_groups(self.replicas, world)
        self.counts_samples = world.rank in ranks[:, 0]
        model.to(memory_format=torch.contiguous_format)  # DTensor cannot cut another layout
        mesh = DeviceMesh.from_group(shares_model, world.device.type)
        parallelize_module(model, mesh, self.plan.styles(model), src_data_rank=None)

    def data_parallel_size(self, world_size: int) -> int:
        return self.replicas

    def data_parallel_rank(self, world: World) -> int:
        return world.rank // (world.size // self.replicas)

    def sum_counts(self, count: Tensor) -> Tensor:
        if self.replicas > 1:
            dist.all_reduce(count, group=self.shares_batch)
        return count

    def forward_backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss_function: LossFunction,
        autocast: AbstractContextManager[Any],
        is_last: bool,
    ) -> None:
        super().forward_backward(inputs, targets, loss_function, autocast, is_last)
        if is_last and self.replicas > 1:
            self._sum_gradients()

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Over the replicas, all in one vector."""
        gradients = [_local_gradient(p) for p in self.model.parameters() if p.grad is not None]
        vector = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(vector, group=self.shares_batch)
        for gradient, values in zip(gradients, vector.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view(gradient.shape))

    def clip_grad_norm(self, max_norm: float) -> None:
        norm = self.grad_norm()
        for parameters in self._cut_and_whole():
            clip_grads_with_norm_(parameters, max_norm, norm)

    def grad_norm(self) -> Tensor:
        norms = [get_total_norm([p.grad for p in some if p.grad is not None]) for some in self._cut_and_whole()]
        return get_total_norm([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])

    def _cut_and_whole(self) -> list[list[nn.Parameter]]:
        """The parameters with a gradient, in one list or two: torch cannot mix DTensors with others in one call."""
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        cut: list[nn.Parameter] = [parameter for parameter in trained if isinstance(parameter, DTensor)]
        whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        return [parameters for parameters in (cut, whole) if parameters]

    def full_state(self, named: dict[str, Any]) -> dict[str, Any]:
        return gather_full(named, self.world)

    def shard_state(self, named: dict[str, Any]) -> dict[str, Any]:
        return cut_like_parameters(named, self.model)

    def own_blocks(self, named: dict[str, Any]) -> dict[str, Any]:
        return own_blocks(named, self.world, self.data_parallel_rank(self.world) == 0)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a gradient, in the gradient's own memory."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:  # so torch cuts it after an empty micro-batch
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    local: Tensor = gradient.to_local()
    return local
