"""Saves a run's snapshots when they are due, resumes a run from them, and leaves the model's weights at its end."""

import logging
import math
import re
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed import signals
from lockstep.distributed.environment import slurm_reason
from lockstep.distributed.old_world import DISK_TIMEOUT, disk_access, gather_state
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
from lockstep.failures.record import heartbeat
from lockstep.files import explain_disk_error, is_url, write_whole
from lockstep.snapshots.files import (
    INFIX,
    bytes_in_parts,
    describe_parts,
    list_snapshots,
    remove_leftovers,
    save_snapshot,
    step_of,
    write_part,
)
from lockstep.snapshots.mirror import Mirror, fetch
from lockstep.snapshots.resume import (
    Found,
    find_snapshots,
    load_first_good,
    load_on_all_ranks,
    log_config_changes,
    require_same_run,
)
from lockstep.snapshots.state import (
    collect_state,
    copy_to_cpu,
    model_state,
    plain_copy,
    require_plain,
    restore_state,
    restore_weights,
    trained_weights,
)
from lockstep.strategies.base import Strategy
from lockstep.strategies.tensor_bytes import as_saved, map_only
from lockstep.text import first_line
from lockstep.training.nonfinite import SMALLER_STEPS, diverged
from lockstep.training.replicas import local_part, require_same_weights
from lockstep.training.run import Run

log = logging.getLogger(__name__)

MAX_PENDING = 2  # snapshots in memory that are not on the disk yet
SHARDED_ABOVE = 2**30  # bytes of weights, optimizer state and average, from which snapshot.format=auto saves parts
LAST, BEST = "model.pt", "model_best.pt"  # the weights that a run leaves at its end; BEST if the best are others


