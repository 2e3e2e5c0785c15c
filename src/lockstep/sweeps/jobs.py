"""Runs the jobs of a sweep. Each is the command that a person would type, in a process of its own.

The process is forked from a server that has imported torch and used it for nothing. No torch here.
"""

import functools
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any, Protocol

from lockstep import errors
from lockstep.compat import forget_multiprocessing_folder
from lockstep.distributed import signals
from lockstep.distributed.environment import SLURM_JOB_FILE
from lockstep.distributed.host import LAUNCHER, cpu_count, end_with_parent
from lockstep.distributed.run_folder import HeldFolder
from lockstep.errors import ConfigError, path_value
from lockstep.failures.report import Report, in_one_line, read_report
from lockstep.launchers.base import print_line
from lockstep.runs.record import SWEEP, Run, read_run, state_of
from lockstep.source_code import ROOT

TRAIN = str(ROOT / "src" / "train.py")
CONSOLE = "console.log"  # in a job's folder: what it prints, where several run at once
POLL_SECONDS = 0.2
LOCK_SECONDS = 20.0  # for the ranks of a sweep that was killed to end
REPORT_SECONDS = 3.0  # for the report of a hang, when the job has ended
LONGEST_CAUSE = 300  # characters
NO_SNAPSHOT = errors.EXIT_STOPPED_WITHOUT_SNAPSHOT
STOP_CODES = {errors.EXIT_RESUMABLE, NO_SNAPSHOT, *(128 + number for number in signals.STOP_SIGNALS)}


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
    """How a job ended. state: finished, submitted (to Slurm), pruned, stopped, refused, failed. cause: in one line."""

    state: str
    cause: str = ""
    run: Run | None = None

    @property
    def is_bad(self) -> bool:
        return self.state in ("failed", "refused")


class Jobs(Protocol):
    """Where jobs come from."""

    def next(self) -> Job | None:
        """The next one to start; None: there are no more."""

    def is_hopeless(self, job: Job) -> bool:
        """Asked of a running job again and again. True: it is stopped, and has been pruned."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A job has ended, and is not tried again."""


@dataclass(frozen=True)
class Slot:
    """What one job at a time may use. cores: empty for all. environment: such as CUDA_VISIBLE_DEVICES."""

    cores: frozenset[int] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)


def run_jobs(jobs: Jobs, slots: Sequence[Slot], retries: int, max_failures: float) -> int:
    """Run jobs, one at a time in each slot, until there are no more, a signal comes, or `max_failures` have failed.

    A job that fails is started again up to `retries` times, and goes on from its snapshot, unless it has diverged or
    was refused. Returns the exit code of the sweep.
    """
    free, running, failures, stop_code = list(slots), list[_Process](), 0, 0
    with signals.Relay() as relay:
        try:
            while True:
                is_over = bool(stop_code) or relay.first is not None or failures >= max_failures
                while free and not is_over and (job := jobs.next()) is not None:
                    running.append(_Process(job, free.pop(0), to_file=len(slots) > 1))
                relay.start([one.process.pid for one in running])
                if not running:
                    break
                connection.wait([one.process.sentinel for one in running], POLL_SECONDS)
                for one in list(running):
                    if one.process.exitcode is None:
                        if not one.is_pruned and jobs.is_hopeless(one.job):
                            one.is_pruned = one.stop()
                        continue
                    outcome = one.outcome(relay.first is not None)
                    diverged = outcome.run is not None and state_of(outcome.run) == "diverged"
                    if outcome.state == "failed" and not diverged and one.starts <= retries and not is_over:
                        print_line(f"sweep: {one.job.title} failed, and starts again: {outcome.cause}", sys.stdout)
                        one.start()
                        continue
                    running.remove(one)
                    free.append(one.slot)
                    failures += outcome.is_bad
                    if outcome.state == "stopped":  # no snapshot outweighs some
                        code = NO_SNAPSHOT if one.process.exitcode == NO_SNAPSHOT else errors.EXIT_RESUMABLE
                        stop_code = max(stop_code, code)
                    if len(slots) > 1 or outcome.state != "finished":
                        print_line(f"sweep: {one.job.title} {outcome.state} {outcome.cause}".rstrip(), sys.stdout)
                    jobs.ended(one.job, outcome)
        finally:  # an error ends the sweep: the jobs save, and end, too
            for one in running:
                one.stop()
            for one in running:
                one.process.join()
        if relay.first is not None and jobs.next() is not None:
            stop_code = stop_code or errors.EXIT_RESUMABLE
    return stop_code or (errors.EXIT_FAILED if failures else errors.EXIT_FINISHED)


