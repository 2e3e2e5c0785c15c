"""Saves a run's snapshots when they are due, resumes a run from them, and leaves the model's weights at its end."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from lockstep.compat import with_versions
from lockstep.config.schema import NO_NUMBER, interval
from lockstep.distributed import signals
from lockstep.distributed.world import World
from lockstep.errors import (
    EXIT_STOPPED_WITHOUT_SNAPSHOT,
    ConfigError,
    StoppedEarly,
    TrainingDiverged,
    differing,
    go_on_words,
)
from lockstep.failures.record import heartbeat
from lockstep.files import is_url
from lockstep.snapshots import files
from lockstep.snapshots.files import list_snapshots, load_first_good, load_state, step_of
from lockstep.snapshots.state import Shards, collect, restore, restore_weights, save_shards, trained_weights
from lockstep.training.exchange import require_same_weights
from lockstep.training.nonfinite import SMALLER_STEPS, are_finite, require_finite
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.snapshots.mirror import Mirror

log = logging.getLogger(__name__)

LAST, BEST = "model.pt", "model_best.pt"  # the weights that a run leaves at its end; BEST if the best are others
DISK_TIMEOUT = timedelta(hours=1)  # for a slow disk


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves and restores `run`. Every rank calls every method but `newest` and `due_by_clock`.
    identity: what a snapshot must have in common with the run that resumes from it. config: is stored; a resumed run
    logs what differs. Both are flat dicts of plain values. mirror: on rank 0, gets what is written. Build it before
    the first step. As a context manager it finishes the pending write, however the run ends."""

    def __init__(self, run: Run, identity: dict[str, Any], config: dict[str, Any], mirror: "Mirror | None") -> None:
        if any(hasattr(weight, "to_local") for weight in run.model.parameters()):
            files.require_safetensors("a strategy by which each rank holds a part of the weights")
        self.run, self.world, self.run_dir, self.mirror = run, run.world, Path(run.config.run_dir), mirror
        self.folder, self.identity, self.config = self.run_dir / "snapshots", identity, config
        self.count, self.unit = interval(run.config.snapshot.every)
        self.every_steps = self.count if self.unit == "step" else 0  # 0: not counted in steps
        self.thread, self.pending = ThreadPoolExecutor(1, "snapshots"), Future[None]()
        self.pending.set_result(None)
        self.threads_world: World | None = None  # of the writing threads, while the others use their own groups
        if self.world.size > 1 and not run.strategy.replicas_equal:
            own_group: Any = dist.new_group(backend="gloo", timeout=DISK_TIMEOUT)
            self.threads_world = replace(self.world, control=own_group)
        self.resumed_from: Path | None = None
        self.saved_at, self.is_due, self.is_deleted = time.monotonic(), False, False

    def __exit__(self, *error: object) -> None:
        heartbeat.enter("disk")  # which may take longer
        self.thread.shutdown()
        if self.mirror is not None:
            self.mirror.close()

    def resume(self, where: str | Path | None) -> None:
        """Restore the run's own newest snapshot, else the one that `where` names, if there is one. Raises ConfigError,
        on all ranks, if none can be read, and for one of another run."""

        def newest_good() -> Path | None:
            files.remove_leftovers(self.folder)
            if is_url(where) and not list_snapshots(self.folder):
                from lockstep.snapshots.mirror import Mirror

                Mirror(str(where), "resume").fetch(self.folder)
            paths = list_snapshots(self.folder) or files.named_snapshots(where)
            if not paths:
                files.remove_best(self.folder, -1)
                return None
            saved, path = load_first_good(paths)
            if differ := differences(saved["identity"], self.identity):
                advice = "type the overrides that it was made with, or to start afresh hydra.run.dir=<a new folder>"
                raise ConfigError(f"{path} does not fit this run: {differ}; {advice}")
            progress, is_own = saved["progress"], path.parent == self.folder
            for damaged in paths[: paths.index(path)] if is_own else ():
                shutil.move(damaged, damaged.with_name(f"{damaged.name}.damaged"))
            files.remove_best(self.folder, progress["step"] if is_own else -1)
            best = path.with_name(f"best_{progress['best_step'] or 0:08d}")
            if not is_own and best.exists():  # this run may choose it, also when it has been stopped
                try:
                    unfinished = shutil.copytree(best, self.folder / f"{best.name}.tmp")
                except OSError as error:
                    again = "free some space and type the command again"
                    raise ConfigError(f"{best} cannot be copied to {self.folder}: {error}; {again}") from None
                unfinished.rename(own_best := self.folder / best.name)
                if self.mirror is not None:
                    self.mirror.put(own_best)
            return path

        heartbeat.enter("resume")
        found = bring_back(self.run, newest_good, restore)
        if found is None:
            return
        (saved, self.resumed_from), progress = found, self.run.progress
        if changes := differences(compared(saved["config"]), compared(self.config)):
            log.info("the config changed since the snapshot: %s", changes)
        # This snapshot precedes the epoch's evaluation. A newer one must follow it, or a kill would repeat it.
        self.is_due = progress.samples == len(self.run.loaders.train)
        heartbeat.note(resumed=[str(self.resumed_from.absolute()), progress.step])
        log.info("resumed from %s", self.resumed_from)
        if self.run.finished:
            message = "nothing to train: the run is at step %d already; type %s=<more> to go on"
            log.info(message, progress.step, self.run.reached_limit)

    def due_by_clock(self) -> bool:
        """On rank 0, whose clock alone counts: whether all ranks shall be told to `ask`."""
        return self.unit == "min" and time.monotonic() - self.saved_at >= 60 * self.count

    def ask(self) -> None:
        self.is_due = True

    def due_after_step(self) -> bool:
        """Whether to save now, in mid-epoch. At an epoch's end `after_epoch` saves, when it is evaluated."""
        self.is_due |= self.unit == "step" and self.run.progress.step % self.count == 0
        return self.is_due and self.run.progress.samples < len(self.run.loaders.train)

    def after_epoch(self) -> None:
        """Save if a snapshot is due, and at the end of the run."""
        if self.is_due or self.run.finished or (self.unit == "epoch" and self.run.progress.epoch % self.count == 0):
            self.save()

    def stop_after_step(self) -> NoReturn:
        """Save the run as it was after its last step, so that a resumed run evaluates what is due then. Then stop."""
        self.run.await_evaluation()
        self.stop()

    def stop(self) -> NoReturn:
        """Save the run as it is now, and raise StoppedEarly when the snapshot is on the disk."""
        self.save()
        newest = on_rank_zero(self.world, self.newest)
        if newest == self.path("step"):
            self.leave("; go on there")
        where = f"go on from {newest}" if newest else "start again"
        self.leave(f", whose snapshot could not be written; {where}", EXIT_STOPPED_WITHOUT_SNAPSHOT)

    def stop_before_test(self) -> NoReturn:
        """Raise StoppedEarly: all that was trained is saved, and the same command goes on with the test."""
        self.leave(", before the test; go on there")

    def leave(self, what: str, *code: int) -> NoReturn:
        self.world.barrier()  # the launcher ends all ranks when the first one exits
        signals.stop_listening()
        step, words = self.run.progress.step, go_on_words(self.run_dir)
        raise StoppedEarly(f"stopped early at step {step}{what} with {words}", *code)

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}_{self.run.progress.step:08d}"

    @heartbeat.during("snapshot")
    def save(self, kind: str = "step") -> None:
        """Save the run as it is now. A thread does the writing. kind: step or best. Raises, on all ranks and before
        anything is written, TrainingDiverged if the loss or a weight is not finite, and RanksDiffer."""
        run = self.run
        totals = run.world.all_reduce_sum(run.meter.flush().clone())
        require_finite(run, float(totals[0]))  # the sum over the epoch
        # An update can break the weights one step before a loss shows it. float8 has no norm.
        weights = [w.detach() for w in run.model.parameters() if w.is_floating_point() or w.is_complex()]
        if any(self.world.any_of([not are_finite([w.float() if w.dtype.itemsize == 1 else w for w in weights])])):
            raise TrainingDiverged(f"the weights are not finite at step {run.progress.step}", SMALLER_STEPS)
        require_same_weights(run)
        with disk_access(self.world):  # in memory there is one snapshot at most
            self.pending.result()
        if self.world.is_rank_zero and not self.is_deleted and not (self.run_dir / ".lock").exists():
            self.is_deleted = True
            advice = "press Ctrl-C and type the command again: it goes on, and writes them anew"
            log.warning("%s was deleted: the logs, curves and config of this run are lost; %s", self.run_dir, advice)
        state, shards = collect(run, totals)
        if kind == "step":
            self.is_due, self.saved_at = False, time.monotonic()
        if self.world.is_rank_zero and state is not None:
            state |= {"identity": self.identity, "config": self.config, "world_size": self.world.size}
        if self.world.is_rank_zero or self.threads_world is not None:
            self.pending = self.thread.submit(self.write, self.path(kind), state, shards)

    def write(self, path: Path, state: dict[str, Any] | None, shards: Shards) -> None:
        """In the thread. Each rank writes what it alone has, and rank 0 ends the snapshot when all is on the disk. A
        full disk costs a warning, not the training."""
        unfinished, rank, names = path.with_name(f"{path.name}.tmp"), self.world.rank, list[str]()
        written, problem = files.Files(), ""
        try:
            if shards:
                names = save_shards(shards, unfinished, rank)
            if state is not None:
                names.append(f"state_{rank:05d}.pt" if rank else files.STATE)
                files.write_tensors(unfinished / names[-1], state)
            written = files.of_files(unfinished, names)
        except OSError as error:
            problem = str(error)
        if self.threads_world is not None:
            for of_rank, said in self.threads_world.all_gather_json([written, problem]):
                written, problem = written | of_rank, problem or said
        if rank:
            return
        try:
            if problem:
                raise OSError(problem)
            files.finish_snapshot(self.folder, path.name, written)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)  # on a disk that may be full
            log.warning("no snapshot %s: %s; training goes on", path.name, error)
            return
        if self.mirror is not None:
            self.mirror.put(path)
        with suppress(OSError):  # older ones stay
            files.prune(self.folder, self.run.config.snapshot.keep_last)

    def newest(self) -> Path | None:
        """The newest snapshot, else the one that this run resumed from. Rank 0 waits for its pending write."""
        self.pending.result()
        return next(iter(list_snapshots(self.folder)), self.resumed_from)

    def export(self) -> None:
        """Write the model of the last snapshot, with the averaged weights if there are any, as a plain state dict to
        model.pt, and if the best evaluation came before the last step, its weights to model_best.pt. Raises
        ConfigError, on all ranks, if one cannot be written."""

        def write() -> None:
            newest, best = self.newest(), self.best()
            try:
                if newest is None or step_of(newest) != self.run.progress.step:
                    raise OSError("the last snapshot could not be written")
                (self.run_dir / BEST).unlink(missing_ok=True)
                for name, path in ((BEST, best), (LAST, newest)):
                    if path is not None:
                        weights = trained_weights(load_state(path), path, averaged=self.run.average is not None)
                        files.write_tensors(self.run_dir / name, with_versions(weights, self.run.model))
            except OSError as error:
                again = f"type the command again with {go_on_words(self.run_dir)}"
                raise ConfigError(f"no {LAST}: {error}; free some space and {again}") from None

        on_rank_zero(self.world, write)

    def best(self) -> Path | None:
        """The snapshot of the best evaluation. None if that is the last step, and, with a warning, if it is gone or
        damaged."""
        step = self.run.progress.best_step
        if step in (None, self.run.progress.step):
            return None
        try:
            return load_first_good([path for path in list_snapshots(self.folder, "best") if step_of(path) == step])[1]
        except ConfigError:
            what = "the weights of the best evaluation, after step %s, are gone: the last ones stand for them"
            log.warning(what, step)
            return None

    def take_best(self) -> int:
        """Give the model the weights of the best evaluation, for the test. Returns their step: the last one's where
        they are gone. A collective. The state is no longer that of the run: nothing may be saved after it."""
        found = bring_back(self.run, self.best, restore_weights)
        return self.run.progress.step if found is None else step_of(found[1])