class SnapshotManager:
    """Saves and restores `run`. Every rank calls every method but `newest`. Build it before the first step.

    As a context manager it finishes the pending writes, however the run ends.
    """

    def __init__(
        self,
        run: Run,
        run_dir: str | Path,
        fingerprint: dict[str, Any],
        config: dict[str, Any],
        every: str,
        keep_last: int,
        form: str,
        mirror: str | None = None,
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        """
        fingerprint: flat dict of plain values, what a snapshot must have in common with the run that resumes from it.
        config: flat dict of plain values, stored in the snapshot; a resumed run logs what differs.
        every: see SaveInterval.
        keep_last, form: see Saver.
        mirror: as snapshot.mirror.
        before_save: called on rank 0 before each save. It writes what must not be older than the snapshot.
        """
        require_plain(run.model.state_dict())
        self.run, self.world, self.run_dir = run, run.world, Path(run_dir)
        self.folder = self.run_dir / "snapshots"
        self.fingerprint, self.config = fingerprint, config
        self.interval = SaveInterval(every)
        self.before_save = before_save
        self.writer = BackgroundWriter(MAX_PENDING)
        self.mirror = Mirror(mirror, self.folder) if mirror is not None and self.world.is_rank_zero else None
        self.saver = Saver(run, self.folder, self.writer, keep_last, form, self.mirror)
        self.resumed_from: Path | None = None
        self.start_step = 0
        self.is_due = False

    def __enter__(self) -> Self:
        if self.world.is_rank_zero:  # what a killed process left
            for name in (LAST, BEST):
                (self.run_dir / f"{name}.tmp").unlink(missing_ok=True)
            remove_leftovers(self.folder)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer.pending or self.mirror is not None:
            heartbeat.enter("disk")  # which may take longer
        self.writer.close()
        if self.mirror is not None:
            self.mirror.close()

    # To begin.

    def resume(self, where: str | Path | None) -> Path | None:
        """Restore the run's own newest snapshot, else the one that `where` names. Returns its path, None without one.

        Rank 0 decides which snapshot is good, and all ranks read that one. Raises ConfigError on all ranks as
        `find_snapshots` and `load_first_good` do, and for a snapshot with another fingerprint.
        """

        def find() -> Found | None:
            if is_url(where) and not list_snapshots(self.folder):
                fetch(str(where), self.folder)
            paths = find_snapshots(where, self.run_dir)
            found = load_first_good(paths)
            if found is not None:
                saved, path = found
                self.saver.damaged |= set(paths[: paths.index(path)])
                require_same_run(path, saved["fingerprint"], self.fingerprint)
            return found

        heartbeat.enter("resume")
        found = load_on_all_ranks(self.world, find)
        if found is None:
            return None
        saved, path = found
        with disk_access(self.world):  # parts are read from their files now
            restore_state(self.run, saved)
        log_config_changes(saved["config"], self.config)
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

    def after_epoch(self) -> None:
        """Save if a snapshot is due, and at the end of the run."""
        if self.is_due or self.run.finished or self.interval.due_after_epoch(self.run.progress.epoch):
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
        if newest == str(self.folder / f"{self._numbered()}.pt"):
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

    @heartbeat.during("snapshot")
    def save(self, name: str | None = None) -> None:
        """Save the run as it is now under `name`, or under its step's number. A thread does the writing.

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
        contents = self.saver.collect(totals)
        if name is None:
            self.is_due = False
        if self.world.is_rank_zero:
            self.before_save()
        with disk_access(self.world):  # earlier snapshots may not be written yet
            if contents is not None:
                contents |= {"fingerprint": self.fingerprint, "config": self.config, "world_size": self.world.size}
                self.saver.put(name or self._numbered(), contents)

    def newest(self) -> Path | None:
        """The newest numbered snapshot, else the one that this run resumed from. Not a collective.

        Rank 0 waits for its pending writes. Other ranks see what is on the disk.
        """
        self.writer.drain()
        now = self.run.progress.step  # a later snapshot was passed over as damaged
        own = [path for path in list_snapshots(self.folder) if step_of(path) <= now]
        return own[0] if own else self.resumed_from

    def _numbered(self) -> str:
        return f"step_{self.run.progress.step:08d}"

    # The end.

    def export(self) -> None:
        """Write the model, with the averaged weights if there are any, as a plain state dict to model.pt.

        If the best evaluation came before the last step, its weights go to model_best.pt. A run that has trained no
        step keeps the files of an earlier start. Raises ConfigError on all ranks if one cannot be written.
        """
        run = self.run
        with disk_access(self.world):
            self.saver.finish()  # so that model.pt is the newest file
        if run.progress.step == self.start_step:
            model, snapshot = self.run_dir / LAST, self.resumed_from
            is_newest = model.exists() and (snapshot is None or model.stat().st_mtime >= snapshot.stat().st_mtime)
            if self.world.broadcast_json(is_newest):
                return
        run.strategy.module.train()
        with run.averaged_weights():
            weights = model_state(run.strategy)
            with disk_access(self.world):
                problem = self._write_weights(weights) if self.world.is_rank_zero else None
        problem = self.world.broadcast_json(problem)
        if problem is not None:
            raise ConfigError(problem)

    def _write_weights(self, last: dict[str, Any]) -> str | None:
        """Write model.pt and model_best.pt. None, or why one could not be written. A run that has model.pt is complete.

        A model_best.pt of an earlier end of this run goes where the last weights are the best ones now.
        """
        progress, best = self.run.progress, None
        if progress.best_step not in (None, progress.step):
            best = self._best_weights()
        # Beside tensors a state dict has what modules give in get_extra_state.
        last = map_only(Tensor, as_saved, last)
        try:
            if best is None:
                (self.run_dir / BEST).unlink(missing_ok=True)
            else:
                write_whole(self.run_dir / BEST, lambda file: torch.save(best, file))
            write_whole(self.run_dir / LAST, lambda file: torch.save(last, file))
        except OSError as error:
            reason = explain_disk_error(error, self.run_dir)
            return f"no {LAST}: {reason} and type the command again with {path_word('hydra.run.dir', self.run_dir)}"
        return None

    def _best_weights(self) -> dict[str, Any] | None:
        """What best.pt holds of the model. None if it is damaged, not there, or that of another step."""
        path, found = self.folder / "best.pt", self._best_in(self.folder)
        if found is not None:
            return trained_weights(found[0], averaged=self.run.average is not None)
        if path.exists():
            step = self.run.progress.best_step
            log.warning("no %s: the snapshot of the best evaluation, after step %d, could not be written", BEST, step)
        return None

    def _best_in(self, folder: Path) -> Found | None:
        """The snapshot of the best evaluation. None if it is damaged, not there, or that of another step."""
        path = folder / "best.pt"
        try:
            found = load_first_good([path]) if path.exists() else None
        except ConfigError:  # a damaged one is in the log
            return None
        return found if found is not None and found[0]["progress"]["step"] == self.run.progress.best_step else None

    def take_best_weights(self) -> int:
        """Give the model the weights of the best evaluation, for the test. Returns their step: the last one's where
        they are gone. A collective. The state is no longer that of the run: nothing may be saved after it.
        """
        progress = self.run.progress
        if progress.best_step in (None, progress.step):
            return progress.step
        # A run that was resumed from another folder has its best evaluation there, if none was better since.
        folders = [self.folder] + ([] if self.resumed_from is None else [self.resumed_from.parent])
        found = load_on_all_ranks(self.world, lambda: next(filter(None, map(self._best_in, folders)), None))
        if found is None:
            gone = "the weights of the best evaluation, after step %d, are gone: those of the last step are tested"
            log.warning(gone, progress.best_step)
            return progress.step
        with disk_access(self.world):  # parts are read from their files now
            restore_weights(self.run, found[0])
        return int(progress.best_step or 0)


class SaveInterval:
    """ "1epochs", "50steps" or "10min"; a unit alone means 1.

    unit: "epoch", "step" or "min".
    """

    def __init__(self, every: str) -> None:
        match = re.fullmatch(r"(?!0+\D)(\d+)?\s*(epoch|step|min)s?", every)
        if match is None:
            accepted = "epochs, steps or minutes, such as 50steps"
            raise ConfigError(f"snapshot.every={every} should be {accepted}; type snapshot.every=1epochs")
        self.count, self.unit = int(match[1] or 1), match[2]
        self.last_time = time.monotonic()

    @property
    def steps(self) -> int:
        """Between two snapshots; 0 if these are not counted in steps."""
        return self.count if self.unit == "step" else 0

    def due_after_step(self, step: int) -> bool:
        return self.unit == "step" and step % self.count == 0

    def due_after_epoch(self, epoch: int) -> bool:
        """Whether `epoch`, the number of whole epochs done, ends an interval."""
        return self.unit == "epoch" and epoch % self.count == 0

    def due_by_clock(self) -> bool:
        """True once per interval of minutes. The ranks' clocks differ, so rank 0's decides."""
        due = self.unit == "min" and time.monotonic() - self.last_time >= 60 * self.count
        if due:
            self.last_time = time.monotonic()
        return due


def validate_format(form: str, strategy: Strategy) -> None:
    """Raise ConfigError if `snapshot.format` asks for parts that the ranks do not hold."""
    if form == "sharded" and not strategy.shards_state:
        raise ConfigError(
            "snapshot.format=sharded needs ranks that hold parts of the state, and with this strategy each holds all "
            "of it; type snapshot.format=auto, or strategy=fsdp"
        )


class BackgroundWriter:
    """Runs writes in one thread, in order, and is never more than `max_pending` writes behind."""

    def __init__(self, max_pending: int) -> None:
        self.thread = ThreadPoolExecutor(1, "snapshots")
        self.max_pending = max_pending
        self.pending: deque[Future[None]] = deque()

    def put(self, write: Callable[..., None], *args: Any) -> None:
        """Run write(*args) later. Waits for the oldest if `max_pending` are pending: each holds a copy in memory.

        Raises what an earlier write raised.
        """
        while len(self.pending) >= self.max_pending:
            self.pending.popleft().result()
        self.pending.append(self.thread.submit(write, *args))

    def drain(self) -> None:
        """Wait until everything is written. Raises what a write raised."""
        while self.pending:
            self.pending.popleft().result()

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        try:
            self.drain()
        finally:
            self.thread.shutdown()


class CopyMemory:
    """`plain_copy` into the memory of the copy before, which is overwritten: new memory takes four times as long."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def plain_copy(self, value: Any) -> Any:
        before, self.tensors = self.tensors[::-1], []

        def copy(tensor: Tensor) -> Tensor:
            kept = before.pop() if before else None
            if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                self.tensors.append(kept.copy_(tensor.detach()))
            else:
                self.tensors.append(copy_to_cpu(tensor))
            return self.tensors[-1]

        return plain_copy(value, copy)


class Saver:
    """Saves `run` to `folder`, in one file or in parts, and a thread does the writing.

    Every rank calls every method, but `put` only where `collect` gave something.

    keep_last: how many numbered snapshots stay.
    form: `snapshot.format`.
    mirror: gets what is written.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        writer: BackgroundWriter,
        keep_last: int,
        form: str,
        mirror: Mirror | None,
    ) -> None:
        self.mirror = mirror
        self.run, self.folder, self.writer, self.keep_last, self.form = run, folder, writer, keep_last, form
        self.world = run.world
        self.damaged: set[Path] = set()  # on rank 0: passed over when the run was resumed, they push out no good ones
        self.part_memory = CopyMemory()
        self.thread_world: World | None = None  # of the writing threads, while the others use their own groups

    def collect(self, totals: Tensor) -> dict[str, Any] | None:
        """The state as `put` takes it, not copied yet; None on a rank that writes nothing. A collective.

        Where it is saved in parts it has "parts", the end of the name of their folder.
        """
        strategy = self.run.strategy
        if self.form != "full" and strategy.shards_state:
            contents = collect_state(self.run, totals, strategy.own_blocks)
            of_ranks = self.world.all_gather_json([bytes_in_parts(contents), secrets.token_hex(4)])
            is_large = self.world.size > 1 and sum(size for size, _ in of_ranks) >= SHARDED_ABOVE
            if is_large or self.form == "sharded":
                if self.thread_world is None:
                    group: Any = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
                    self.thread_world = replace(self.world, control=group)
                return contents | {"parts": of_ranks[0][1]}
        contents = collect_state(self.run, totals, strategy.full_state)
        return contents if self.world.is_rank_zero else None

    def put(self, name: str, contents: dict[str, Any]) -> None:
        """Copy `contents`, of `collect` and what the caller added, and let the thread write them as `name`."""
        if "parts" not in contents:
            self.writer.put(self._write, name, plain_copy(contents))
            return
        self.writer.drain()  # one copy of a part at a time
        self.writer.put(self._write_in_parts, name, self.part_memory.plain_copy(contents))

    def finish(self) -> None:
        """Wait until the last snapshot is on the disk, and free the memory of its copy."""
        self.writer.drain()
        self.part_memory = CopyMemory()

    def _write(self, name: str, contents: dict[str, Any]) -> None:
        """In the writer's thread. A full disk costs a warning, not the training."""
        try:
            path = save_snapshot(self.folder, name, contents, self.keep_last, self.damaged)
            self.damaged.discard(path)
            if self.mirror is not None:
                self.mirror.put(path)
        except OSError as error:
            if "parts" in contents:  # the largest files, on a disk that may be full
                shutil.rmtree(self.folder / contents["parts"]["folder"], ignore_errors=True)
            self._warn(contents, explain_disk_error(error, self.folder))

    def _write_in_parts(self, name: str, contents: dict[str, Any]) -> None:
        """In the writer's thread of each rank. Rank 0 writes the snapshot's own file when all parts are on the disk."""
        folder = self.folder / f"{name}{INFIX}{contents['parts']}"
        report: dict[str, Any] = {"problem": None}
        try:
            report |= write_part(folder / f"rank_{self.world.rank}.bin", contents)
        except OSError as error:
            report["problem"] = explain_disk_error(error, self.folder)
        assert self.thread_world is not None
        try:
            reports = gather_state(self.thread_world, report)
        except RuntimeError as error:  # a rank has died, which ends the training, too
            step = contents["progress"]["step"]
            log.warning("no snapshot at step %d: a rank was lost (%s)", step, first_line(error))
            return
        if not self.world.is_rank_zero:
            return
        problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(reports) if each["problem"]]
        if problems:
            shutil.rmtree(folder, ignore_errors=True)
            self._warn(contents, "; ".join(problems))
            return
        self._write(name, contents | describe_parts(folder, reports))

    def _warn(self, contents: dict[str, Any], reason: str) -> None:
        log.warning("no snapshot at step %d: %s; training goes on", contents["progress"]["step"], reason)


def is_finite(values: Tensor) -> bool:
    """Whether all of `values` are. A NaN is the least and the greatest: 20 times as fast as looking at each."""
    if not values.numel():
        return True
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dtype.itemsize == 1:  # torch has no such function for float8
        values = values.float()
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())
