"""Saves a run's snapshots when they are due, and resumes a run from them."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from lockstep.distributed import signals
from lockstep.distributed.run_folder import go_on_words
from lockstep.distributed.slurm_job import slurm_reason
from lockstep.distributed.stop_vote import StopVote
from lockstep.distributed.world import World
from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT, ConfigError, StoppedEarly
from lockstep.failures import rank as monitor
from lockstep.snapshots.exported import export_weights, is_exported, remove_unfinished, weights_of_snapshot
from lockstep.snapshots.files import list_snapshots, remove_leftovers, step_of
from lockstep.snapshots.finding import find_snapshots, load_first_good
from lockstep.snapshots.fingerprint import check_fingerprint, log_config_changes
from lockstep.snapshots.finite import require_finite_loss, require_good_weights
from lockstep.snapshots.interval import SaveInterval
from lockstep.snapshots.loading import Found, load_on_all_ranks
from lockstep.snapshots.saver import Saver
from lockstep.snapshots.state_dict import model_state, plain_copy, restore_state, without_parameters
from lockstep.snapshots.writer import BackgroundWriter
from lockstep.training.state import TrainState

log = logging.getLogger(__name__)

MAX_PENDING = 2  # snapshots in memory that are not on the disk yet


class SnapshotManager:
    """Saves and restores `state`. Every rank calls every method. Build it before the first step.

    As a context manager it finishes the pending writes, however the run ends.

    fingerprint: flat dict of plain values, what a snapshot must have in common with the run that resumes from it.
    config: flat dict of plain values, stored in the snapshot; a resumed run logs what differs.
    epoch_samples: global samples in an epoch. every: see SaveInterval. keep_last, form: see Saver.
    before_save: an attribute, called on rank 0 before each save. It writes what must not be older than the snapshot.
    """

    def __init__(
        self,
        state: TrainState,
        world: World,
        run_dir: str | Path,
        fingerprint: dict[str, Any],
        config: dict[str, Any],
        epoch_samples: int,
        every: str,
        keep_last: int,
        form: str,
    ) -> None:
        self.state, self.world, self.run_dir = state, world, Path(run_dir)
        self.fingerprint, self.config = fingerprint, config
        self.epoch_samples = epoch_samples
        self.interval = SaveInterval(every)
        self.vote = StopVote(world, flags=2)
        self.writer = BackgroundWriter(MAX_PENDING)
        self.saver = Saver(state, self.folder, self.writer, keep_last, form)
        self.fresh_schedule = copy.deepcopy(state.scheduler.state_dict())
        self.fresh_groups = copy.deepcopy([without_parameters(group) for group in state.optimizer.param_groups])
        self.scheduler_as_built = plain_copy(self.fresh_schedule)
        self.before_save: Callable[[], None] = lambda: None
        self.resumed_from: Path | None = None
        self.start_step = 0
        self.is_due = False

    def __enter__(self) -> Self:
        if self.world.is_rank_zero:
            remove_unfinished(self.run_dir)
            remove_leftovers(self.folder)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer.pending:
            monitor.enter("disk")  # the monitor gives it more time
        self.writer.close()
        if error is None:
            self.vote.close()

    @property
    def folder(self) -> Path:
        return self.run_dir / "snapshots"

    def resume(self, where: str | Path | None) -> Path | None:
        """Restore the run's own newest snapshot, else the one that `where` names. Returns its path, None without one.

        Rank 0 decides which snapshot is good, and all ranks read that one. Raises ConfigError on all ranks as
        `find_snapshots` and `load_first_good` do, and for a snapshot with another fingerprint.
        """
        monitor.enter("resume")
        found = load_on_all_ranks(self.world, lambda: self._find(where))
        if found is None:
            return None
        saved, path = found
        self.state.scheduler.load_state_dict(copy.deepcopy(self.fresh_schedule))  # a rollback has moved on from it
        for group, fresh in zip(self.state.optimizer.param_groups, copy.deepcopy(self.fresh_groups), strict=True):
            group.update(fresh)
        with self.world.disk_access():  # parts are read from their files now
            restore_state(self.state, saved, self.epoch_samples)
        log_config_changes(saved["config"], self.config)
        self.interval.last_step = self.start_step = self.state.progress.step
        # This snapshot precedes the epoch's evaluation. A newer one must follow it, or a kill would repeat it.
        self.is_due = self.state.progress.samples == self.epoch_samples
        self.resumed_from = path
        monitor.resumed(str(path.absolute()), self.start_step)
        log.info("resumed from %s", path)
        if self.state.finished:
            message = "nothing to train: the run is at step %d already; type %s=<more> to go on"
            log.info(message, self.start_step, self.state.reached_limit)
        return path

    def after_step(self, samples: int) -> None:
        """Save if a snapshot is due. `samples`: global samples since the last call.

        Raises StoppedEarly, with a snapshot of this step, after any rank was asked to stop. After the last step of an
        epoch a due snapshot waits for `after_epoch`: a run killed between them would log the epoch's evaluation twice.
        """
        progress = self.state.progress
        stop, due_by_clock = self.vote.cast(signals.stop_requested(), self.interval.due_by_clock())
        due_by_step = self.interval.due_after_step(progress.step)
        self.is_due = self.is_due or due_by_clock or due_by_step
        if stop:
            self.stop_before_evaluation()
        if self.is_due and progress.samples < self.epoch_samples:
            self.save()

    def stop(self) -> NoReturn:
        """Save the run as it is now, and raise StoppedEarly."""
        self.save()
        raise self._stopped_early()

    def stop_before_evaluation(self) -> NoReturn:
        """Save the run as it was after its last step, so that a resumed run evaluates what is due then. Then stop."""
        progress = self.state.progress
        if progress.samples == 0:
            progress.epoch, progress.samples = progress.epoch - 1, self.epoch_samples
        progress.evaluation_pending = self.state.finished
        self.stop()

    def after_epoch(self) -> None:
        """Save if a snapshot is due, and at the end of the run."""
        if self.is_due or self.state.finished or self.interval.due_after_epoch(self.state.progress.epoch):
            self.save()

    @monitor.phase("snapshot")
    def save(self, name: str | None = None) -> None:
        """Save the run as it is now under `name`, or under its step's number. A thread does the writing.

        Raises TrainingDiverged, on all ranks and before anything is written, if the loss or a weight is not finite.
        """
        state = self.state
        totals = state.meter.totals()
        require_finite_loss(state, totals)
        state.average_replicas()
        require_good_weights(state, self.newest)
        contents = self.saver.collect(totals, self.scheduler_as_built)
        if name is None:
            self.is_due = False
        if self.world.is_rank_zero:
            self.before_save()
        with self.world.disk_access():  # earlier snapshots may not be written yet
            if contents is not None:
                position = contents["progress"] | {"world_size": self.world.size}
                contents |= {"fingerprint": self.fingerprint, "config": self.config}
                self.saver.put(name or self._numbered(), contents, position)

    def newest(self) -> Path | None:
        """The newest numbered snapshot, else the one that this run resumed from. Not a collective.

        Rank 0 waits for its pending writes. Other ranks see what is on the disk.
        """
        self.writer.drain()
        now = self.state.progress.step  # a later snapshot was passed over as damaged
        own = [path for path in list_snapshots(self.folder) if step_of(path) <= now]
        return own[0] if own else self.resumed_from

    def export(self) -> None:
        """Write the model, with the averaged weights if there are any, as a plain state dict to model.pt.

        If the best evaluation came before the last step, its weights go to model_best.pt. A run that has trained no
        step keeps the files of an earlier start. Raises ConfigError on all ranks if one cannot be written.
        """
        state = self.state
        with self.world.disk_access():
            self.saver.finish()  # so that model.pt is the newest file
        is_new = state.progress.step > self.start_step
        if not is_new and self.world.broadcast_json(is_exported(self.run_dir, self.resumed_from)):
            return
        with state.ema_weights():
            weights = model_state(state.strategy)
            with self.world.disk_access():
                message = self._export(weights) if self.world.is_rank_zero else None
        message = self.world.broadcast_json(message)
        if message is not None:
            raise ConfigError(message)

    def _export(self, weights: dict[str, Any]) -> str | None:
        """None, or why it could not be written."""
        progress, best = self.state.progress, None
        if progress.best_step not in (None, progress.step):
            averaged = self.state.ema is not None
            best = weights_of_snapshot(self.folder / "best.pt", averaged, progress.best_step)
        return export_weights(self.run_dir, weights, best)

    def _find(self, where: str | Path | None) -> Found | None:
        """(contents, path) of the snapshot to resume from."""
        self.writer.drain()  # at a rollback the newest one may not be written yet
        paths = find_snapshots(where, self.run_dir)
        found = load_first_good(paths)
        if found is not None:
            saved, path = found
            self.saver.damaged |= set(paths[: paths.index(path)])
            check_fingerprint(path, saved["fingerprint"], self.fingerprint)
        return found

    def _stopped_early(self) -> StoppedEarly:
        """Wait until the last snapshot is on the disk. The launcher ends all ranks when the first one exits."""
        with self.world.disk_access():
            newest = str(self.newest() or "") if self.world.is_rank_zero else ""
        newest = self.world.broadcast_json(newest)
        reason = slurm_reason() if self.world.is_rank_zero else ""  # while the other ranks wait, as it takes its time
        self.world.barrier()
        signals.stop_listening()
        stopped = f"stopped early at step {self.state.progress.step}{reason}"
        if newest == str(self.folder / f"{self._numbered()}.pt"):
            return StoppedEarly(f"{stopped}; go on there with {go_on_words(self.run_dir)}")
        where = f"go on from {newest}" if newest else "start again"
        return StoppedEarly(
            f"{stopped}, whose snapshot could not be written; {where} with {go_on_words(self.run_dir)}",
            EXIT_STOPPED_WITHOUT_SNAPSHOT,
        )

    def _numbered(self) -> str:
        return f"step_{self.state.progress.step:08d}"
