"""Identical bits at every world size that divides the number of virtual ranks.

DDP agrees with one process up to rounding, because the order of a sum changes with the number of ranks. Here a global
batch is always cut into the same parts, the virtual ranks. Each is computed by itself, with its own random numbers and
batch statistics, on one thread. The results are added in one fixed tree, whichever rank computed which part.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from operator import ne
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.compat import versions
from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import Part, cut
from lockstep.data.source import count_samples
from lockstep.distributed.shared_memory import SharedMemorySum, tree_sum
from lockstep.distributed.sync_batch_norm import BatchNorm
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Loss, Outputs, Strategy
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.strategies.tensor_bytes import from_bytes, to_bytes


class Row(NamedTuple):
    """What a virtual rank adds to the sums of a step. These are views of one vector."""

    gradients: list[Tensor]  # of the trained parameters
    statistics: list[Tensor]  # the floating-point buffers times samples
    changes: list[Tensor]  # in their shapes: samples where the virtual rank has changed the value, else 0
    has_gradient: Tensor  # (parameters,): above 0 for each that got a gradient
    has_changed: Tensor  # (counters,): 1 for each that the last virtual rank has changed
    samples: Tensor  # 0-d


class VirtualRanks(Strategy):
    """Trains as many virtual ranks, each real rank computing some of them one after the other.

    count: parts of a global batch, a multiple of the number of ranks.
    """

    supports_sync_bn = False  # each virtual rank is computed by itself
    passes_whole_batches = False

    def __init__(self, count: Count) -> None:
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

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        for name, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise ConfigError(
                    f"strategy=virtual_ranks gives each virtual rank the tensors before the step, and cannot do so for "
                    f"what {name or 'the model'} keeps beside them (get_extra_state); type strategy=ddp"
                )
        types = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        if len(types) > 1 or any(dtype.is_complex for dtype in types):
            raise ConfigError(
                "strategy=virtual_ranks adds up gradients of one real type, and the weights have "
                f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in types))}; type strategy=ddp"
            )

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        torch.set_num_threads(1)  # with more, the sums in a convolution depend on how many there are
        per_rank = self.count // world.size
        self.share = range(world.rank * per_rank, (world.rank + 1) * per_rank)  # of the virtual ranks
        self.weights = list(model.parameters())  # frozen ones among them
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        norms = (module for module in model.modules() if isinstance(module, BatchNorm))
        of_norms = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        # Buffers of integers that each virtual rank may change, see `_send_counters`. One rank has nobody to send to.
        shared = (buffer for buffer in model.buffers() if world.size > 1 and id(buffer) not in of_norms)
        counters = {id(buffer) for buffer in shared if not buffer.is_floating_point()}
        self.are_counters = [id(buffer) in counters for buffer in model.buffers()]
        numbers = [torch.empty(len(self.parameters)), torch.empty(sum(self.are_counters)), torch.empty(())]
        tensors = [*self.parameters, *statistics, *statistics, *numbers]
        length = sum(tensor.numel() for tensor in tensors)
        self.rows = torch.zeros(per_rank, length, device=world.device, dtype=tensors[0].dtype)
        self.views = [self._views(tensors, row) for row in self.rows]
        begin, size = (sum(tensor.numel() for tensor in part) for part in (self.parameters, statistics))
        self.of_statistics, self.of_changes = slice(begin, begin + size), slice(begin + size, begin + 2 * size)
        self.values_before = self.rows.new_zeros(size)  # the statistics before the step
        self.before_views = views_like(statistics, self.values_before)
        self.computed = 0  # virtual ranks of this step, on this rank
        self.shares_are_subtrees = per_rank.bit_count() == 1
        self.shared_memory: SharedMemorySum | None = None
        if self.shares_are_subtrees and world.size > 1:
            with suppress(ConfigError):  # on all ranks alike: for GPUs and for several machines
                self.shared_memory = SharedMemorySum(world, length, self.rows.dtype)

    def _views(self, tensors: list[Tensor], vector: Tensor) -> Row:
        *views, has_gradient, has_changed, samples = views_like(tensors, vector)
        gradients, buffers = views[: len(self.parameters)], views[len(self.parameters) :]
        half = len(buffers) // 2
        # `.data`: each with a version of its own, which tells whether a backward pass has added to it.
        return Row(
            [view.data for view in gradients], buffers[:half], buffers[half:], has_gradient, has_changed, samples
        )

    def parts(self, number: int, count: int, micro_batches: int) -> Sequence[Part]:
        """The same parts at any world size; neighbours go to one rank."""
        return [Part(own, *cut(count, self.count, own)) for own in self.share]

    def sum_counts(self, counts: Tensor) -> tuple[Any, Tensor]:
        """Added in the order of the virtual ranks: sums of weights that are no whole numbers depend on it."""
        of_all = torch.zeros(self.count, dtype=torch.float64, device=counts.device)
        of_all[self.share.start : self.share.stop] = counts
        return self.world.all_reduce_async(of_all), of_all

    def forward_backward(
        self, part: LoadedPart, loss: Loss, weight: Tensor, last: bool, outputs: Outputs | None = None
    ) -> None:
        """One virtual rank's passes. After this rank's last one, `.grad` holds the whole batch's gradient."""
        if self.computed == 0:
            self.rows.zero_()
            self.buffers_before = [buffer.clone() for buffer in self.model.buffers()]
            self._copy_statistics(self.before_views)
            self.used = set[int]()  # the numbers of the parameters that got a gradient on this rank
        row = self.views[self.computed]
        before = versions(row.gradients)
        for parameter, gradient in zip(self.parameters, row.gradients, strict=True):
            parameter.grad = gradient  # of zeros, to which the backward pass adds
        weights_before = versions(self.weights)
        super().forward_backward(part, loss, weight, last, outputs)
        weights_now = versions(self.weights)
        if weights_now != weights_before:
            changed = map(ne, weights_now, weights_before)
            name = next(compress((name for name, _ in self.model.named_parameters()), changed))
            raise ConfigError(
                f"the forward pass changes the weight {name}, and strategy=virtual_ranks makes several in a step; "
                f"type strategy=ddp, or keep what is no trained weight in a buffer (register_buffer)"
            )
        added = [now != then for now, then in zip(versions(row.gradients), before, strict=True)]
        self.used.update(number for number, is_used in enumerate(added) if is_used)
        self._keep_buffers(row, count_samples(part.targets), last)
        self.computed += 1
        if last:
            self._combine()

    @torch.no_grad()
    def _keep_buffers(self, row: Row, samples: int, is_last: bool) -> None:
        """Complete the virtual rank's row. The next virtual rank begins with the buffers that this one began with."""
        if samples and row.statistics:
            self._copy_statistics(row.statistics)
            values, changes = self.rows[self.computed, self.of_statistics], self.rows[self.computed, self.of_changes]
            torch.ne(values, self.values_before, out=changes).mul_(samples)
            values.mul_(samples)
            row.samples.fill_(samples)
        if not is_last:
            for buffer, value in zip(self.model.buffers(), self.buffers_before, strict=True):
                buffer.copy_(value)

    @torch.no_grad()
    def _combine(self) -> None:
        """Add up all virtual ranks' results in one fixed order, on every rank."""
        summed, uses_all = self.views[0], len(self.used) == len(self.parameters)
        if uses_all:
            summed.has_gradient.fill_(1)
        else:
            used = [number in self.used for number in range(len(self.parameters))]
            summed.has_gradient.copy_(torch.tensor(used))
        if self.world.rank == self.world.size - 1 and len(summed.has_changed):
            changed = [not torch.equal(counter, before) for counter, before in self._counters()]
            summed.has_changed.copy_(torch.tensor(changed))
        self._sum_rows()
        self.computed = 0
        for parameter, gradient in zip(self.parameters, summed.gradients, strict=True):
            parameter.grad = gradient
        if not uses_all:  # with zeros for a gradient, weight decay would move what no rank has used
            for parameter, has in zip(self.parameters, summed.has_gradient.tolist(), strict=True):
                parameter.grad = parameter.grad if has else None
        # Constants keep their bits: an attention's mask of the smallest number would become infinite in the sum.
        before = filter(Tensor.is_floating_point, self.buffers_before)
        found = zip(self._statistics(), before, summed.statistics, summed.changes, strict=True)
        for buffer, value, total, changes in found:
            buffer.copy_(torch.where(changes > 0, total / summed.samples, value))
        if len(summed.has_changed):
            self._send_counters(summed.has_changed.tolist())

    def _statistics(self) -> list[Tensor]:
        """The floating-point buffers as they are now."""
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]

    @torch.no_grad()
    def _copy_statistics(self, views: list[Tensor]) -> None:
        for view, buffer in zip(views, self._statistics(), strict=True):
            view.copy_(buffer)

    def _counters(self) -> list[tuple[Tensor, Tensor]]:
        """[(a buffer of integers as it is now, and as it was before the step), ...], but those that batch norms count
        steps with: these are alike on all ranks."""
        found = zip(self.model.buffers(), self.buffers_before, self.are_counters, strict=True)
        return [(buffer, before) for buffer, before, is_counter in found if is_counter]

    def _send_counters(self, has_changed: Sequence[float]) -> None:
        """Counters become those of the last virtual rank: one step counts once. has_changed: by that one, of each."""
        sent = []
        for (counter, before), changed in zip(self._counters(), has_changed, strict=True):
            if changed:
                sent.append(counter)
            else:
                counter.copy_(before)
        if sent:
            packed = to_bytes(sent)
            dist.broadcast(packed, src=self.world.size - 1)
            from_bytes(packed, sent)

    def _sum_rows(self) -> None:
        """The first row becomes the sum of the rows of all ranks, which the others may overwrite."""
        if self.world.size == 1:
            tree_sum(list(self.rows))  # into the first row
            return
        rows = self.rows
        if self.shares_are_subtrees:
            rows = tree_sum(list(rows)).unsqueeze(0)
        if self.shared_memory is not None:
            self.shared_memory(rows[0])
            return
        gathered = rows.new_empty(self.world.size, *rows.shape)
        dist.all_gather(list(gathered), rows)
        self.rows[0] = tree_sum(list(gathered.flatten(0, 1)))


def views_like(tensors: Sequence[Tensor], vector: Tensor) -> list[Tensor]:
    """Views of the values of `vector` (n,), one behind the other, in the shapes and layouts of `tensors`."""
    views, start = [], vector.storage_offset()
    for tensor in tensors:
        views.append(vector.as_strided(tensor.shape, torch.empty_like(tensor).stride(), start))
        start += tensor.numel()
    return views
