"""Atomic save, verified load, resume at any world size.

A snapshot is `step_00000123.pt` and, written last, `step_00000123.json` with its SHA-256 and position: without that
companion it is half-written and nobody reads it. It holds tensors and plain values only, loadable with weights_only.
"""

import hashlib
import json
import logging
import os
import re
import time
from dataclasses import asdict
from pathlib import Path

import torch

from lockstep import schedules, signals
from lockstep.loop import Progress
from lockstep.refusal import Refusal
from lockstep.strategy import bare
from lockstep.world import Vote

log = logging.getLogger(__name__)


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


class Keeper:
    """Keeps a run's snapshots, and brings a run back from them. Every rank calls every method; rank 0 writes.

    identity: what a run must share with a snapshot to resume from it, as a flat dict of plain values.
    every: as Cadence reads it; last: how many of the newest snapshots stay.
    """

    def __init__(self, run, world, run_dir, identity, every, last):
        self.run, self.world, self.run_dir, self.identity, self.last = run, world, Path(run_dir), identity, last
        self.cadence, self.vote = Cadence(every), Vote(world, flags=2)

    def resume(self, where):
        """Bring the run, whose model is not wrapped yet, to its own newest snapshot, else to `where`, else leave it as it is.

        Rank 0 decides which snapshot is good, and all ranks read that one. Raises Refusal as `locate` and `load` do,
        and for a snapshot of another identity.
        """
        saved, path = load(locate(where, self.run_dir)) if self.world.leads else (None, None)
        path = self.world.from_leader(path)
        if path is None:
            return
        run, saved = self.run, saved or load([path])[0]
        refuse_misfit(path, saved["identity"], self.identity)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        schedules.restore(run.scheduler, saved["scheduler"])
        run.scaler.load_state_dict(saved["scaler"])
        run.meter.restore(saved["meter"])
        run.progress = Progress(**saved["progress"])
        if run.average is not None and saved["average"] is not None:
            run.average.load_state_dict(saved["average"])
        elif run.average is not None:
            run.average.module.load_state_dict(saved["model"])
        log.info("resumed from %s", path)

    def after_step(self, samples):
        """Save where it is due. Raises Stopped, with a snapshot of this very step, once any rank was asked to stop."""
        step = self.run.progress.step
        stop, due = self.vote.cast(signals.stop_asked(), self.cadence.by_the_clock())
        if stop or due or self.cadence.after_step(step):
            self.save()
        if stop:
            self.world.barrier()  # a launcher ends the others when the first leaves: not before the snapshot is whole
            signals.stop_listening()
            raise signals.Stopped(f"stopped early at step {step}; go on there with hydra.run.dir={self.run_dir}")

    def after_epoch(self):
        if self.run.finished or self.cadence.after_epoch(self.run.progress.epoch):
            self.save()

    def save(self, name=None):
        """Save the run under `name`, or under its step's number. A full disk costs a warning, not the training."""
        totals = self.run.meter.totals()
        if not self.world.leads:
            return
        run, progress = self.run, asdict(self.run.progress)
        state = {
            "identity": self.identity,
            "model": bare(run.model).state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict(),
            "scaler": run.scaler.state_dict(),
            "average": None if run.average is None else run.average.state_dict(),
            "progress": progress,
            "meter": totals,
        }
        try:
            save(self.run_dir / "snapshots", name or f"step_{run.progress.step:08d}", state, self.last, **progress, world_size=self.world.size)
        except OSError as error:
            log.warning("no snapshot at step %d: %s; free some space, training goes on", run.progress.step, error)

    def close(self):
        self.vote.close()

    def export(self):
        """The trained net as a plain state dict in model.pt, under the names the model gave its parameters."""
        if self.world.leads:
            write(self.run_dir / "model.pt", {name: value.cpu().contiguous() for name, value in self.run.judged.state_dict().items()})


def save(folder, name, state, last, **position):
    """Write `state` to folder/name.pt so that a crash at any moment leaves this snapshot or the one before, whole.

    position: what to write beside it for a reader's eyes. Only the `last` newest snapshots stay. Raises OSError where
    the disk is full, with the older snapshots untouched.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pt"
    sha256 = write(path, state)
    _replace(path.with_suffix(".json"), lambda file: file.write(json.dumps({"sha256": sha256, **position}).encode()))
    for old in complete(folder)[last:]:
        old.with_suffix(".json").unlink()
        old.unlink()
    return path


def write(path, state):
    """torch.save by way of a temporary file in the same folder; returns the file's SHA-256."""
    _replace(path, lambda file: torch.save(state, file))
    return _sha256(path)


def _replace(path, fill):
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with open(unfinished, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # else a power cut may forget the new name
    os.close(folder)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def complete(folder):
    """The finished snapshots in `folder`, newest first."""
    return sorted((path for path in Path(folder).glob("step_*.pt") if path.with_suffix(".json").exists()), reverse=True)


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
            if companion.exists() and json.loads(companion.read_text())["sha256"] != _sha256(path):
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