@contextmanager
def disk_access(world: World) -> Iterator[None]:
    """Inside the block ranks read and write files. At its end they wait for each other, however slow a disk is. They
    notice the exit of one that raises in the block, but not the loss of a machine: then `timeout` counts. A ConfigError
    is raised on all."""
    # They wait in another phase: the watchdog is only patient with a rank that uses its disk.
    with world.refusals_on_all(DISK_TIMEOUT if world.local_size >= world.size else None), heartbeat.during("disk"):
        yield


def on_rank_zero(world: World, work: Callable[[], Path | None]) -> Path | None:
    """What `work`, which reads or writes files, returns on rank 0, or its ConfigError, on all ranks. A collective."""
    found = None
    with disk_access(world):
        if world.is_rank_zero:
            found = work()
    name = world.broadcast_json(found and str(found))
    return name and Path(name)


def bring_back(run: Run, find: Callable[[], Path | None], restore: Callable[..., None]) -> files.Found | None:
    """Rank 0 finds a good snapshot, and all ranks `restore` it; None without one. A collective."""
    path = on_rank_zero(run.world, find)
    if path is None:
        return None
    with disk_access(run.world):
        saved = load_state(path)
    with disk_access(run.world):  # `restore` has collectives, which wait for `backend.timeout`
        restore(run, saved, path)
    return saved, path


def restore_trained(run: Run, paths: list[Path], config: Mapping[str, Any]) -> files.Found:
    """Bring the weights of the first good snapshot of `paths`, one at least, into `run`. A collective. Raises
    ConfigError, on all ranks, for one of another net than that of the flat `config`."""

    def find() -> Path:
        saved, path = load_first_good(paths)
        both = [{k: v for k, v in of.items() if k.startswith("model.")} for of in (saved["identity"], config)]
        if differ := differences(*both):
            advice = "leave model= out, and type data like that of the training"
            raise ConfigError(f"{path} does not fit this run: {differ}; {advice}")
        return path

    heartbeat.enter("resume")
    found = bring_back(run, find, restore_weights)
    assert found is not None
    return found


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    found = differing(saved, ours, "nothing").items()
    return "; ".join(f"{key} ({then} in the snapshot, {now} now)" for key, (then, now) in found)


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a flat config that says what is computed, without where."""
    return {key: value for key, value in config.items() if key.partition(".")[0] not in NO_NUMBER}
