"""Saves a run's snapshots when they are due, resumes a run from them, and leaves the model's weights at its end."""

import logging
import math
import re
import shutil
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch.distributed as dist

from lockstep.distributed import signals
from lockstep.distributed.run_folder import go_on_words
from lockstep.distributed.world import World
from lockstep.errors import (
    EXIT_RESUMABLE,
    EXIT_STOPPED_WITHOUT_SNAPSHOT,
    ConfigError,
    StoppedEarly,
    TrainingDiverged,
    path_word,
)
from lockstep.failures.record import heartbeat
from lockstep.files import is_url
from lockstep.snapshots import files, find
from lockstep.snapshots.files import list_snapshots, load_state, step_of
from lockstep.snapshots.state import as_saved, collect, map_tensors, restore, restore_weights, trained_weights
from lockstep.text import first_line
from lockstep.training.nonfinite import SMALLER_STEPS, are_finite, diverged
from lockstep.training.replicas import require_same_weights
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.snapshots.mirror import Mirror
    from lockstep.snapshots.sharded import Shard

log = logging.getLogger(__name__)

MAX_PENDING = 2  # whole snapshots in memory that are not on the disk yet
LAST, BEST = "model.pt", "model_best.pt"  # the weights that a run leaves at its end; BEST if the best are others


def interval(every: str) -> tuple[int, str]:
    """(count, unit) of `snapshot.every`: "1epochs", "50steps" or "10min"; a unit alone means 1.

    unit: "epoch", "step" or "min". Raises ConfigError for other words.
    """
    match = re.fullmatch(r"(?!0+\D)(\d+)?\s*(epoch|step|min)s?", every)
    if match is None:
        accepted = "epochs, steps or minutes, such as 50steps"
        raise ConfigError(f"snapshot.every={every} should be {accepted}; type snapshot.every=1epochs")
    return int(match[1] or 1), match[2]


