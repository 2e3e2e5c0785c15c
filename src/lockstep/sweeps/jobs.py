"""A job of a sweep: the command that a person would type, in a process of its own.

The process is forked from a server that has imported torch and used it for nothing. No torch here.
"""

import functools
import multiprocessing
import os
import runpy
import signal
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from lockstep import errors
from lockstep.compat import forget_multiprocessing_folder
from lockstep.distributed import signals
from lockstep.distributed.host import LAUNCHER, end_with_parent, usable_cores
from lockstep.distributed.run_folder import HeldFolder
from lockstep.errors import ConfigError, path_value
from lockstep.failures.report import in_one_line, read_report
from lockstep.launchers.base import print_line
from lockstep.runs.record import SWEEP, Run, read_run, state_of
from lockstep.source_code import ROOT

TRAIN = str(ROOT / "src" / "train.py")
CONSOLE = "console.log"  # in a job's folder: what it prints, where several run at once
LOCK_SECONDS = 20.0  # for the ranks of a sweep that was killed to end
LONGEST_CAUSE = 300  # characters
STOPPED = {
    errors.EXIT_RESUMABLE,
    errors.EXIT_STOPPED_WITHOUT_SNAPSHOT,
    *(128 + number for number in signals.STOP_SIGNALS),
}


@dataclass(frozen=True)
class Job:
    """A command. folder: its run folder. words: all but that of the folder. title: for people."""

    folder: Path
    words: tuple[str, ...]
    title: str

    def run(self) -> Run | None:
        """Its record, None if there is none."""
        with suppress(ConfigError):
            return read_run(self.folder)
        return None


@dataclass(frozen=True)
class Outcome:
    """How a job ended. state: finished, pruned, stopped, refused, diverged, failed. cause: of the last three."""

    state: str
    cause: str = ""


@dataclass(frozen=True)
class Slot:
    """The cores and the GPUs that one job at a time may use; None for all."""

    cores: list[int] | None = None
    gpus: list[str] | None = None


class Process:
    """A job that runs in `slot`. to_file: its output goes to CONSOLE."""

    def __init__(self, job: Job, slot: Slot, to_file: bool) -> None:
        self.job, self.slot, self.console = job, slot, job.folder / CONSOLE if to_file else None
        self.starts, self.is_pruned = 0, False
        self.start()

    def start(self) -> None:
        print_line(f"sweep: {self.job.title}", sys.stdout)
        self.starts, self.started = self.starts + 1, time.time()
        self.process = server().Process(target=_become, args=(self.job, self.slot, self.console))
        self.process.start()

    def outcome(self, is_stopping: bool) -> Outcome:
        """Of a process that has ended. is_stopping: a signal was passed on to it."""
        code = self.process.exitcode
        if code == errors.EXIT_FINISHED:
            return Outcome("finished")
        if code in STOPPED or (is_stopping and code < 0):
            return Outcome("pruned" if self.is_pruned and not is_stopping else "stopped")
        report, run = read_report(self.job.folder), self.job.run()
        if report is not None and report["run"]["time"] >= self.started and (code >= 0 or "verdict" in report["first"]):
            cause = in_one_line(report)
        elif code < 0:  # this process knows by which signal
            hint = ", perhaps by the system because no memory was left" * (code == -signal.SIGKILL)
            cause = f"killed by {signal.Signals(-code).name}{hint}"
        else:
            cause = f"ended with exit code {code}, see {self.console or 'above'}"
        state = "diverged" if run is not None and state_of(run) == "diverged" else "failed"
        return Outcome("refused" if code == errors.EXIT_CONFIG else state, textwrap.shorten(cause, LONGEST_CAUSE))


@functools.cache
def server() -> Any:
    """multiprocessing's way to start a process here: from a server that imports torch while this process goes on.

    It ends with this process, and its jobs save and end then. macOS kills forks of a process that has used its
    libraries: there a process imports torch itself.
    """
    if sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.sweeps.imports"])
    resource_tracker.ensure_running()  # it would unblock the server's signals
    path = os.environ.get("PYTHONPATH")
    folders = [str(ROOT / "src"), *filter(None, [path])]  # Python 3.11 does not tell the server its sys.path
    os.environ |= {LAUNCHER: str(os.getpid()), "PYTHONPATH": os.pathsep.join(folders)}
    with signals.blocked():  # the server reads how jobs end: Ctrl-C is not for it
        forkserver.ensure_running()
    del os.environ[LAUNCHER], os.environ["PYTHONPATH"]
    os.environ |= {} if path is None else {"PYTHONPATH": path}
    return context


def _become(job: Job, slot: Slot, console: Path | None) -> None:
    """Turn this process of the server into the command. Never returns."""
    signals.end_at_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
    end_with_parent()
    forget_multiprocessing_folder()  # the server listens there for the next jobs, too
    os.setsid()  # Ctrl-C is for the sweep, which passes it on
    os.environ[SWEEP] = str(job.folder.parent)
    if slot.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    if slot.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, slot.cores)
    held, deadline = HeldFolder(job.folder), time.monotonic() + LOCK_SECONDS
    while held.lock() is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    held.release()
    if console is not None:
        with console.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    sys.argv = [TRAIN, *job.words, f"hydra.run.dir={path_value(job.folder)}"]
    runpy.run_path(TRAIN, run_name="__main__")


def divide_machine(n_jobs: int | str, ranks: int | str) -> list[Slot]:
    """The slots of this machine. No core and no GPU is in two of them, if there are as many.

    n_jobs: how many, or auto: as many as have a core, or a GPU, for each rank of a job.
    ranks: of the largest job, or a word: gpu, cpu and auto take what a slot has.
    """
    import torch  # the jobs are no forks of this process

    cores = usable_cores()
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",")[:count] if named else list(map(str, range(count)))
    if isinstance(n_jobs, str):
        n_jobs = max(1, len(gpus or cores) // ranks) if isinstance(ranks, int) else 1
    if n_jobs == 1:
        return [Slot()]

    def share(units: list[Any], number: int) -> list[Any]:
        size = max(1, len(units) // n_jobs)  # what is left over belongs to none
        return units[number * size % len(units) :][:size] if units else []

    return [Slot(share(cores, number), share(gpus, number)) for number in range(n_jobs)]
