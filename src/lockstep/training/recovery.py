"""What a rank notes after every step, so that the step after it can be done again when another rank has died.

Weights, optimizer and the rest of the run's state change only between collectives, so an error in a collective leaves
them as they were after the last step. Buffers and sums change during a step, and an evaluation moves `Plateau` on:
they are noted.
"""

import copy
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.loss_pages import PAGE_BYTES, PAGE_ROWS
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import Advance, JobSpec, Strategy
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.tasks.base import Task
from lockstep.training.meter import Meter
from lockstep.training.schedulers import Plateau
from lockstep.training.state import Progress, TrainState

Position = tuple[int, int]
"""(optimizer steps done, 1 if what follows the last of them is done, too: its logging, the evaluation of its epoch)."""


def validate_recovery(job: JobSpec, strategy: Strategy, gradient_sync: GradientSync) -> None:
    """Raise ConfigError for what a new rank could not take over from the others."""
    reasons = {
        "needs ranks with the same weights; type strategy=ddp": not strategy.recovers_live,
        "cannot go back behind a rollback; type watch.nan=stop": job.nan == "rollback",
        "needs a gradient sync that remembers nothing; type gradient_sync=auto": gradient_sync.name
        in ("powersgd", "local_sgd"),
        "needs the same running statistics on all ranks; type sync_bn=on": strategy.supports_sync_bn
        and job.sync_bn == "off",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"launch.recover=live {reason}, or launch.recover=restart")


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
        self.before_step: tuple[int, Tensor] = (0, self.sums.clone())  # (step, the sums before it)
        self.pages = pages
        self.rows = pages[world.rank, :, : self.values]

    def add(self, sums: dict[str, Tensor], count: int | Tensor, step: int = 0) -> None:
        """As in the base class, but added up at once."""
        if step != self.before_step[0]:
            self.before_step = (step, self.sums.clone())
        self.recent_losses.append((step, sums["loss"].detach()))
        for place, value in zip(self.places.values(), self._values(sums), strict=True):
            self.sums[place] += value
        self.sums[-1] += count
        self.note(step)

    def discard(self, step: int) -> None:
        """As in the base class."""
        super().discard(step)
        number, sums = self.before_step
        if number == step:
            self.sums.copy_(sums)
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
    in TrainState. skipped: updates left out, see NanPolicy. schedule: see `_schedule`.
    """

    position: Position
    progress: Progress
    advance: Advance | None
    reported: Tensor
    grad_norm: tuple[int, Tensor] | None
    skipped: tuple[int, int]
    schedule: tuple[dict[str, Any], list[float]] | None
    buffers: dict[str, Tensor] = field(default_factory=dict)


class StepNotes:
    """Keeps the latest Note of `state`."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.copies: dict[str, Tensor] = {}
        self._copy_buffers()
        self.latest = self._take(state.unreported)

    def after_step(self, advance: Advance | None) -> None:
        """Call it after each step with how far it went, and with None when the end of an epoch is done with."""
        self._copy_buffers()
        self.latest = self._take(advance)

    def _copy_buffers(self) -> None:
        for name, buffer in self.state.strategy.model.named_buffers():  # listed anew: a model may assign other tensors
            kept = self.copies.get(name)
            if kept is not None and kept.shape == buffer.shape:
                kept.copy_(buffer)
            else:
                self.copies[name] = buffer.clone()

    def _take(self, advance: Advance | None) -> Note:
        state, progress = self.state, copy.copy(self.state.progress)
        if advance is not None:
            # By trainer.max_steps: the last step's evaluation comes yet.
            progress.evaluation_pending = progress.evaluation_pending or state.finished
        position, reported = (progress.step, int(advance is None)), state.meter.reported.clone()
        skipped = (state.nan.skipped, state.nan.skipped_in_a_row)
        return Note(position, progress, advance, reported, state.grad_norm, skipped, _schedule(state), self.copies)


def _schedule(state: TrainState) -> tuple[dict[str, Any], list[float]] | None:
    """(the scheduler's state, the learning rates) if an evaluation changes them, which then may be done again."""
    if not isinstance(state.scheduler, Plateau):
        return None
    return copy.deepcopy(state.scheduler.state_dict()), [group["lr"] for group in state.optimizer.param_groups]
