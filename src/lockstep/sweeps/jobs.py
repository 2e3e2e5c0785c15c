"""A job of a sweep: a process that trains, as the command that a person would type. No torch at the top."""

import gc
import importlib
import multiprocessing
import os
import shlex
import signal
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep import cli, errors
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.distributed import signals
from lockstep.distributed.host import end_with_parent, usable_cores
from lockstep.failures.report import in_one_line, read_report
from lockstep.runs.record import SWEEP, Run, best_of, read_run, state_of, versions

if TYPE_CHECKING:
    from lockstep.preflight import Parts

SHARED = ("launchers.rank_imports", "modes.train", "tasks.reports", "distributed.watch", "preflight")
CONSOLE = "console.log"  # in a job's folder: what it prints, where several run at once
STOPPED = {errors.EXIT_RESUMABLE, errors.EXIT_STOPPED_WITHOUT_SNAPSHOT, *(128 + one for one in signals.STOP_SIGNALS)}

Slot = tuple[list[int], list[str]]  # the cores and the GPUs of one job at a time; empty for all


@dataclass(frozen=True)
class Job:
    """A training that has been composed and checked. folder: of its run. title: what it changes, for people."""

    folder: Path
    title: str
    config: RunConfig
    record: ConfigRecord
    parts: "Parts"

    def run(self) -> Run | None:
        """Its record, None if there is none."""
        with suppress(errors.ConfigError):
            return read_run(self.folder)
        return None

    def value(self) -> float | None:
        """Its best number, None if there is none."""
        run = self.run()
        return None if run is None else best_of(run)[0]

    def train(self) -> None:
        """What `main` of train.py does after its checks."""
        begin: Any = importlib.import_module("lockstep.preflight").begin
        with errors.exits_are_failures("the command left before the training"):
            begin(self.config, self.parts)
            self.folder.mkdir(parents=True, exist_ok=True)  # for a script of Slurm
            gc.enable()
            self.parts.launcher.launch(self.parts.mode.work, self.config, self.record, self.parts)


class Outcome(NamedTuple):
    """How a job ended. state: finished, pruned, stopped, refused, diverged, failed. cause: of the last three."""

    state: str
    cause: str = ""


def import_shared() -> None:
    """What each job needs, once, and frozen: memory that is shared is copied when a collection writes to it."""
    gc.disable()
    for name in SHARED:
        importlib.import_module(f"lockstep.{name}")
    versions()  # are kept, too
    gc.freeze()
    gc.enable()


class Process:
    """A job that runs in `slot`. to_file: its output goes to CONSOLE.

    It is a fork, and so it shares the imports and the checked config. macOS kills forks of a process that has used its
    libraries: there a job imports torch itself.
    """

    def __init__(self, job: Job, slot: Slot, to_file: bool) -> None:
        self.job, self.slot, self.console = job, slot, job.folder / CONSOLE if to_file else None
        self.starts, self.is_pruned = 0, False
        self.start()

    def start(self) -> None:
        self.starts, self.started = self.starts + 1, time.time()
        context: Any = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "fork")
        self.told, self.tells = context.Pipe(duplex=False)
        words = (os.getpid(), self.job, self.slot, self.console, self.tells)
        self.process = context.Process(target=_become, args=words)
        with signals.blocked():
            self.process.start()

    def outcome(self, is_stopping: bool) -> Outcome:
        """Of a process that has ended. is_stopping: a signal was passed on to it."""
        code, report, run = self.process.exitcode, read_report(self.job.folder), self.job.run()
        if code == errors.EXIT_FINISHED:
            return Outcome("finished")
        if code in STOPPED or (is_stopping and code < 0):
            return Outcome("pruned" if self.is_pruned and not is_stopping else "stopped")
        cause = f"ended with exit code {code}, see {self.console or 'above'}"
        if report is not None and report["run"]["time"] >= self.started and (code >= 0 or "verdict" in report["first"]):
            cause = in_one_line(report)
        elif self.told.poll():
            cause = self.told.recv()
        elif code < 0:  # this process knows by which signal
            cause = f"killed by {signal.Signals(-code).name}, perhaps because no memory was left"
        state = "diverged" if run is not None and state_of(run) == "diverged" else "failed"
        return Outcome("refused" if code == errors.EXIT_CONFIG else state, textwrap.shorten(cause, 300))


def _become(sweep: int, job: Job, slot: Slot, console: Path | None, tells: Any) -> None:
    """Turn this process into the job's command. Never returns. tells: takes the sentence of one that is refused."""
    signals.end_at_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
    end_with_parent(parent=sweep)
    os.setsid()  # Ctrl-C is for the sweep, which passes it on
    cores, gpus = slot
    os.environ[SWEEP] = str(job.folder.parent)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if console is not None:
        console.parent.mkdir(parents=True, exist_ok=True)
        with console.open("ab") as file:
            for output in (1, 2):
                os.dup2(file.fileno(), output)
    sys.argv = shlex.split(job.record.command)[1:]
    of_job: Any = OmegaConf.create({"hydra": {"overrides": {"task": [*job.record.overrides]}}})
    HydraConfig.instance().cfg = of_job  # for launch=slurm

    def train() -> None:
        try:
            job.train()
        except errors.ConfigError as refusal:
            tells.send(str(refusal))
            raise

    cli.run(train)


def divide_machine(n_jobs: int) -> list[Slot]:
    """What each of the jobs at once may use. No core and no GPU is in two slots, if there are as many."""
    if n_jobs == 1:
        return [([], [])]
    from torch.cuda import device_count  # it asks NVML: a process that has started CUDA cannot fork

    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(device_count())))
    gpus = named.split(",")[: device_count()]

    def share(units: list[Any], number: int) -> list[Any]:
        size = max(1, len(units) // n_jobs)  # what is left over belongs to none
        return units[number * size % len(units) :][:size] if units else []

    return [(share(usable_cores(), number), share(gpus, number)) for number in range(n_jobs)]
