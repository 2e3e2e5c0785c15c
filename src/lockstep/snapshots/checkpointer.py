"""Saves a run's snapshots when they are due, resumes a run from them, and leaves the model's weights at its end."""

import logging
import math
import re
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed import signals
from lockstep.distributed.environment import slurm_reason
from lockstep.distributed.run_folder import go_on_words
from lockstep.distributed.world import World
from lockstep.errors import (
    EXIT_STOPPED_WITHOUT_SNAPSHOT,
    ConfigError,
    RanksDiffer,
    StoppedEarly,
    TrainingDiverged,
    path_word,
)
from lockstep.failures import reporter
from lockstep.files import explain_disk_error, is_url, write_whole
from lockstep.snapshots.files import (
    STATE,
    Files,
    list_snapshots,
    load_tensors,
    of_files,
    prune,
    remove,
    remove_leftovers,
    require_safetensors,
    step_of,
    verify,
    write_snapshot,
)
from lockstep.snapshots.find import (
    DISK_TIMEOUT,
    Found,
    disk_access,
    find_snapshots,
    load_first_good,
    load_on_all_ranks,
    log_config_changes,
    require_same_run,
)
from lockstep.snapshots.state import (
    as_saved,
    collect,
    map_tensors,
    require_plain,
    restore,
    restore_weights,
    trained_weights,
    whole_model,
)
from lockstep.strategies.base import local_part
from lockstep.text import first_line
from lockstep.training.nonfinite import SMALLER_STEPS, diverged
from lockstep.training.replicas import require_same_weights
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.snapshots.mirror import Mirror
    from lockstep.snapshots.sharded import Shard

log = logging.getLogger(__name__)

MAX_PENDING = 2  # whole snapshots in memory that are not on the disk yet
LAST, BEST = "model.pt", "model_best.pt"  # the weights that a run leaves at its end; BEST if the best are others


class Interval:
    """Of `snapshot.every`: "1epochs", "50steps" or "10min"; a unit alone means 1.

    unit: "epoch", "step" or "min". Raises ConfigError for other words.
    """

    def __init__(self, every: str) -> None:
        match = re.fullmatch(r"(?!0+\D)(\d+)?\s*(epoch|step|min)s?", every)
        if match is None:
            accepted = "epochs, steps or minutes, such as 50steps"
            raise ConfigError(f"snapshot.every={every} should be {accepted}; type snapshot.every=1epochs")
        self.count, self.unit = int(match[1] or 1), match[2]

    def ends(self, unit: str, number: float) -> bool:
        """Whether `number` epochs or steps done, or minutes since the last snapshot, end an interval of this unit."""
        whole = number >= self.count if unit == "min" else number % self.count == 0
        return unit == self.unit and whole


