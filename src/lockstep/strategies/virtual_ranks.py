"""Identical bits at every world size that divides the number of virtual ranks.

DDP agrees with one process up to rounding, because the order of a sum changes with the number of ranks. Here a global
batch is always cut into the same parts, the virtual ranks. Each is computed by itself, with its own random numbers and
batch statistics, on one thread. The results are added in one fixed tree, whichever rank computed which part.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.nested import count_samples
from lockstep.data.partition import Part
from lockstep.distributed.shared_memory import SharedMemorySum, tree_sum
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, LossFunction, Strategy
from lockstep.strategies.gradient_sync.base import GradientSync
from lockstep.strategies.packed import from_bytes, to_bytes


class Row(NamedTuple):
    """What a virtual rank adds to the sums of a step. These are views of one vector."""

    gradients: list[Tensor]  # of the trained parameters
    statistics: list[Tensor]  # the floating-point buffers times samples
    changes: list[Tensor]  # in their shapes: samples where the virtual rank has changed the value, else 0
    has_gradient: Tensor  # (parameters,): 1 for each that got a gradient
    samples: Tensor  # 0-d


class VirtualRanks(Strategy):
    """Trains as `count` virtual ranks, each real rank computing some of them one after the other."""

    supports_sync_bn = False  # each virtual rank is computed by itself
    recovers_live = True

    def __init__(self, count: int) -> None:
        self.count = count

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
        torch.set_num_threads(1)  # with more, the sums in a convolution depend on how many there are
        # Uneven only in a world that has lost a rank: some ranks then compute one virtual rank more.
        self.shares = torch.arange(self.count).tensor_split(world.size)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        numbers = [torch.empty(len(self.parameters)), torch.empty(())]
        tensors = [*self.parameters, *statistics, *statistics, *numbers]
        length = sum(tensor.numel() for tensor in tensors)
        rows = max(map(len, self.shares))
        self.rows = torch.zeros(rows, length, device=world.device, dtype=tensors[0].dtype)
        self.views = [self._views(tensors, row) for row in self.rows]
        self.computed = 0  # virtual ranks of this step, on this rank
        self.shares_are_subtrees = self.count == rows * world.size and rows.bit_count() == 1
        self.shared_memory: SharedMemorySum | None = None
        if self.shares_are_subtrees and world.size > 1:
            with suppress(ConfigError):  # on all ranks alike: for GPUs and for several machines
                self.shared_memory = SharedMemorySum(world, length, self.rows.dtype)

    def _views(self, tensors: list[Tensor], vector: Tensor) -> Row:
        *views, has_gradient, samples = views_like(tensors, vector)
        gradients, buffers = views[: len(self.parameters)], views[len(self.parameters) :]
        half = len(buffers) // 2
        return Row(gradients, buffers[:half], buffers[half:], has_gradient, samples)

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
        """One virtual rank's passes. After this rank's last one, `.grad` holds the whole batch's gradient."""
        if self.computed == 0:
            self.rows.zero_()
            self.buffers_before = [buffer.clone() for buffer in self.model.buffers()]
            self.without_gradient = set(range(len(self.parameters)))
        for parameter in self.parameters:
            parameter.grad = None
        super().forward_backward(inputs, targets, loss_function, autocast, is_last)
        self._keep_gradients(self.views[self.computed])
        self._keep_buffers(self.views[self.computed], count_samples(targets), is_last)
        self.computed += 1
        if is_last:
            self._combine()

    @torch.no_grad()
    def _keep_gradients(self, row: Row) -> None:
        has_gradient = [parameter.grad is not None for parameter in self.parameters]
        self.without_gradient -= {number for number, has in enumerate(has_gradient) if has}
        if all(has_gradient):
            row.has_gradient.fill_(1)
        else:
            row.has_gradient.copy_(torch.tensor(has_gradient))
        for parameter, kept in zip(self.parameters, row.gradients, strict=True):
            if parameter.grad is not None:
                kept.add_(parameter.grad)

    @torch.no_grad()
    def _keep_buffers(self, row: Row, samples: int, is_last: bool) -> None:
        """Complete the virtual rank's row. The next virtual rank begins with the buffers that this one began with."""
        buffers = list(self.model.buffers())
        if samples:
            for kept, changes, (buffer, before) in zip(row.statistics, row.changes, self._statistics(), strict=True):
                torch.mul(buffer, samples, out=kept)
                torch.mul(buffer != before, samples, out=changes)
            row.samples.fill_(samples)
        if not is_last:
            for buffer, value in zip(buffers, self.buffers_before, strict=True):
                buffer.copy_(value)

    @torch.no_grad()
    def _combine(self) -> None:
        """Add up all virtual ranks' results in one fixed order, on every rank."""
        self._sum_rows()
        self.computed, summed = 0, self.views[0]
        for parameter, gradient in zip(self.parameters, summed.gradients, strict=True):
            parameter.grad = gradient
        if self.without_gradient:  # here; with zeros for a gradient, weight decay would move what no rank has used
            for parameter, has in zip(self.parameters, summed.has_gradient.tolist(), strict=True):
                parameter.grad = parameter.grad if has else None
        for (buffer, before), total, changes in zip(
            self._statistics(), summed.statistics, summed.changes, strict=True
        ):  # constants keep their bits: an attention's mask of the smallest number would become infinite in the sum
            buffer.copy_(torch.where(changes > 0, total / summed.samples, before))
        self._send_counters()

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        """[(a floating-point buffer as it is now, and as it was before the step), ...]."""
        both = zip(self.model.buffers(), self.buffers_before, strict=True)
        return [(buffer, before) for buffer, before in both if buffer.is_floating_point()]

    def _send_counters(self) -> None:
        """Buffers of integers become those of the last virtual rank: one step counts once.

        Batch norms count steps, alike on all ranks, so these stay at home.
        """
        found = [module.buffers(recurse=False) for module in self.model.modules() if not isinstance(module, _BatchNorm)]
        counters = [buffer for buffers in found for buffer in buffers if not buffer.is_floating_point()]
        if counters and self.world.size > 1:
            packed = to_bytes(counters)
            dist.broadcast(packed, src=self.world.size - 1)
            from_bytes(packed, counters)

    def _sum_rows(self) -> None:
        """The first row becomes the sum of the rows of all ranks, which the others may overwrite."""
        if self.world.size == 1:
            tree_sum(list(self.rows))  # into the first row
            return
        rows = self.rows
        if self.shares_are_subtrees:
            rows = tree_sum(list(rows)).unsqueeze(0)
        if self.shared_memory is not None:
            self.shared_memory(rows[0], self.world.rank, self.world.size)
            return
        gathered = rows.new_empty(self.world.size, *rows.shape)
        dist.all_gather(list(gathered), rows)
        pairs = zip(gathered, self.shares, strict=True)
        self.rows[0] = tree_sum([row for found, share in pairs for row in found[: len(share)]])


def views_like(tensors: Sequence[Tensor], vector: Tensor) -> list[Tensor]:
    """Views of the values of `vector` (n,), one behind the other, in the shapes and layouts of `tensors`."""
    views, start = [], vector.storage_offset()
    for tensor in tensors:
        views.append(vector.as_strided(tensor.shape, torch.empty_like(tensor).stride(), start))
        start += tensor.numel()
    return views
