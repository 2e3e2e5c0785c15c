"""Atomic save, verified load, resume at any world size.

A snapshot is `step_00000123.pt` and, beside it, `step_00000123.json` with its SHA-256 and position. Both appear under
their names only when they are whole. A snapshot holds tensors and plain values only, loadable with weights_only.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from lockstep import schedules, signals, state
from lockstep.loop import Progress, agree
from lockstep.refusal import Refusal
from lockstep.world import Vote

log = logging.getLogger(__name__)

PAUSE = 0.25  # seconds between two votes on stopping and saving


class Cadence:
    """When a snapshot is due: "1epochs", "50steps" or "10min" (a bare unit means 1)."""

    def __init__(self, every):
        match = re.fullmatch(r"(\d+)?\s*(epoch|step|min)s?", str(every))
        if not match or match[1] == "0":
            raise Refusal(f"trainer.save_every={every} is no interval; try trainer.save_every=1epochs, 50steps or 10min")
        self.count, self.unit, self.last = int(match[1] or 1), match[2], time.monotonic()

    def after_step(self, step):
        return self.unit == "step" and step % self.count == 0

    def after_epoch(self, epoch):
        return self.unit == "epoch" and epoch % self.count == 0

    def by_the_clock(self):
        """True once an interval. Clocks differ between ranks, so this is a wish to vote on, not a decision."""
        due = self.unit == "min" and time.monotonic() - self.last >= 60 * self.count
        if due:
            self.last = time.monotonic()
        return due


class Writer:
    """Writes in a thread of its own while training goes on: in order, and never more than `waiting` files behind."""

    def __init__(self, waiting):
        self.thread, self.waiting, self.unfinished = ThreadPoolExecutor(1, "snapshots"), waiting, deque()

    def put(self, write, *args):
        """write(*args), later. Waits for the oldest where `waiting` are on their way: snapshots must not fill the memory."""
        while len(self.unfinished) >= self.waiting:
            self.unfinished.popleft().result()
        self.unfinished.append(self.thread.submit(write, *args))

    def drain(self):
        """Wait until everything is written."""
        while self.unfinished:
            self.unfinished.popleft().result()


class Keeper:
    """Keeps a run's snapshots, and brings a run back from them. Every rank calls every method; rank 0 writes.

    A context manager: however the run ends, the snapshots on their way are written first.

    identity: what a run must share with a snapshot to resume from it, as a flat dict of plain values.
    samples: in an epoch; every: as Cadence reads it; last: how many of the newest snapshots stay. Where something else must reach the disk
    before a snapshot does, it is called as `before_save`.
    """

    def __init__(self, run, world, run_dir, identity, samples, every, last):
        self.run, self.world, self.run_dir, self.identity, self.samples, self.last = run, world, Path(run_dir), identity, samples, last
        self.cadence, self.vote, self.writer = Cadence(every), Vote(world, flags=2, pause=PAUSE), Writer(waiting=2)
        self.before_save, self.due = lambda: None, False

    def __enter__(self):
        if self.world.leads:
            for leftover in (self.run_dir / "snapshots").glob("*.tmp"):  # of a life that was killed while it wrote
                leftover.unlink()
        return self

    def __exit__(self, error, *_):
        self.writer.drain()
        if error is None:
            self.vote.close()

    def resume(self, where):
        """Bring the run to its own newest snapshot, else to `where`, else leave it as it is.

        Rank 0 decides which snapshot is good, and all ranks read that one. Raises Refusal as `locate` and `load` do,
        and for a snapshot of another identity.
        """
        saved, path = load(locate(where, self.run_dir)) if self.world.leads else (None, None)
        path = self.world.from_leader(path)
        if path is None:
            return
        run, saved = self.run, saved or load([path])[0]
        refuse_misfit(path, saved["identity"], self.identity)
        state.restore(run.model, run.optimizer, run.average, saved)
        schedules.restore(run.scheduler, saved["scheduler"])
        run.scaler.load_state_dict(saved["scaler"])
        run.meter.restore(saved["meter"])
        run.progress = Progress(**saved["progress"])
        log.info("resumed from %s", path)

    def after_step(self, samples):
        """Save where it is due. Raises Stopped, with a snapshot of this very step, once any rank was asked to stop.

        After an epoch's last step a snapshot waits for `after_epoch`: else a run killed in between would show the
        epoch's evaluation twice.
        """
        progress = self.run.progress
        stop, due = self.vote.cast(signals.stop_asked(), self.cadence.by_the_clock())
        self.due |= due or self.cadence.after_step(progress.step)
        if stop or (self.due and progress.samples < self.samples):
            self.save()
            self.due = False
        if stop:
            self.writer.drain()
            self.world.barrier()  # a launcher ends the others when the first leaves: not before the snapshot is whole
            signals.stop_listening()
            raise signals.Stopped(f"stopped early at step {progress.step}; go on there with hydra.run.dir={self.run_dir}")

    def after_epoch(self):
        if self.due or self.run.finished or self.cadence.after_epoch(self.run.progress.epoch):
            self.save()
            self.due = False

    def save(self, name=None):
        """Save the run as it is now under `name`, or under its step's number; the writing itself is left to the writer."""
        agree(self.run)
        run, progress = self.run, asdict(self.run.progress)
        totals, weights = run.meter.totals(), state.collect(run.model, run.optimizer, run.average)
        if not self.world.leads:
            return
        self.before_save()
        held = {
            "identity": self.identity,
            **weights,
            "scheduler": run.scheduler.state_dict(),
            "scaler": run.scaler.state_dict(),
            "progress": progress,
            "meter": totals,
        }
        name = name or f"step_{run.progress.step:08d}"
        self.writer.put(self._write, name, frozen(held), dict(**progress, world_size=self.world.size))

    def _write(self, name, held, position):
        """A full disk costs a warning, not the training."""
        try:
            save(self.run_dir / "snapshots", name, held, self.last, **position)
        except OSError as error:
            log.warning("no snapshot at step %d: %s; free some space, training goes on", position["step"], error)

    def export(self):
        """The trained net as a plain state dict in model.pt, under the names the model gave its parameters."""
        with self.run.judged():
            weights = state.weights(self.run.model)
            if self.world.leads:
                try:
                    write(self.run_dir / "model.pt", {name: value.cpu().contiguous() for name, value in weights.items()})
                except OSError as error:
                    raise Refusal(f"no model.pt: {error}; free some space and type the command again with hydra.run.dir={self.run_dir}") from None


