"""What a rank does with launch.recover=live: train, and when another rank died, go back one step and go on together.

After a death every survivor leaves its training, with a copy of its state as it was after its last step, and runs the
same function again: it joins the new generation of ranks, builds everything that is bound to ranks, and restores the
state of the rank that was furthest, as it would restore a snapshot. The process, its imports and its data stay.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from lockstep import build, build_data
from lockstep.distributed import regroup, signals
from lockstep.distributed.backend import backend_environment, usual_interface
from lockstep.distributed.generations import note_recovery
from lockstep.distributed.lazy_dynamo import postpone_dynamo
from lockstep.distributed.loss_pages import PAGES
from lockstep.distributed.regroup import Member, is_lost_rank
from lockstep.distributed.world import World
from lockstep.errors import RankLost
from lockstep.loggers.base import LoggerList
from lockstep.loggers.recorded import LogRecord
from lockstep.monitor import rank as monitor
from lockstep.monitor.code_hashes import module_hashes
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.manager import SnapshotManager
from lockstep.snapshots.state import collect_state, plain_copy, restore_state
from lockstep.strategies.base import Advance
from lockstep.training.recovery import PagedMeter, StepNotes, open_pages
from lockstep.training.setup import set_determinism
from lockstep.training.state import TrainState

log = logging.getLogger(__name__)


class LiveRun:
    """What stays in this process when the ranks regroup: its data, and between two worlds its state."""

    def __init__(self, member: Member, cfg: DictConfig) -> None:
        self.member = member
        self.record = LogRecord()
        postpone_dynamo()
        set_determinism(cfg.seed, cfg.trainer.deterministic)  # before this process is needed: it may import a compiler
        self.datasets = build_data.datasets(cfg)
        for dataset in self.datasets:
            data_fingerprint(dataset)  # like the line below: the ranks compare it later
        build.import_targets(cfg)
        module_hashes()  # reads the files, which the ranks compare later, while nobody waits for this process
        self.package: dict[str, Any] | None = None  # the state after the last step, while this rank is in no world
        self.notes: StepNotes | None = None
        self.is_recovering = False  # until the first step of this world has ended

    def resume(self, where: str | None, state: TrainState, snapshots: SnapshotManager, loggers: LoggerList) -> None:
        """Bring `state` to where the ranks go on: the furthest survivor's state, else a snapshot. A collective.

        where: as for SnapshotManager.resume.
        """
        world = state.strategy.world
        meter = PagedMeter(state.task, world, open_pages(os.environ[PAGES]))
        state.meter = state.nan.meter = meter
        if not self._take_over(world, state, meter, snapshots):
            snapshots.resume(where)
            self.record.restore({"calls": [], "written": state.progress.step})
        meter.note(state.progress.step)
        world.barrier()  # whoever dies from here on has noted its sums
        self.is_recovering = self.goes_on
        self.notes, self.snapshots, self.loggers = StepNotes(state), snapshots, loggers
        state.note = self._note

    @property
    def full_size(self) -> int:
        """As many ranks as the user asked for."""
        return self.member.generation.full_size

    @property
    def goes_on(self) -> bool:
        """Whether these ranks follow others, which have trained. There is something to save, then."""
        return self.member.generation.number > 0

    @contextmanager
    def survival(self) -> Iterator[None]:
        """If another rank dies in the block: keep this rank's state in `package`, and raise RankLost."""
        try:
            yield
        except RankLost:  # from such a block inside this one
            raise
        except SystemExit as error:
            monitor.end_copy(error)
            raise
        except Exception as error:
            if not is_lost_rank(error):
                monitor.failed(error)
                raise
            self.member.leave()  # first, so that the others notice it, too
            self.pack()
            raise RankLost(str(error).splitlines()[0]) from None

    def pack(self) -> None:
        """Copy the state as it was after the last step."""
        if self.notes is None:
            return
        state, note = self.notes.state, self.notes.latest
        assert isinstance(state.meter, PagedMeter)
        totals, spread = torch.zeros_like(state.meter.sums), state.strategy.full_state
        saved = collect_state(state, totals, self.snapshots.scheduler_as_built, spread)
        saved["model"] = saved["model"] | {name: note.buffers[name] for name in note.buffers if name in saved["model"]}
        saved["progress"] = asdict(note.progress)
        if note.schedule is not None:
            saved["scheduler"]["state"], rates = note.schedule
            for group, rate in zip(saved["optimizer"]["param_groups"], rates, strict=True):
                group["lr"] = rate
        package = {
            "position": list(note.position),
            "advance": None if note.advance is None else [note.advance.samples, note.advance.steps],
            "saved": saved,
            "sums": state.meter.noted_by_all(note.progress.step),
            "reported": note.reported,
            "grad_norm": note.grad_norm,
            "skipped": list(note.skipped),
            "rank": state.strategy.world.rank,
            "log": self.record.content(),
            "start_step": self.snapshots.start_step,
            "resumed_from": str(self.snapshots.resumed_from or ""),
            "is_due": self.snapshots.is_due,
            "saved_at": self.snapshots.interval.last_time,
        }
        self.package, self.notes = plain_copy(package), None

    def _note(self, advance: Advance | None) -> None:
        """Called after each step, and with None after each epoch."""
        assert self.notes is not None
        step = self.notes.state.progress.step
        if self.is_recovering and advance is not None:
            self.is_recovering = False
            self._log_recovery(step)
        self.notes.after_step(advance)
        self.record.note(step)
        self.package = None
        if self.member.is_outdated:
            raise ConnectionError("the run goes on with other ranks")

    def _log_recovery(self, step: int) -> None:
        """The first step of a world that follows another one has ended."""
        generation = self.member.generation
        size, seconds = len(generation.processes), time.monotonic() - generation.changed_at
        now = "are complete again" if size == self.full_size else f"go on as {size} of {self.full_size}"
        log.info("the ranks %s: step %d ended %.3f s after %s", now, step, seconds, generation.cause)
        note_recovery(self.member.store, generation)
        self.loggers.log_metrics({"recovery/seconds": seconds, "recovery/ranks": float(size)}, step)

    def _take_over(self, world: World, state: TrainState, meter: PagedMeter, snapshots: SnapshotManager) -> bool:
        """Restore the state of the survivor that is furthest. Returns False if no rank has a state."""
        mine = None if self.package is None else [self.package[key] for key in ("position", "is_due", "rank")]
        offers = world.all_gather_json(mine)
        found = [offer for offer in offers if offer is not None]
        if not found:
            return False
        furthest = max(position for position, _, _ in found)
        positions = [None if offer is None else offer[0] for offer in offers]
        owner = positions.index(furthest)
        if positions.count(furthest) < world.size:
            is_complete = positions[world.rank] == furthest
            package = world.broadcast_state(self.package if is_complete and self.package else {}, owner)
            if not is_complete:
                self.package = package
        assert self.package is not None
        self._restore(self.package, state, meter, snapshots)
        is_due = next(is_due for position, is_due, _ in found if position == furthest)
        # Rank 0 writes the snapshots. If it has died, the newest one may not be on the disk.
        snapshots.is_due = self.package["is_due"] = is_due or all(rank != 0 for _, _, rank in found)
        log.info("rank %d's state after step %d is restored on all ranks", owner, state.progress.step)
        return True

    def _restore(
        self, package: dict[str, Any], state: TrainState, meter: PagedMeter, snapshots: SnapshotManager
    ) -> None:
        restore_state(state, package["saved"])
        step, advance = state.progress.step, package["advance"]
        state.unreported = None if advance is None else Advance(*advance)
        state.grad_norm = package["grad_norm"]
        state.nan.skipped, state.nan.skipped_in_a_row = package["skipped"]
        meter.go_back(package["sums"], package["reported"])
        snapshots.start_step = package["start_step"]
        snapshots.resumed_from = Path(package["resumed_from"]) if package["resumed_from"] else None
        snapshots.interval.last_step = step if state.unreported is None else step - state.unreported.steps
        snapshots.interval.last_time = package["saved_at"]  # by the clock of the machine, which all these ranks share
        self.record.restore(package["log"])


