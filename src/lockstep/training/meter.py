"""Running sums of the loss and the metrics, kept on the device and reduced over the ranks on request."""

import math
from collections import deque
from itertools import accumulate

import torch
from torch import Tensor

from lockstep.distributed.backend import float64_device
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.tasks.base import Task

LOSSES_KEPT = 1000
BUFFERED_STEPS = 64  # steps added up together: the calls for a sum of two numbers cost more than the sum


class Meter:
    """Adds up a task's sums and its count in float64 on the device. Its metrics cost one all-reduce.

    Counts are exact up to 2**53, so an accuracy is the integer count of one process, divided once.
    """

    def __init__(self, task: Task, world: World) -> None:
        self.task, self.world, self.names = task, world, list(task.sums)
        sizes = list(task.sums.values())
        ends = list(accumulate(sizes))
        self.places = {name: slice(end - size, end) for name, size, end in zip(self.names, sizes, ends, strict=True)}
        self.sums = torch.zeros(ends[-1] + 1, dtype=torch.float64, device=float64_device(world.device))
        self.reported = torch.zeros_like(self.sums)
        self.buffered: list[tuple[int, int | Tensor, list[Tensor]]] = []  # (step, count, sums)
        self.recent_losses: deque[tuple[int, Tensor]] = deque(maxlen=LOSSES_KEPT)  # (step, loss) since the last report
        self.counted: float = 0  # over all ranks, behind the means that were returned last

    def clear(self) -> None:
        """Start again from zero."""
        self.buffered = []
        self.recent_losses.clear()
        self.sums.zero_()
        self.reported.zero_()

    def add(self, sums: dict[str, Tensor], count: int | Tensor, step: int = 0) -> None:
        """sums, count: what `task` returned for some samples of this rank. Never waits for the device.

        What is added for one step, counted from 1, can be taken out by `discard` until the next step is added.
        Raises ConfigError if the task does not return all sums.
        """
        if len(self.buffered) >= BUFFERED_STEPS and (step == 0 or step != self.buffered[-1][0]):
            self._add_buffered()
        missing = [name for name in self.names if name not in sums]
        if missing:
            raise ConfigError(
                f"{type(self.task).__name__} returns no sum {missing[0]}, but {', '.join(sums)}; "
                f"leave task.metrics.{missing[0]} out, or type task=<an option in conf/task>"
            )
        self.recent_losses.append((step, sums["loss"].detach()))
        self.buffered.append((step, count, [sums[name].detach() for name in self.names]))

    def discard(self, step: int) -> None:
        """Take out what was added for `step`, the last one."""
        self.buffered = [entry for entry in self.buffered if entry[0] != step]
        kept = [entry for entry in self.recent_losses if entry[0] != step]
        self.recent_losses.clear()
        self.recent_losses.extend(kept)

    def _add_buffered(self) -> None:
        if self.buffered:
            values = [values for _, _, values in self.buffered]
            stacked = [torch.stack(column).to(self.sums.device) for column in zip(*values, strict=True)]
            columns = [column.sum(0, dtype=torch.float64) for column in stacked]
            known = [count for _, count, _ in self.buffered if isinstance(count, int)]
            counted = [count for _, count, _ in self.buffered if isinstance(count, Tensor)]
            self.sums += torch.hstack([*columns, sum(counted, self.sums.new_full((), sum(known)))])
            self.buffered = []

    def totals(self, beside: Tensor | None = None) -> Tensor:
        """(values + 1,): the sums over all ranks, name by name, and last the count. A collective.

        beside: float64 values (n,) that are summed over all ranks in the same all-reduce, in place.
        """
        self._add_buffered()
        if beside is None:
            return self.world.all_reduce_sum(self.sums.clone())
        both = self.world.all_reduce_sum(torch.cat([self.sums, beside]))
        beside.copy_(both[len(self.sums) :])
        return both[: len(self.sums)]

    def means(self) -> dict[str, float]:
        """{metric: its value over every sample of every rank}. A collective."""
        return self._means(self.totals())

    def means_since_last(self, beside: Tensor | None = None) -> dict[str, float]:
        """The metrics of what was added since the last call, over all ranks. beside: see `totals`. A collective."""
        totals = self.totals(beside)
        recent, self.reported = totals - self.reported, totals
        means = self._means(recent)
        if math.isfinite(means["loss"]):
            self.recent_losses.clear()
        return means

    def first_non_finite(self) -> int | None:
        """The first step since the last report whose loss is NaN or infinite on some rank. A collective."""
        bad = [step for step, loss in self.recent_losses if not math.isfinite(loss.item())]
        found = [step for step in self.world.all_gather_json(min(bad, default=None)) if step is not None]
        return min(found, default=None)

    def _means(self, totals: Tensor) -> dict[str, float]:
        values = totals.cpu()
        named = {name: values[place] for name, place in self.places.items()}
        counted = float(values[-1])
        self.counted = int(counted) if counted.is_integer() else counted  # a sum of weights need not be whole
        return self.task.finish(named, self.counted)

    def restore(self, totals: Tensor) -> None:
        """Go on from the `totals` in a snapshot, perhaps of another world size: rank 0 holds them all."""
        self.clear()
        self.reported = totals.to(self.sums.device)
        self.sums = self.reported.clone() if self.world.is_rank_zero else torch.zeros_like(self.reported)