class _Process:
    """A job that runs in `slot`. to_file: its output goes to CONSOLE."""

    def __init__(self, job: Job, slot: Slot, to_file: bool) -> None:
        self.job, self.slot, self.console = job, slot, job.folder / CONSOLE if to_file else None
        self.starts, self.is_pruned = 0, False
        self.start()

    def start(self) -> None:
        print_line(f"sweep: {self.job.title}", sys.stdout)
        (self.job.folder / SLURM_JOB_FILE).unlink(missing_ok=True)  # of an earlier command
        self.starts, self.started = self.starts + 1, time.time()
        self.process = server().Process(target=_become, args=(self.job, self.slot, self.console))
        with signals.blocked():
            self.process.start()

    def stop(self) -> bool:
        """Let it save and end."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        return True

    def outcome(self, is_stopping: bool) -> Outcome:
        """is_stopping: a signal was passed on to it."""
        run, code = self.job.run(), self.process.exitcode
        if code == errors.EXIT_FINISHED:
            return Outcome("submitted" if (self.job.folder / SLURM_JOB_FILE).exists() else "finished", run=run)
        if code in STOP_CODES or (is_stopping and code < 0):
            return Outcome("pruned" if self.is_pruned and not is_stopping else "stopped", run=run)
        cause = " ".join(self._cause(code).split())[:LONGEST_CAUSE]
        return Outcome("refused" if code == errors.EXIT_CONFIG else "failed", cause, run)

    def _cause(self, code: int) -> str:
        """From the failure report, or from what it has printed."""
        report = self._report(REPORT_SECONDS if code == errors.EXIT_HANG else 0.0)
        if report is not None and (code >= 0 or "verdict" in report["first"]):
            return in_one_line(report)
        if code < 0:  # this process knows by which signal
            hint = ", perhaps by the system because no memory was left" * (code == -signal.SIGKILL)
            return f"killed by {signal.Signals(-code).name}{hint}"
        if self.console is None or not self.console.exists():
            return f"ended with exit code {code}, see above"
        said = re.findall(r"^lockstep: (.*)", self.console.read_text(errors="replace"), re.MULTILINE)
        return str([f"ended with exit code {code}, see {self.console}", *said][-1])

    # until issue 46
    def _report(self, seconds: float) -> Report | None:
        """The failure report of this start. seconds: how long it may take to come."""
        deadline = time.monotonic() + seconds
        while (report := read_report(self.job.folder)) is None or report["run"]["time"] < self.started:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return report


# ---- The server that processes are forked from


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
    path = os.environ.get("PYTHONPATH")
    folders = [str(ROOT / "src"), *filter(None, [path])]  # Python 3.11 does not tell the server its sys.path
    os.environ |= {LAUNCHER: str(os.getpid()), "PYTHONPATH": os.pathsep.join(folders)}
    resource_tracker.ensure_running()  # it would unblock the signals
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
    os.environ |= {**slot.environment, SWEEP: str(job.folder.parent)}
    if slot.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, slot.cores)
    if console is not None:
        console.parent.mkdir(parents=True, exist_ok=True)
        with console.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    held, deadline = HeldFolder(job.folder), time.monotonic() + LOCK_SECONDS
    while held.lock() is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    held.release()
    sys.argv = [TRAIN, *job.words, f"hydra.run.dir={path_value(job.folder)}"]
    runpy.run_path(TRAIN, run_name="__main__")


# ---- Cores and GPUs


def divide_machine(n_jobs: int | str, ranks: int | str) -> list[Slot]:
    """The slots of this machine: no core and no GPU is in two of them.

    n_jobs: how many, or auto: as many as have a core, or a GPU, for each rank of a job.
    ranks: of the largest job, or a word: gpu, cpu and auto take what a slot has.
    Raises ConfigError if the slots need more GPUs or cores than there are.
    """
    gpus, cores = visible_gpus(), usable_cores()
    units, ranks_here = len(gpus) or len(cores), ranks if isinstance(ranks, int) else 1
    if isinstance(n_jobs, str):
        n_jobs = max(1, units // ranks) if isinstance(ranks, int) else 1
    if n_jobs == 1:
        return [Slot()]
    if n_jobs * ranks_here > units:
        each, what = f" of {ranks_here} ranks each" * (ranks_here > 1), "GPUs" if gpus else "cores"
        sentence = f"hydra.launcher.n_jobs={n_jobs}{each} is more than the {units} {what} of this machine"
        raise ConfigError(f"{sentence}; type hydra.launcher.n_jobs=auto")
    some, own = len(cores) // n_jobs, len(gpus) // n_jobs  # what is left over belongs to none
    starts = [(number * some, number * own) for number in range(n_jobs)]
    return [
        Slot(
            frozenset(cores[at : at + some]), {"CUDA_VISIBLE_DEVICES": ",".join(gpus[gpu : gpu + own])} if gpus else {}
        )
        for at, gpu in starts
    ]


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(cpu_count()))


def visible_gpus() -> list[str]:
    """The GPUs of NVIDIA that jobs may use. Without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    # CUDA counts those that it sees from 0, also in a container that has nvidia3 alone.
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