class Checkpointer:
    """Saves and restores `run`. Every rank calls every method but `newest` and `due_by_clock`.

    Build it before the first step. As a context manager it finishes the pending write, however the run ends.
    """

    def __init__(
        self,
        run: Run,
        identity: dict[str, Any],
        config: dict[str, Any],
        mirror: "Mirror | None" = None,
    ) -> None:
        """
        identity: flat dict of plain values, what a snapshot must have in common with the run that resumes from it.
        config: flat dict of plain values, stored in the snapshot; a resumed run logs what differs.
        mirror: on rank 0, gets what is written.
        """
        held = run.model.state_dict()
        require_plain(held)
        if run.strategy.shards({name: value for name, value in held.items() if isinstance(value, Tensor)}):
            require_safetensors("a strategy by which each rank holds a part of the weights")
        self.run, self.world, self.run_dir = run, run.world, Path(run.config.run_dir)
        self.folder, self.identity, self.config = self.run_dir / "snapshots", identity, config
        self.interval, self.keep_last = Interval(run.config.snapshot.every), run.config.snapshot.keep_last
        self.mirror = mirror
        self.thread, self.pending = ThreadPoolExecutor(1, "snapshots"), deque[Future[None]]()
        self.memory = dict[str, Tensor]()  # of this rank's shards
        self.threads_world: World | None = None  # of the writing threads, while the others use their own groups
        self.resumed_from: Path | None = None
        self.start_step, self.saved_at, self.is_due = 0, time.monotonic(), False

    def __enter__(self) -> Self:
        if self.world.is_rank_zero:  # what a killed process left
            for name in (LAST, BEST):
                (self.run_dir / f"{name}.tmp").unlink(missing_ok=True)
            remove_leftovers(self.folder)
        if self.mirror is not None:
            self.mirror.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pending or self.mirror is not None:
            reporter.enter("disk")  # the monitor gives it more time
        self.thread.shutdown()
        if self.mirror is not None:
            self.mirror.close()

    # To begin.

    def resume(self, where: str | Path | None) -> Path | None:
        """Restore the run's own newest snapshot, else the one that `where` names. Returns its path, None without one.

        Rank 0 decides which snapshot is good, and all ranks read that one. Raises ConfigError on all ranks as
        `find_snapshots` and `load_first_good` do, and for a snapshot of another run.
        """

        def find() -> Found | None:
            if is_url(where) and not list_snapshots(self.folder):
                from lockstep.snapshots.mirror import fetch

                fetch(str(where), self.folder)
            paths = find_snapshots(where, self.run_dir)
            if not paths:
                return None
            saved, path = load_first_good(paths)
            require_same_run(path, saved["identity"], self.identity)
            for damaged in paths[: paths.index(path)] if path.parent == self.folder else ():
                aside = damaged.with_name(f"{damaged.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                damaged.rename(aside)
            for best in list_snapshots(self.folder, "best"):  # of steps that are trained again, perhaps otherwise
                if step_of(best) > saved["progress"]["step"]:
                    remove(best)
            return saved, path

        reporter.enter("resume")
        found = load_on_all_ranks(self.world, find)
        if found is None:
            return None
        saved, path = found
        with disk_access(self.world):  # shards are read from their files now
            restore(self.run, saved, path)
        log_config_changes(saved["config"], self.config)
        self.start_step = self.run.progress.step
        # This snapshot precedes the epoch's evaluation. A newer one must follow it, or a kill would repeat it.
        self.is_due = self.run.progress.samples == self.run.epoch_samples
        self.resumed_from = path
        reporter.resumed(str(path.absolute()), self.start_step)
        log.info("resumed from %s", path)
        if self.run.finished:
            message = "nothing to train: the run is at step %d already; type %s=<more> to go on"
            log.info(message, self.start_step, self.run.reached_limit)
        return path

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """What all ranks raise in the block, because weights or gradients are bad, names the last good snapshot.

        Then a collective: rank 0 waits for the snapshot that it writes, and the others may not see it yet.
        """
        try:
            yield
        except (TrainingDiverged, RanksDiffer) as error:
            newest = self.world.broadcast_json(str(self.newest() or ""))
            if newest:
                error.name_snapshot(Path(newest))
            raise

    # When to save, and when to stop.

    @property
    def every_steps(self) -> int:
        """Between two snapshots; 0 if these are not counted in steps."""
        return self.interval.count if self.interval.unit == "step" else 0

    def due_by_clock(self) -> bool:
        """On rank 0, whose clock alone counts: whether it asks all ranks to save."""
        return self.interval.ends("min", (time.monotonic() - self.saved_at) / 60)

    def ask(self) -> None:
        """Save when it is possible next. Every rank calls this, as rank 0's clock said."""
        self.is_due = True

    def due_after_step(self) -> bool:
        """Whether to save now, in mid-epoch. At an epoch's end `after_epoch` saves, when it is evaluated."""
        self.is_due |= self.interval.ends("step", self.run.progress.step)
        return self.is_due and self.run.progress.samples < self.run.epoch_samples

    def after_epoch(self) -> None:
        """Save if a snapshot is due, and at the end of the run."""
        if self.is_due or self.run.finished or self.interval.ends("epoch", self.run.progress.epoch):
            self.save()

    def stop_before_evaluation(self) -> NoReturn:
        """Save the run as it was after its last step, so that a resumed run evaluates what is due then. Then stop."""
        self.run.await_evaluation()
        self.stop()

    def stop(self) -> NoReturn:
        """Save the run as it is now, and raise StoppedEarly when the snapshot is on the disk.

        The launcher ends all ranks when the first one exits.
        """
        self.save()
        with disk_access(self.world):
            newest = str(self.newest() or "") if self.world.is_rank_zero else ""
        newest = self.world.broadcast_json(newest)
        reason = slurm_reason() if self.world.is_rank_zero else ""  # while the other ranks wait, as it takes its time
        self.world.barrier()
        signals.stop_listening()
        stopped = f"stopped early at step {self.run.progress.step}{reason}"
        if newest == str(self.folder / self._name("step")):
            raise StoppedEarly(f"{stopped}; go on there with {go_on_words(self.run_dir)}")
        where = f"go on from {newest}" if newest else "start again"
        raise StoppedEarly(
            f"{stopped}, whose snapshot could not be written; {where} with {go_on_words(self.run_dir)}",
            EXIT_STOPPED_WITHOUT_SNAPSHOT,
        )

    def stop_before_test(self) -> NoReturn:
        """Raise StoppedEarly: all that was trained is saved, and the same command goes on with the test."""
        self.world.barrier()
        signals.stop_listening()
        raise StoppedEarly(
            f"stopped early at step {self.run.progress.step}, before the test; go on there with "
            f"{go_on_words(self.run_dir)}"
        )

    # Saving.

    @reporter.phase("snapshot")
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
        broken = not all(is_finite(local_part(value.detach())) for value in run.model.parameters())
        if any(self.world.any_of([broken])):
            raise TrainingDiverged(f"the weights are not finite at step {run.progress.step}", SMALLER_STEPS)
        require_same_weights(run)
        with disk_access(self.world):  # of shards a rank has memory for one copy
            self._await(MAX_PENDING - 1 if self.threads_world is None else 0)
        state, shards = collect(run, totals, self.memory)
        if shards is not None and self.threads_world is None:
            own_group: Any = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
            self.threads_world = replace(self.world, control=own_group)
        if kind == "step":
            self.is_due, self.saved_at = False, time.monotonic()
        if state is not None:
            state |= {"identity": self.identity, "config": self.config, "world_size": self.world.size}
        if state is not None or shards is not None:
            self.pending.append(self.thread.submit(self._write, self._name(kind), state, shards))

    def _name(self, kind: str) -> str:
        return f"{kind}_{self.run.progress.step:08d}"

    def _await(self, left: int = 0) -> None:
        """Wait until all but `left` snapshots are written. Raises what writing raised."""
        while len(self.pending) > left:
            self.pending.popleft().result()

    def _write(self, name: str, state: dict[str, Any] | None, shards: "dict[str, Shard] | None") -> None:
        """In the thread. Of shards each rank writes its own, and rank 0 all else when these are on the disk. A full
        disk costs a warning, not the training."""
        unfinished, files, problem = self.folder / f"{name}.tmp", Files(), ""
        if shards is not None:
            from lockstep.snapshots.sharded import save_shards

            try:
                files = of_files(unfinished, save_shards(shards, unfinished, self.world.rank))
            except OSError as error:
                problem = f"rank {self.world.rank}: {explain_disk_error(error, self.folder)}"
            assert self.threads_world is not None
            try:
                reports = self.threads_world.all_gather_json([files, problem])
            except RuntimeError as error:  # which ends the training, too
                log.warning("no snapshot %s: a rank was lost (%s)", name, first_line(error))
                return
            files = {name: tuple(found) for of_rank, _ in reports for name, found in of_rank.items()}
            problem = "; ".join(filter(None, (said for _, said in reports)))
        if state is None:
            return
        try:
            if not problem:
                path = write_snapshot(self.folder, name, state, files)
        except OSError as error:
            problem = explain_disk_error(error, self.folder)
        if problem:
            shutil.rmtree(unfinished, ignore_errors=True)  # on a disk that may be full
            log.warning("no snapshot at step %d: %s; training goes on", state["progress"]["step"], problem)
            return
        if self.mirror is not None:
            self.mirror.put(path)
        try:
            prune(self.folder, self.keep_last)
        except OSError as error:
            reason = explain_disk_error(error, self.folder)
            log.warning("%s is saved, but not all older ones are removed: %s; training goes on", path, reason)

    def newest(self) -> Path | None:
        """The newest snapshot, else the one that this run resumed from. Not a collective.

        Rank 0 waits for its pending write. Other ranks see what is on the disk.
        """
        self._await()
        return next(iter(list_snapshots(self.folder)), self.resumed_from)

    # The end.

    def export(self) -> None:
        """Write the model, with the averaged weights if there are any, as a plain state dict to model.pt.

        If the best evaluation came before the last step, its weights go to model_best.pt. A run that has trained no
        step keeps the files of an earlier start. Raises ConfigError on all ranks if one cannot be written.
        """
        run = self.run
        with disk_access(self.world):
            self._await()  # so that model.pt is the newest file
        if run.progress.step == self.start_step:
            model, snapshot = self.run_dir / LAST, self.resumed_from
            is_newest = model.exists() and (snapshot is None or model.stat().st_mtime >= snapshot.stat().st_mtime)
            if self.world.broadcast_json(is_newest):
                return
        run.strategy.module.train()
        with run.averaged_weights():
            weights = whole_model(run.strategy)
            with disk_access(self.world):
                problem = self._write_weights(weights) if self.world.is_rank_zero else None
        problem = self.world.broadcast_json(problem)
        if problem is not None:
            raise ConfigError(problem)

    def _write_weights(self, last: dict[str, Any]) -> str | None:
        """Write model.pt and model_best.pt. None, or why one could not be written. A run that has model.pt is complete.

        A model_best.pt of an earlier end of this run goes where the last weights are the best ones now.
        """
        found = self._best() if self.run.progress.best_step not in (None, self.run.progress.step) else None
        try:
            if found is None:
                (self.run_dir / BEST).unlink(missing_ok=True)
            else:
                best = trained_weights(*found, averaged=self.run.average is not None)
                write_whole(self.run_dir / BEST, lambda file: torch.save(best, file))
            # Beside tensors a state dict has what modules give in get_extra_state.
            plain = map_tensors(lambda _, tensor: as_saved(tensor), last)
            write_whole(self.run_dir / LAST, lambda file: torch.save(plain, file))
        except OSError as error:
            reason = explain_disk_error(error, self.run_dir)
            return f"no {LAST}: {reason} and type the command again with {path_word('hydra.run.dir', self.run_dir)}"
        return None

    def _best(self) -> Found | None:
        """The snapshot of the best evaluation. None, with a warning, if it is not there, or damaged.

        A run that was resumed from another folder has it there, if none was better since.
        """
        step = self.run.progress.best_step
        folders = [self.folder] + ([] if self.resumed_from is None else [self.resumed_from.parent])
        reasons = []
        for path in (folder / f"best_{step:08d}" for folder in folders):
            try:
                verify(path)
                return load_tensors(path / STATE), path
            except Exception as error:  # torch.load raises many types
                reasons.append(first_line(error))
        log.warning("the weights of the best evaluation, after step %s, are gone: %s", step, reasons[0])
        return None

    def take_best(self) -> int:
        """Give the model the weights of the best evaluation, for the test. Returns their step: the last one's where
        they are gone. A collective. The state is no longer that of the run: nothing may be saved after it.
        """
        progress = self.run.progress
        if progress.best_step in (None, progress.step):
            return progress.step
        found = load_on_all_ranks(self.world, self._best)
        if found is None:
            return progress.step
        with disk_access(self.world):  # shards are read from their files now
            restore_weights(self.run, *found)
        return int(progress.best_step or 0)


def is_finite(values: Tensor) -> bool:
    """Whether all of `values` are. A NaN is the least and the greatest: 20 times as fast as looking at each."""
    if not values.numel():
        return True
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dtype.itemsize == 1:  # torch has no such function for float8
        values = values.float()
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())
