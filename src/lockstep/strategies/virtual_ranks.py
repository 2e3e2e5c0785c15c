"""Identical bits at every world size that divides the number of virtual ranks.

DDP agrees with one process up to rounding, because the order of a sum changes with the number of ranks. Here a global
batch is always cut into the same parts, the virtual ranks. Each is computed by itself, with its own random numbers and
batch statistics, on one thread. The results are added in one fixed tree, whichever rank computed which part.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.schema import Count
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import Part, cut
from lockstep.data.source import count_samples
from lockstep.distributed.shared_memory import SharedMemorySum, tree_sum
from lockstep.distributed.sync_batch_norm import BatchNorm
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Loss, Outputs, Strategy, broadcast


@dataclass
class VirtualRanks(Strategy):
    """Trains `count` virtual ranks, each real rank computing some of them one after the other. Each begins with the
    buffers before the step. A buffer of floats becomes the mean over the samples, and one of integers that of the last
    virtual rank: one step counts once."""

    count: Count
    name = "virtual_ranks"
    # Each virtual rank is computed by itself, and a step is in parts already.
    refused = (*Strategy.refused, "sync_bn=on", "trainer.gradient_accumulation_steps")
    passes_whole_batches = False
    waits_for_gradients = True

    def validate(self, job: JobSpec) -> None:
        super().validate(job)
        if self.count % job.world_size:
            fitting = job.world_size * -(-self.count // job.world_size)
            what = f"strategy.count={self.count} virtual ranks cannot be divided among {job.world_size} ranks"
            raise ConfigError(f"{what}; type strategy.count={fitting}")
        if job.on_gpus and not job.config.trainer.deterministic:
            what = "strategy=virtual_ranks on GPUs needs deterministic kernels"
            raise ConfigError(f"{what}; type trainer.deterministic=true")

    def spread(self) -> None:
        model, world = self.model, self.world
        torch.set_num_threads(1)  # with more, the sums in a convolution depend on how many there are
        per_rank = self.count // world.size
        self.share = range(world.rank * per_rank, (world.rank + 1) * per_rank)  # of the virtual ranks
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if len({one.dtype for one in self.parameters}) > 1 or any(one.is_complex() for one in self.parameters):
            raise ConfigError("strategy=virtual_ranks adds up gradients of one real type; type strategy=ddp")
        if any(type(module).get_extra_state is not nn.Module.get_extra_state for module in model.modules()):
            what = "strategy=virtual_ranks cannot give each virtual rank what a module keeps beside its tensors"
            raise ConfigError(f"{what} (get_extra_state); type strategy=ddp")
        # Buffers by their owners: a forward pass may put another tensor into the place of one.
        places = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
        floats = [place for place in places if getattr(*place).is_floating_point()]
        self.others = [place for place in places if place not in floats]
        self.buffers = [*floats, *self.others]
        # A row is what a virtual rank adds to the sums of a step: gradients, how far the buffers of floats have moved,
        # times samples, and the samples.
        tensors = [*self.parameters, *(getattr(*place) for place in floats), torch.empty(())]
        self.rows = torch.zeros(per_rank, sum(map(torch.numel, tensors)), device=world.device, dtype=tensors[0].dtype)
        self.views = [views_like(tensors, row) for row in self.rows]
        self.shares_are_subtrees = per_rank.bit_count() == 1
        self.shared_memory: SharedMemorySum | None = None
        if self.shares_are_subtrees and world.size > 1:
            with suppress(ConfigError):  # on all ranks alike: for GPUs and for several machines
                self.shared_memory = SharedMemorySum(world, self.rows.shape[1], self.rows.dtype)

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
        row = part.number - self.share.start  # in this rank's results
        if row == 0:
            self.buffers_before = [getattr(*place).clone() for place in self.buffers]
            self.gradients_before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        super().forward_backward(part, loss, weight, last, outputs)
        self.require_gradients()
        *views, counted = self.views[row]
        samples, before_step = count_samples(part.targets), list(zip(self.buffers, self.buffers_before, strict=True))
        with torch.no_grad():
            for view, parameter in zip(views, self.parameters, strict=False):
                view.copy_(parameter.grad)  # type: ignore[arg-type]
            for view, (place, then) in zip(views[len(self.parameters) :], before_step, strict=False):
                now = getattr(*place)  # constants stay, those too that are infinite
                torch.mul((now - then).where(now != then, 0), samples, out=view)
            counted.fill_(samples)
            if last:
                self._combine()
            else:  # the next one begins with the buffers that this one began with
                for place, then in before_step:
                    getattr(*place).copy_(then)

    def _combine(self) -> None:
        """Add up all virtual ranks' results in one fixed order, on every rank."""
        self._sum_rows()
        *views, samples = self.views[0]
        for parameter, view, earlier in zip(self.parameters, views, self.gradients_before, strict=False):
            parameter.grad = view if earlier is None else earlier.add_(view)
        for place, before, view in zip(self.buffers, self.buffers_before, views[len(self.parameters) :], strict=False):
            getattr(*place).copy_(before + (view / samples).to(before.dtype))
        if self.others and self.world.size > 1:  # the ranks' batch norms have counted the same steps
            counters = [getattr(*place) for place in self.others if not isinstance(place[0], BatchNorm)]
            broadcast(counters, self.world.size - 1)

    def _sum_rows(self) -> None:
        """The first row becomes the sum of the rows of all ranks, which the others may overwrite."""
        rows = tree_sum(list(self.rows)).unsqueeze(0) if self.shares_are_subtrees else self.rows
        if self.shared_memory is not None:
            self.shared_memory(rows[0])
        elif self.world.size > 1:
            gathered = rows.new_empty(self.world.size, *rows.shape)
            dist.all_gather(list(gathered), rows)
            self.rows[0] = tree_sum(list(gathered.flatten(0, 1)))
        else:
            tree_sum(list(rows))


def views_like(tensors: Sequence[Tensor], vector: Tensor) -> list[Tensor]:
    """Views of the values of `vector` (n,), one behind the other, in the shapes and layouts of `tensors`."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    pairs = zip(tensors, parts, strict=True)
    return [part.as_strided(one.shape, torch.empty_like(one).stride()) for one, part in pairs]
