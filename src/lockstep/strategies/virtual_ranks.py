"""Identical bits at every world size that divides the number of virtual ranks.

DDP agrees with one process up to rounding, because the order of a sum changes with the number of ranks. Here a global
batch is always cut into the same parts, the virtual ranks. Each is computed by itself, with its own random numbers and
batch statistics, on one thread. The results are added in one fixed tree, whichever rank computed which part.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.partition import Part
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, LossFunction, Strategy
from lockstep.strategies.gradient_sync.base import GradientSync


class VirtualRanks(Strategy):
    """Trains as `count` virtual ranks, each real rank computing some of them one after the other."""

    supports_sync_bn = False  # each virtual rank is computed by itself
    recovers_live = True

    def __init__(self, count: int) -> None:
        self.count = count
        self.results: list[Tensor] = []  # of each virtual rank of this step: gradients and weighted buffers

    def validate(self, job: JobSpec) -> None:
        if self.count % job.world_size:
            fitting = job.world_size * -(-self.count // job.world_size)
            raise ConfigError(
                f"strategy.count={self.count} virtual ranks cannot be divided among {job.world_size} ranks; "
                f"type strategy.count={fitting}"
            )
        if job.gradient_accumulation_steps > 1:
            raise ConfigError(
                "strategy=virtual_ranks computes a step in parts already; type trainer.gradient_accumulation_steps=1"
            )
        if job.sync_bn == "on":
            raise ConfigError("strategy=virtual_ranks keeps batch statistics per virtual rank; type sync_bn=off")
        if job.device_type == "cuda" and not job.deterministic:
            raise ConfigError(
                "strategy=virtual_ranks on GPUs needs deterministic kernels; type trainer.deterministic=true"
            )

    def setup(self, model: nn.Module, world: World, gradient_sync: GradientSync) -> None:
        super().setup(model, world, gradient_sync)
        # Uneven only in a world that has lost a rank: some ranks then compute one virtual rank more.
        self.shares = torch.arange(self.count).tensor_split(world.size)
        torch.set_num_threads(1)  # with more, the sums in a convolution depend on how many there are

    def parts(self, batch: Tensor, accumulation_steps: int) -> list[Part]:
        """The same parts at any world size; neighbours go to one rank."""
        samples = batch.tensor_split(self.count)
        return [Part(number, samples[number]) for number in self.shares[self.world.rank].tolist()]

    def forward_backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss_function: LossFunction,
        autocast: AbstractContextManager[Any],
        is_last: bool,
    ) -> None:
        with self._virtual_rank(len(targets), is_last):
            super().forward_backward(inputs, targets, loss_function, autocast, is_last)

    @contextmanager
    def _virtual_rank(self, samples: int, is_last: bool) -> Iterator[None]:
        """One virtual rank's passes. After this rank's last one, `.grad` holds the whole batch's gradient."""
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        yield
        with torch.no_grad():
            self.results.append(self._result(samples))
            self.model.zero_grad(set_to_none=True)
            if is_last:
                self._combine()  # counters stay as the last virtual rank left them: one step counts once
            else:
                for buffer, value in before:
                    buffer.copy_(value)

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]

    def _result(self, samples: int) -> Tensor:
        """One vector: gradients, buffers times samples, samples."""
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        statistics = [buffer * samples if samples else torch.zeros_like(buffer) for buffer in self._floating_buffers()]
        count = torch.tensor([float(samples)], device=parameters[0].device, dtype=parameters[0].dtype)
        return torch.cat([tensor.flatten() for tensor in (*gradients, *statistics, count)])

    def _combine(self) -> None:
        """Add up all virtual ranks' results in one fixed order, on every rank."""
        mine = self.results[0].new_zeros(max(map(len, self.shares)), len(self.results[0]))
        mine[: len(self.results)] = torch.stack(self.results)
        gathered = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(gathered, mine)
        total = tree_sum(torch.cat([rows[: len(share)] for rows, share in zip(gathered, self.shares, strict=True)]))
        parameters, buffers = list(self.model.parameters()), self._floating_buffers()
        *sums, samples = total.split([tensor.numel() for tensor in (*parameters, *buffers)] + [1])
        for parameter, summed in zip(parameters, sums, strict=False):
            parameter.grad = summed.view(parameter.shape).clone(memory_format=torch.preserve_format)
        for buffer, summed in zip(buffers, sums[len(parameters) :], strict=True):
            buffer.copy_(summed.view(buffer.shape) / samples)
        self.results.clear()


def tree_sum(rows: Tensor) -> Tensor:
    """Rows (V, n) -> their sum (n,), always in the same order: neighbours in pairs, then pairs of pairs."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[0:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]
