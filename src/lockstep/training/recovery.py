"""What a rank notes after every step, so that the step after it can be done again when another rank has died.

Weights, optimizer and the rest of the run's state change only between collectives, so an error in a collective leaves
them as they were after the last step. Buffers and sums change during a step: they are noted.
"""

import copy
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lockstep.distributed.loss_pages import PAGE_BYTES, PAGE_ROWS
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import Advance
from lockstep.tasks.base import Task
from lockstep.training.meter import Meter
from lockstep.training.state import Progress, TrainState

Position = tuple[int, int]
"""(optimizer steps done, 1 if what follows the last of them is done, too: its logging, the evaluation of its epoch)."""


class PagedMeter(Meter):
    """A meter whose sums outlive its rank: they are in the rank's page before the step's gradients are averaged.

    If a rank has ended a step, then every rank has noted its sums of it. A rank is at most two steps ahead of another
    one, so the page holds more steps than two.
    """

    def __init__(self, task: Task, world: World, pages: Tensor) -> None:
        super().__init__(task, world)
        self.values = len(self.sums) + 1
        if self.values > pages.shape[2]:
            raise ConfigError(
                f"launch.recover=live has room for {pages.shape[2] - 2} sums, and this task has {self.values - 2}; "
                f"type launch.recover=restart"
            )
        self.pages = pages
        self.rows = pages[world.rank, :, : self.values]

    def add(self, sums: dict[str, Tensor], count: int | Tensor, step: int = 0) -> None:
        """As in the base class, but added up at once."""
        self.recent_losses.append((step, sums["loss"].detach()))
        for place, value in zip(self.places.values(), self._values(sums), strict=True):
            self.sums[place] += value
        self.sums[-1] += count
        self.note(step)

    def note(self, step: int) -> None:
        """Write the sums as those after `step`."""
        row = self.rows[step % PAGE_ROWS]
        row[1:] = self.sums
        row[0] = step

    def noted_by_all(self, step: int) -> Tensor:
        """(ranks, values + 1): the sums of all ranks of this world after `step`, of dead ranks, too."""
        rows = self.pages[: self.world.size, step % PAGE_ROWS, : self.values]
        return torch.where(rows[:, :1] == step, rows[:, 1:], 0.0)

    def go_back(self, sums: Tensor, reported: Tensor) -> None:
        """Take this rank's sums from those of all ranks. Those of a world of another size go to rank 0."""
        self.clear()
        if len(sums) == self.world.size:
            self.sums.copy_(sums[self.world.rank])
        elif self.world.is_rank_zero:
            self.sums.copy_(sums.sum(0))
        self.reported.copy_(reported)


def open_pages(path: str) -> Tensor:
    """(pages, PAGE_ROWS, values): the pages of all ranks, and one more."""
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=torch.float64).view(-1, PAGE_ROWS, PAGE_BYTES // 8 // PAGE_ROWS)


@dataclass
class Note:
    """A state to which the run can go back: the one after a step, or after the end of its epoch.

    advance: the step, if its logging is still to come. reported: the meter's totals at the last report. grad_norm: as
    in TrainState.
    """

    position: Position
    progress: Progress
    advance: Advance | None
    reported: Tensor
    grad_norm: tuple[int, Tensor] | None
    buffers: dict[str, Tensor] = field(default_factory=dict)


class StepNotes:
    """Keeps the latest Note of `state`."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.buffers = dict(state.strategy.model.named_buffers())
        self.copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self.latest = self._take(None)

    def after_step(self, advance: Advance | None) -> None:
        """Call it after each step with how far it went, and with None when the end of an epoch is done with."""
        if self.buffers:
            torch._foreach_copy_(list(self.copies.values()), list(self.buffers.values()))
        self.latest = self._take(advance)

    def _take(self, advance: Advance | None) -> Note:
        state, progress = self.state, copy.copy(self.state.progress)
        if advance is not None:
            progress.evaluation_pending = state.finished  # by trainer.max_steps: the last step's evaluation comes yet
        position = (progress.step, int(advance is None))
        return Note(position, progress, advance, state.meter.reported.clone(), state.grad_norm, self.copies)