def keep_training(train: Callable[..., float], cfg: DictConfig, *args: Any) -> float:
    """Run `train(cfg, *args, LiveRun)` until all ranks have finished it together. Returns its value."""
    member = regroup.member()
    assert member is not None
    live = _prepare(member, cfg)
    while True:
        member.take_rank()
        try:
            value = train(cfg, *args, live)
            if member.finish(value):
                return value
            live.pack()
            continue
        except Exception as error:
            if not isinstance(error, RankLost) and not is_lost_rank(error):
                raise
            lost = error.with_traceback(None)  # which keeps the model and all that was built around it
            lost.__context__ = None
        if not member.await_news():
            raise signals.unanswered_stop() if member.is_over else lost


def _prepare(member: Member, cfg: DictConfig) -> LiveRun:
    """This process's data, and the rank that it waits for: a rank of the first world has one already."""
    if member.is_first:
        member.wait_until_needed()  # before the data is loaded: the monitor hears of errors
        signals.listen(cfg.run_dir)
        return LiveRun(member, cfg)
    try:
        live = LiveRun(member, cfg)
        with backend_environment(cfg.backend.socket_ifname or usual_interface(is_one_machine=True)):
            member.open_group(timedelta(seconds=cfg.backend.timeout))
    except Exception as error:
        member.report(f"{type(error).__name__}: {error}")
        raise
    member.report(None)
    member.wait_until_needed()
    return live