def frozen(value):
    """A copy of a state of dicts, lists, tensors and plain values, its tensors on the CPU: training cannot change it any more."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return type(value)(frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def save(folder, name, held, last, **position):
    """Write `held` to folder/name.pt so that a crash at any moment leaves this snapshot or the one before, whole.

    position: what to write beside it for a reader's eyes. Only the `last` newest snapshots stay. Raises OSError where
    the disk is full, with the older snapshots untouched.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pt"
    with _replacing(path) as file:
        torch.save(held, file)
        file.flush()
        with _replacing(path.with_suffix(".json")) as companion:
            companion.write(json.dumps({"sha256": _sha256(file.name), **position}).encode())
    for old in complete(folder)[last:]:
        old.unlink()
        old.with_suffix(".json").unlink(missing_ok=True)
    return path


def write(path, held):
    """torch.save, whole or not at all. Raises OSError where the disk is full."""
    with _replacing(path) as file:
        torch.save(held, file)


@contextmanager
def _replacing(path):
    """A temporary file in the same folder that takes the place of `path` once the block has filled it and the disk has it."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):  # torch.save on a full disk complains of a position; this is why
            raise error.__context__ from None
        raise
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # else a power cut may forget the new name
    os.close(folder)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def complete(folder):
    """The snapshots in `folder`, newest first."""
    return sorted(Path(folder).glob("step_*.pt"), reverse=True)


def locate(resume, run_dir):
    """The snapshots to try for this run, best first: its own, else those that `resume` names; none means a fresh start.

    resume: a run folder, a snapshot file, or None. Raises Refusal where it names nothing to resume from.
    """
    own = complete(Path(run_dir) / "snapshots")
    if own or resume is None:
        return own
    path = Path(resume)
    if path.is_file():
        return [path]
    found = complete(path / "snapshots") or complete(path)
    if not found:
        what = "holds no finished snapshot" if path.is_dir() else "does not exist"
        raise Refusal(f"resume={resume} {what}; type resume=<run folder or one of its snapshots/step_*.pt>, or leave it out to start afresh")
    return found


def load(paths):
    """(state, path) of the first of `paths` that is whole, on the CPU; (None, None) where there are none.

    A damaged one is passed over with a warning. Raises Refusal if none of several loads: never a silent fresh start.
    """
    for path in paths:
        try:
            companion = path.with_suffix(".json")
            if not companion.exists():
                raise ValueError(f"{companion.name} with its checksum is missing")
            if json.loads(companion.read_text())["sha256"] != _sha256(path):
                raise ValueError("its checksum does not match")
            return torch.load(path, map_location="cpu", weights_only=True), path
        except Exception as error:  # torch.load has many ways to say "damaged"
            log.warning("snapshot %s is damaged (%s); trying the one before it", path, str(error).splitlines()[0])
    if paths:
        raise Refusal(
            f"none of the {len(paths)} snapshots in {paths[0].parent} can be read; "
            f"move that folder away to start afresh, or type resume=<another snapshot>"
        )
    return None, None


def refuse_misfit(path, saved, ours):
    """Refuse a snapshot of another model, optimizer or data set, naming every key that differs."""
    keys = [key for key in sorted({*saved, *ours}) if saved.get(key) != ours.get(key)]
    differing = "; ".join(f"{key} ({saved.get(key)} in the snapshot, {ours.get(key)} here)" for key in keys)
    if differing:
        raise Refusal(f"{path} does not fit this run: {differing}; type the overrides it was made with, or leave resume= out")
