"""Running sums of the loss and the metrics, kept on the device and reduced over the ranks on request."""

import math
from collections import deque

import torch
from torch import Tensor

from lockstep.distributed.world import World

LOSSES_KEPT = 1000
BUFFERED_STEPS = 64  # steps added up together: the calls for a sum of two numbers cost more than the sum


class Meter:
    """Adds up named sums and a sample count in float64 on the device. A mean over all ranks costs one all-reduce.

    Counts are exact up to 2**53 samples, so an accuracy is the integer count of one process, divided once.
    """

    def __init__(self, names: list[str], world: World) -> None:
        self.names, self.world = names, world
        self.sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=world.device)
        self.reported = torch.zeros_like(self.sums)
        self.buffered: list[list[Tensor]] = []
        self.buffered_count = 0
        self.recent_losses: deque[tuple[int, Tensor]] = deque(maxlen=LOSSES_KEPT)  # (step, loss) since the last report

    def clear(self) -> None:
        """Start again from zero."""
        self.buffered, self.buffered_count = [], 0
        self.recent_losses.clear()
        self.sums.zero_()
        self.reported.zero_()

    def add(self, sums: dict[str, Tensor], count: int, step: int = 0) -> None:
        """sums: {name: 0-d tensor, summed over this rank's `count` samples}. Never waits for the device."""
        self.recent_losses.append((step, sums["loss"].detach()))
        self.buffered.append([sums[name].detach() for name in self.names])
        self.buffered_count += count
        if len(self.buffered) == BUFFERED_STEPS:
            self._add_buffered()

    def _add_buffered(self) -> None:
        if self.buffered:
            columns = [torch.stack(column).sum(dtype=torch.float64) for column in zip(*self.buffered, strict=True)]
            self.sums += torch.stack([*columns, self.sums.new_full((), self.buffered_count)])
            self.buffered, self.buffered_count = [], 0

    def totals(self) -> Tensor:
        """(len(names) + 1,): the sums over all ranks and, last, the number of samples. A collective."""
        self._add_buffered()
        return self.world.all_reduce_sum(self.sums.clone())

    def means(self) -> dict[str, float]:
        """{name: mean over every sample of every rank}. A collective."""
        return self._means(self.totals())

    def means_since_last(self) -> dict[str, float]:
        """The means over what was added since the last call, over all ranks. A collective."""
        totals = self.totals()
        recent, self.reported = totals - self.reported, totals
        means = self._means(recent)
        if math.isfinite(means["loss"]):
            self.recent_losses.clear()
        return means

    def first_non_finite(self) -> int | None:
        """The first step since the last report whose loss is NaN or infinite on some rank. A collective."""
        bad = [step for step, loss in self.recent_losses if not math.isfinite(loss.item())]
        found = [step for step in self.world.all_gather_object(min(bad, default=None)) if step is not None]
        return min(found, default=None)

    def _means(self, totals: Tensor) -> dict[str, float]:
        *sums, count = totals.tolist()
        return {name: value / max(count, 1) for name, value in zip(self.names, sums, strict=True)}

    def restore(self, totals: Tensor) -> None:
        """Go on from the `totals` in a snapshot, perhaps of another world size: rank 0 holds them all."""
        self.clear()
        self.reported = totals.to(self.sums.device)
        self.sums = self.reported.clone() if self.world.is_rank_zero else torch.zeros_like(self.reported)
