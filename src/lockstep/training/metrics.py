"""The sums of a task over the steps of an epoch, or over an evaluation, kept on the device."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.distributed.world import World, float64_device
from lockstep.tasks.base import Task

AT_ONCE = 64  # entries that are added up together: the calls for a sum of two numbers cost more than the sum
LOSSES_KEPT = 1000


@dataclass(eq=False)
class Meter:
    """Adds up a task's values and what they are divided by, in float64. Counts are exact up to 2**53, so an accuracy is
    the whole number of one process, divided once. names: of the values. totals: (2 n,) of this rank: the n values, and
    then the n counts."""

    task: Task
    world: World

    def __post_init__(self) -> None:
        self.names, self.device = self.task.names, float64_device(self.world.device)
        self.clear()

    def clear(self) -> None:
        """Start again from zero, with a new epoch."""
        self.waiting: list[tuple[int, Sequence[Tensor], Sequence[int | Tensor]]] = []  # (step, values, counts)
        self.losses = deque[tuple[list[int], Tensor]](maxlen=LOSSES_KEPT)  # (steps, their losses (n,))
        self.totals = torch.zeros(2 * len(self.names), dtype=torch.float64, device=self.device)
        self.logged = [0.0] * len(self.totals)  # those over all ranks at the last log of this epoch

    def add(self, step: int, values: Sequence[Tensor], counts: Sequence[int | Tensor]) -> None:
        """What `Task.sums` gave for some samples of this rank in `step`. Never waits for the device."""
        if len(self.waiting) >= AT_ONCE and self.waiting[-1][0] != step:  # `discard` may take out a whole step
            self.flush()
        self.waiting.append((step, values, counts))

    def discard(self, step: int) -> None:
        """Take out what was added for `step`, the last one, whose update is left out."""
        self.waiting = [entry for entry in self.waiting if entry[0] != step]

    def flush(self) -> Tensor:
        """`totals`, complete."""
        if self.waiting:
            steps, values, counts = zip(*self.waiting, strict=True)
            self.waiting = []
            by_step = torch.stack([one for row in values for one in row]).view(len(steps), -1)
            self.losses.append((list(steps), by_step[:, 0]))
            sums = by_step.to(self.device).sum(0, dtype=torch.float64)
            by_name = [*zip(*counts, strict=True)]
            # Plain numbers, as most tasks count, cross to the device at once.
            known = torch.tensor([0 if isinstance(one[0], Tensor) else sum(one) for one in by_name], dtype=sums.dtype)
            self.totals += torch.cat([sums, known.to(self.device, non_blocking=True)])
            for place, column in enumerate(by_name, start=len(self.names)):
                if isinstance(column[0], Tensor):
                    self.totals[place] += torch.stack(column).to(self.device).sum(dtype=torch.float64)
        return self.totals

    def recent(self, totals: Sequence[float], is_logged: bool) -> list[float]:
        """What has come to totals over all ranks since the last log. is_logged: whether this is the next one."""
        before, self.logged = self.logged, list(totals) if is_logged else self.logged
        return [now - then for now, then in zip(totals, before, strict=True)]

    def means(self, totals: Sequence[float]) -> dict[str, float]:
        """{name: mean} of totals over all ranks; empty if nothing was counted."""
        counts = totals[len(self.names) :]
        if not any(counts):
            return {}
        named = zip(self.names, totals, counts, strict=False)  # the totals end with the counts
        return self.task.finish({name: value / (count or 1) for name, value, count in named})

    def first_non_finite(self) -> int | None:
        """The first of the steps that are kept whose loss is NaN or infinite on some rank. A collective."""
        self.flush()
        pairs = [pair for steps, losses in self.losses for pair in zip(steps, losses.tolist(), strict=True)]
        bad = min((step for step, loss in pairs if not math.isfinite(loss)), default=None)
        return min(filter(None, self.world.all_gather_json(bad)), default=None)

    def restore(self, totals: Tensor, logged: Sequence[float] = (), **names: object) -> None:
        """Go on from totals over all ranks, perhaps of another world size: rank 0 holds them all. logged: none are in
        snapshots of earlier versions."""
        self.clear()
        self.logged = [*logged] or self.logged
        if self.world.is_rank_zero:
            self.totals = totals.to(self.device)
