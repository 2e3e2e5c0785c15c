"""A job of a sweep: the command that a person would type, in a process of its own.

No torch at the top.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from lockstep import errors
from lockstep.distributed import signals
from lockstep.distributed.host import end_with_parent, usable_cores
from lockstep.errors import ConfigError, path_value
from lockstep.failures.report import in_one_line, read_report
from lockstep.runs.record import SWEEP, Run, best_of, read_run, state_of, versions
from lockstep.source_code import ROOT

TRAIN = str(ROOT / "src" / "train.py")
SHARED = ("lockstep.launchers.rank_imports", "lockstep.modes.train", "lockstep.tasks.reports", "tqdm.contrib.logging")
CONSOLE = "console.log"  # in a job's folder: what it prints, where several run at once
STOPPED = {errors.EXIT_RESUMABLE, errors.EXIT_STOPPED_WITHOUT_SNAPSHOT, *(128 + one for one in signals.STOP_SIGNALS)}


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

    def value(self) -> float | None:
        """Its best number, None if there is none."""
        run = self.run()
        return None if run is None else best_of(run)[0]


@dataclass(frozen=True)
class Outcome:
    """How a job ended. state: finished, pruned, stopped, refused, diverged, failed. cause: of the last three."""

    state: str
    cause: str = ""


Slot = tuple[list[int], list[str]]
"""The cores and the GPUs that one job at a time may use; empty for all."""


class Process:
    """A job that runs in `slot`. to_file: its output goes to CONSOLE.

    It is a fork of this process, as the ranks of launch=fork are: it shares the imports and the checks. macOS kills
    forks of a process that has used its libraries: there a job imports torch itself.
    """

    def __init__(self, job: Job, slot: Slot, to_file: bool) -> None:
        self.job, self.slot, self.console = job, slot, job.folder / CONSOLE if to_file else None
        self.starts, self.is_pruned = 0, False
        self.start()

    def start(self) -> None:
        for name in SHARED:
            importlib.import_module(name)
        versions()  # are kept, too
        self.starts, self.started = self.starts + 1, time.time()
        context: Any = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "fork")
        self.process = context.Process(target=_become, args=(self.job, self.slot, self.console))
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
        elif code < 0:  # this process knows by which signal
            cause = f"killed by {signal.Signals(-code).name}, perhaps because no memory was left"
        state = "diverged" if run is not None and state_of(run) == "diverged" else "failed"
        return Outcome("refused" if code == errors.EXIT_CONFIG else state, textwrap.shorten(cause, 300))


def _become(job: Job, slot: Slot, console: Path | None) -> None:
    """Turn this process into the command. Never returns."""
    signals.end_at_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
    sweep: Any = multiprocessing.parent_process()
    end_with_parent(parent=sweep.pid)
    GlobalHydra.instance().clear()  # of the sweep
    HydraConfig.instance().cfg = None
    os.setsid()  # Ctrl-C is for the sweep, which passes it on
    os.environ[SWEEP] = str(job.folder.parent)
    cores, gpus = slot
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if console is not None:
        console.parent.mkdir(parents=True, exist_ok=True)
        with console.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    sys.argv = [TRAIN, *job.words, f"hydra.run.dir={path_value(job.folder)}"]
    runpy.run_path(TRAIN, run_name="__main__")


def divide_machine(n_jobs: int) -> list[Slot]:
    """What each of the jobs at once may use. No core and no GPU is in two slots, if there are as many."""
    if n_jobs == 1:
        return [([], [])]
    import torch  # device_count asks NVML: a process that has started CUDA cannot fork

    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",")[:count] if named else list(map(str, range(count)))

    def share(units: list[Any], number: int) -> list[Any]:
        size = max(1, len(units) // n_jobs)  # what is left over belongs to none
        return units[number * size % len(units) :][:size] if units else []

    return [(share(usable_cores(), number), share(gpus, number)) for number in range(n_jobs)]
