"""One replica per rank, gradients averaged while the backward pass runs (torch.nn.parallel.DistributedDataParallel)."""

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.compat import versions
from lockstep.config.schema import Positive
from lockstep.distributed.old_world import all_reduce_sums
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.models.base import sparse_parameters
from lockstep.strategies.base import JobSpec, LossFunction, Strategy, UnusedParameters, forward
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.strategies.tensor_bytes import TYPES_SENT, broadcast

# The second name is that of torch before 2.13.
ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
BUFFERS_IN_FORWARD = "forward_sync_buffers" if "forward_sync_buffers" in ARGUMENTS else "broadcast_buffers"


class DDP(Strategy):
    """A replica per rank (Li et al. 2020). `gradient_sync` says how gradients are averaged.

    In a world of one rank, and without trainable parameters, nothing is averaged and the model stays a plain module.
    Buffers are not broadcast before every forward pass, because batch norm does not read them in training;
    `sync_buffers` does it before an evaluation. Others that differ between ranks: see `lockstep.training.buffers`.

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
            raise ConfigError(
                "strategy.static_graph=true needs gradients averaged in every backward pass; "
                "type strategy.static_graph=false, or trainer.gradient_accumulation_steps=1"
            )

    def validate_gradient_sync(self, gradient_sync: GradientSync, job: JobSpec) -> None:
        gradient_sync.validate(job)

    def setup(self, model: nn.Module, world: World, gradient_sync: GradientSync, precision: str = "fp32") -> None:
        super().setup(model, world, gradient_sync, precision)
        self.gradient_sync = gradient_sync
        self.ranks_agree = gradient_sync.ranks_agree
        self.waited_for = dict[str, nn.Parameter]()  # those without whose gradient no rank gets on
        self.sparse = sparse_parameters(model)
        # torch's reducer divides the dense gradients twice that come after a sparse one (2.14.1).
        for parameter in self.sparse:
            parameter.requires_grad_(False)
        if world.size > 1 and any(parameter.requires_grad for parameter in model.parameters()):
            self._wrap(model, world, gradient_sync)
        for parameter in self.sparse:
            parameter.requires_grad_(True)
        self.apart = [*self.sparse]  # trained parameters that DistributedDataParallel does not know

    def _wrap(self, model: nn.Module, world: World, gradient_sync: GradientSync) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        on_one_gpu = devices == {world.device} and world.device.type == "cuda"
        tensors = [*model.parameters(), *model.buffers()]
        can_send = all(tensor.dtype in TYPES_SENT and tensor.layout == torch.strided for tensor in tensors)
        if not can_send:
            broadcast(tensors)
        self.module = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if on_one_gpu else None,
            init_sync=can_send,
            **self.options | {BUFFERS_IN_FORWARD: False},
        )
        gradient_sync.attach(self.module, world)
        if not (self.options["find_unused_parameters"] or self.options["static_graph"]):
            self.waited_for = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def forward_backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss_function: LossFunction,
        autocast: AbstractContextManager[Any],
        is_last: bool,
    ) -> None:
        averaging: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.module, DistributedDataParallel):
            self.gradient_sync.before_forward(self.module)
            if not is_last:  # gradients are averaged in the backward pass of the step's last part only
                averaging = self.module.no_sync()
        before = self._gradients() if is_last else {}
        with averaging:
            with autocast:
                outputs = forward(self.module, inputs)
            loss_function(outputs, targets).backward()
        if is_last:
            self._require_all_gradients(before)

    def _gradients(self) -> dict[str, tuple[Tensor, int]]:
        """Those that earlier parts of the step have left, and how often they were changed."""
        found = {name: p.grad for name, p in self.waited_for.items() if p.grad is not None}
        return {name: (gradient, *versions([gradient])) for name, gradient in found.items()}  # type: ignore[misc]

    def _require_all_gradients(self, before: dict[str, tuple[Tensor, int]]) -> None:
        """Raise UnusedParameters, on this rank alone, if its last backward pass has not reached all parameters.

        A bucket that lacks one is never sent: the other ranks wait for it, or step without it.
        """
        missing = [name for name, parameter in self.waited_for.items() if parameter.grad is None]
        for name, (gradient, version) in before.items():
            if self.waited_for[name].grad is gradient and versions([gradient]) == [version]:
                missing.append(name)
        trained = [name for name in missing if self.waited_for[name].requires_grad]  # others: see `freeze`
        if trained:
            raise UnusedParameters(trained, self.world.rank)

    def unfreeze(self, parameters: list[nn.Parameter], what: str) -> None:
        self.apart += parameters

    def freeze(self, what: str) -> None:
        if isinstance(self.module, DistributedDataParallel) and not self.options["find_unused_parameters"]:
            raise ConfigError(
                f"{what}, and DistributedDataParallel waits for its gradient; type strategy.find_unused_parameters=true"
            )

    def average_apart(self) -> None:
        if self.world.size == 1 or not self.apart or not self.ranks_agree:  # or the weights are averaged
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self.apart]
        are_used = self.world.any_of([p.grad is not None for p in self.apart])
        for number, total in enumerate(all_reduce_sums(self.world, gradients)):
            # In the layout of the weight: torch's fused optimizers take another one for the same.
            mean = gradients[number].copy_(total / self.gradient_divide_factor())
            self.apart[number].grad = mean.to_sparse(1) if number < len(self.sparse) else mean
            if not are_used[number]:  # a gradient of zeros would let momentum and weight decay move it
                self.apart[number].grad = None

    def gradient_divide_factor(self) -> int:
        return self.world.size if isinstance(self.module, DistributedDataParallel) else 1

    def average_replicas(self, tensors: Iterable[Tensor]) -> None:
        self.gradient_sync.average_replicas(tensors)

    def replicated_tensors(self) -> dict[str, Tensor]:
        return super().replicated_tensors() if self.gradient_sync.replicas_bitwise_equal else {}