class Checkpointer:
    """Saves and restores `run`. Every rank calls every method but `newest` and `due_by_clock`.

    Build it before the first step. As a context manager it finishes the pending write, however the run ends.
    """

    def __init__(
        self, run: Run, identity: dict[str, Any], config: dict[str, Any], mirror: "Mirror | None" = None
    ) -> None:
        """
        identity: flat dict of plain values, what a snapshot must have in common with the run that resumes from it.
        config: flat dict of plain values, stored in the snapshot; a resumed run logs what differs.
        mirror: on rank 0, gets what is written.
        """
        if any(hasattr(weight, "to_local") for weight in run.model.parameters()):
            files.require_safetensors("a strategy by which each rank holds a part of the weights")
        self.run, self.world, self.run_dir = run, run.world, Path(run.config.run_dir)
        self.folder, self.identity, self.config = self.run_dir / "snapshots", identity, config
        self.count, self.unit = interval(run.config.snapshot.every)
        self.keep_last = run.config.snapshot.keep_last
        self.mirror = mirror
        self.thread, self.pending = ThreadPoolExecutor(1, "snapshots"), deque[Future[None]]()
        self.threads_world: World | None = None  # of the writing threads, while the others use their own groups
        self.resumed_from: Path | None = None
        self.start_step, self.saved_at, self.is_due = 0, time.monotonic(), False

    def __enter__(self) -> Self:
        if self.world.is_rank_zero:
            files.remove_leftovers(self.folder)
        if self.mirror is not None:
            self.mirror.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pending or self.mirror is not None:
            heartbeat.enter("disk")  # which may take longer
        self.thread.shutdown()
        if self.mirror is not None:
            self.mirror.close()

    # To begin.

    def resume(self, where: str | Path | None) -> Path | None:
        """Restore the run's own newest snapshot, else the one that `where` names. Returns its path, None without one.

        Rank 0 decides which snapshot is good, and all ranks read that one. Raises ConfigError on all ranks as
        `find_snapshots` and `load_first_good` do, and for a snapshot of another run.
        """

        def newest_good() -> Path | None:
            if is_url(where) and not list_snapshots(self.folder):
                from lockstep.snapshots.mirror import fetch

                fetch(str(where), self.folder)
            paths = find.find_snapshots(where, self.run_dir)
            if not paths:
                return None
            saved, path = find.load_first_good(paths)
            advice = "type the overrides that it was made with, or to start afresh hydra.run.dir=<a new folder>"
            find.require_same(path, saved["identity"], self.identity, advice)
            for damaged in paths[: paths.index(path)] if path.parent == self.folder else ():
                aside = damaged.with_name(f"{damaged.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                damaged.rename(aside)
            for best in list_snapshots(self.folder, "best"):  # of steps that are trained again, perhaps otherwise
                if step_of(best) > saved["progress"]["step"]:
                    files.remove(best)
            return path

        heartbeat.enter("resume")
        found = find.bring_back(self.run, newest_good, restore)
        if found is None:
            return None
        saved, path = found
        find.log_config_changes(saved["config"], self.config)
        self.start_step = self.run.progress.step
        # This snapshot precedes the epoch's evaluation. A newer one must follow it, or a kill would repeat it.
        self.is_due = self.run.progress.samples == self.run.epoch_samples
        self.resumed_from = path
        heartbeat.note(resumed=[str(path.absolute()), self.start_step])
        log.info("resumed from %s", path)
        if self.run.finished:
            message = "nothing to train: the run is at step %d already; type %s=<more> to go on"
            log.info(message, self.start_step, self.run.reached_limit)
        return path

    # When to save, and when to stop.

    @property
    def every_steps(self) -> int:
        """Between two snapshots; 0 if these are not counted in steps."""
        return self.count if self.unit == "step" else 0

    def due_by_clock(self) -> bool:
        """On rank 0, whose clock alone counts: whether it asks all ranks to save."""
        return self.unit == "min" and time.monotonic() - self.saved_at >= 60 * self.count

    def ask(self) -> None:
        """Save when it is possible next. Every rank calls this, as rank 0's clock said."""
        self.is_due = True

    def due_after_step(self) -> bool:
        """Whether to save now, in mid-epoch. At an epoch's end `after_epoch` saves, when it is evaluated."""
        self.is_due |= self.unit == "step" and self.run.progress.step % self.count == 0
        return self.is_due and self.run.progress.samples < self.run.epoch_samples

    def after_epoch(self) -> None:
        """Save if a snapshot is due, and at the end of the run."""
        if self.is_due or self.run.finished or (self.unit == "epoch" and self.run.progress.epoch % self.count == 0):
            self.save()

    def stop_before_evaluation(self) -> NoReturn:
        """Save the run as it was after its last step, so that a resumed run evaluates what is due then. Then stop."""
        self.run.await_evaluation()
        self.stop()

    def stop(self) -> NoReturn:
        """Save the run as it is now, and raise StoppedEarly when the snapshot is on the disk."""
        self.save()
        newest = find.on_rank_zero(self.world, lambda: str(self.newest() or ""))
        if newest == str(self.folder / self._name("step")):
            self._leave("; go on there", EXIT_RESUMABLE)
        where = f"go on from {newest}" if newest else "start again"
        self._leave(f", whose snapshot could not be written; {where}", EXIT_STOPPED_WITHOUT_SNAPSHOT)

    def stop_before_test(self) -> NoReturn:
        """Raise StoppedEarly: all that was trained is saved, and the same command goes on with the test."""
        self._leave(", before the test; go on there", EXIT_RESUMABLE)

    def _leave(self, what: str, code: int) -> NoReturn:
        """The launcher ends all ranks when the first one exits."""
        self.world.barrier()
        signals.stop_listening()
        step, words = self.run.progress.step, go_on_words(self.run_dir)
        raise StoppedEarly(f"stopped early at step {step}{what} with {words}", code)

    # Saving.

    @heartbeat.during("snapshot")
    def save(self, kind: str = "step") -> None:
        """Save the run as it is now. A thread does the writing. kind: step or best.

        Raises TrainingDiverged, on all ranks and before anything is written, if the loss or a weight is not finite, and
        RanksDiffer if ranks hold different weights that should be the same.
        """
        run = self.run
        totals = run.world.all_reduce_sum(run.meter.flush().clone())
        loss = float(totals[0])  # the sum over the epoch
        if not math.isfinite(loss):
            raise diverged(run, f"the loss is {loss}", run.meter.first_non_finite())
        # An update can break the weights one step before a loss shows it.
        weights = [
            value.detach() for value in run.model.parameters() if value.dtype.is_floating_point or value.is_complex()
        ]
        weights = [value.float() if value.dtype.itemsize == 1 else value for value in weights]  # no norm of float8
        if any(self.world.any_of([not are_finite(weights)])):
            raise TrainingDiverged(f"the weights are not finite at step {run.progress.step}", SMALLER_STEPS)
        require_same_weights(run)
        with find.disk_access(self.world):  # of shards a rank has memory for one copy
            self._await(MAX_PENDING - 1 if self.threads_world is None else 0)
        state, shards = collect(run, totals)
        others_write = any(self.world.any_of([bool(shards), not self.world.is_rank_zero and state is not None]))
        if others_write and self.threads_world is None:
            own_group: Any = dist.new_group(backend="gloo", timeout=find.DISK_TIMEOUT)
            self.threads_world = replace(self.world, control=own_group)
        if kind == "step":
            self.is_due, self.saved_at = False, time.monotonic()
        if self.world.is_rank_zero and state is not None:
            state |= {"identity": self.identity, "config": self.config, "world_size": self.world.size}
        if self.world.is_rank_zero or self.threads_world is not None:
            self.pending.append(self.thread.submit(self._write, self._name(kind), state, shards))

    def _name(self, kind: str) -> str:
        return f"{kind}_{self.run.progress.step:08d}"

    def _await(self, left: int = 0) -> None:
        """Wait until all but `left` snapshots are written. Raises what writing raised."""
        while len(self.pending) > left:
            self.pending.popleft().result()

    def _write(self, name: str, state: dict[str, Any] | None, shards: dict[str, "Shard"]) -> None:
        """In the thread. Each rank writes what it alone has, and rank 0 ends the snapshot when all is on the disk. A
        full disk costs a warning, not the training."""
        unfinished, rank, written, problem = self.folder / f"{name}.tmp", self.world.rank, files.Files(), ""
        try:
            names = []
            if shards:
                from lockstep.snapshots.sharded import save_shards

                names = save_shards(shards, unfinished, rank)
            if state is not None:
                names.append(f"state_{rank:05d}.pt" if rank else files.STATE)
                files.write_tensors(unfinished / names[-1], state)
            written = files.of_files(unfinished, names)
        except OSError as error:
            problem = str(error)
        if self.threads_world is not None:
            try:
                reports = self.threads_world.all_gather_json([written, problem])
            except RuntimeError as error:  # which ends the training, too
                log.warning("no snapshot %s: a rank was lost (%s)", name, first_line(error))
                return
            written = {name: tuple(found) for of_rank, _ in reports for name, found in of_rank.items()}
            problem = "; ".join(filter(None, (said for _, said in reports)))
        if rank:
            return
        try:
            if not problem:
                path = files.finish_snapshot(self.folder, name, written)
        except OSError as error:
            problem = str(error)
        if problem:
            shutil.rmtree(unfinished, ignore_errors=True)  # on a disk that may be full
            log.warning("no snapshot %s: %s; training goes on", name, problem)
            return
        if self.mirror is not None:
            self.mirror.put(path)
        try:
            files.prune(self.folder, self.keep_last)
        except OSError as error:
            reason = str(error)
            log.warning("%s is saved, but not all older ones are removed: %s; training goes on", path, reason)

    def newest(self) -> Path | None:
        """The newest snapshot, else the one that this run resumed from. Not a collective.

        Rank 0 waits for its pending write. Other ranks see what is on the disk.
        """
        self._await()
        return next(iter(list_snapshots(self.folder)), self.resumed_from)

    # The end.

    def export(self) -> None:
        """Write the model, with the averaged weights if there are any, as a plain state dict to model.pt, and if the
        best evaluation came before the last step, its weights to model_best.pt. They are those of the snapshots.

        Raises ConfigError on all ranks if one cannot be written.
        """
        find.on_rank_zero(self.world, self._export)

    def _export(self) -> None:
        """A run that has trained no step keeps the files of an earlier start; one that has model.pt is complete."""
        progress, newest, last = self.run.progress, self.newest(), self.run_dir / LAST
        again = f"and type the command again with {path_word('hydra.run.dir', self.run_dir)}"
        if newest is None or step_of(newest) != progress.step:
            raise ConfigError(f"no {LAST}: the last snapshot could not be written; free some space {again}")
        is_new = last.exists() and last.stat().st_mtime >= newest.stat().st_mtime
        if is_new and progress.step == self.start_step:
            return
        best = self._best() if progress.best_step not in (None, progress.step) else None
        try:
            if best is None:
                (self.run_dir / BEST).unlink(missing_ok=True)
            for name, path in ((BEST, best), (LAST, newest)):
                if path is not None:
                    weights = trained_weights(load_state(path), path, averaged=self.run.average is not None)
                    files.write_tensors(self.run_dir / name, map_tensors(lambda _, tensor: as_saved(tensor), weights))
        except OSError as error:
            raise ConfigError(f"no {LAST}: {error}; free some space {again}") from None

    def _best(self) -> Path | None:
        """The snapshot of the best evaluation. None, with a warning, if it is not there, or damaged.

        A run that was resumed from another folder has it there, if none was better since.
        """
        step = self.run.progress.best_step
        folders = [self.folder] + ([] if self.resumed_from is None else [self.resumed_from.parent])
        found = find.first_good([path for path in (folder / f"best_{step:08d}" for folder in folders) if path.exists()])
        if found is None:
            log.warning(
                "the weights of the best evaluation, after step %s, are gone: the last ones stand for them", step
            )
        return found[1] if found else None

    def take_best(self) -> int:
        """Give the model the weights of the best evaluation, for the test. Returns their step: the last one's where
        they are gone. A collective. The state is no longer that of the run: nothing may be saved after it.
        """
        progress = self.run.progress
        if (
            progress.best_step in (None, progress.step)
            or find.bring_back(self.run, self._best, restore_weights) is None
        ):
            return progress.step
        return int(progress.best_step or 0)
