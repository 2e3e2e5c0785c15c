"""A sweep: Hydra lists its jobs; here they are composed, checked, run, and shown at the end.

A job is a process that trains, as the command that a person would type.
"""

import gc
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lockstep import cli, errors
from lockstep.build import begin, preflight
from lockstep.config.check import check, check_nodes, with_own_arguments
from lockstep.config.record import ConfigRecord, config_flags, record_config, typed_overrides
from lockstep.config.schema import RunConfig
from lockstep.distributed import signals
from lockstep.distributed.host import end_with_parent, usable_cores
from lockstep.distributed.run_folder import lock, require_same_run
from lockstep.errors import ConfigError, path_value, print_line
from lockstep.failures.report import in_one_line, read_report
from lockstep.files import short_hash
from lockstep.modes.base import Parts
from lockstep.runs import record as records
from lockstep.runs.record import FINISHED, PAUSED, SWEEP, Run, find_runs, read_run, state_of
from lockstep.runs.table import of_sweep, rows_of

CONSOLE = "console.log"  # in a job's folder: what it prints, where several run at once
POLL_SECONDS = 0.2
LONGEST_NAME = 120  # characters of a job's folder

Slot = tuple[list[int], list[str]]  # the cores and the GPUs of one job at a time; empty for all


class Outcome(NamedTuple):
    """How a job ended. state: finished, pruned, stopped, refused, diverged, failed. cause: of the last three."""

    state: str
    cause: str = ""


@dataclass(eq=False)
class Job:
    """A training that has been composed and checked, and its process: a fork, which shares the imports and the checked
    config. macOS kills forks of a process that has used its libraries: there a job imports torch itself.
    folder: of its run. title: what it changes, for people."""

    folder: Path
    title: str
    config: RunConfig
    record: ConfigRecord
    parts: Parts
    starts, is_pruned = 0, False

    def start(self, slot: Slot, console: Path | None) -> None:
        """console: the file that gets its output."""
        self.slot, self.console, self.starts, self.started = slot, console, self.starts + 1, time.time()
        context: Any = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "fork")
        self.told, self.tells = context.Pipe(duplex=False)  # both stay open: without a sentence nothing is told
        words = (os.getpid(), replace(self), slot, console, self.tells)  # without its last process
        self.process = context.Process(target=_become, args=words)
        with signals.blocked():
            self.process.start()

    def run(self) -> Run | None:
        with suppress(ConfigError):
            return read_run(self.folder)
        return None

    def value(self) -> float | None:
        run = self.run()
        return None if run is None else records.best_of(run)[0]

    def outcome(self, is_stopping: bool) -> Outcome:
        """Of a process that has ended. is_stopping: a signal was passed on to it."""
        code, report, run = self.process.exitcode, read_report(self.folder), self.run()
        if code == errors.EXIT_FINISHED:
            return Outcome("finished")
        if code in errors.STOP_EXITS or (is_stopping and code < 0):
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
    os.environ[SWEEP] = str(job.folder.parent.absolute())
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    job.folder.mkdir(parents=True, exist_ok=True)  # for the console, and a script of Slurm
    if console is not None:
        with console.open("ab") as file:
            for output in (1, 2):
                os.dup2(file.fileno(), output)
    sys.argv = shlex.split(job.record.command)[1:]
    of_job: Any = OmegaConf.create({"hydra": {"overrides": {"task": [*job.record.overrides]}}})
    HydraConfig.instance().cfg = of_job  # for launch=slurm

    def train() -> None:  # as `main` of train.py, after its checks
        try:
            with errors.exits_are_failures("the command left before the training"):
                begin(job.config, job.parts)
                gc.enable()
                job.parts.launcher.launch(job.parts.mode.work, job.config, job.record, job.parts)
        except ConfigError as refusal:
            tells.send(str(refusal))
            raise

    cli.run(train)


def divide_machine(n_jobs: int) -> list[Slot]:
    """What each of the jobs at once may use. No core and no GPU is in two slots, if there are as many."""
    if n_jobs == 1:
        return [([], [])]
    count = torch.cuda.device_count()  # it asks NVML: a process that has started CUDA cannot fork
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]

    def share(units: list[Any], number: int) -> list[Any]:
        size = max(1, len(units) // n_jobs)  # what is left over belongs to none
        return units[number * size % len(units) :][:size] if units else []

    return [(share(usable_cores(), number), share(gpus, number)) for number in range(n_jobs)]


class Sweep:
    """The sweep of a command, which holds its folder until the process ends. master: its config, without the jobs.
    Raises ConfigError."""

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self.keys: Any = OmegaConf.to_container(master.hydra.launcher)
        check_nodes(self.keys, "hydra.launcher")
        self.loader, self.master, self.folder = loader, master, Path(str(master.hydra.sweep.dir))
        params = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
        parser = OverridesParser.create(config_loader=loader)
        self.overrides = parser.parse_overrides([*params, *typed_overrides(master.hydra)])
        swept = [one for one in self.overrides if one.is_sweep_override()]
        self.varied = sorted({one.get_key_element() for one in swept})
        self.lists = {one.get_key_element() for one in swept if one.is_discrete_sweep()}
        times = Counter(one.key_or_group for one in self.overrides)
        for one in swept:
            if not one.is_discrete_sweep() and master.hydra.sweeper._target_.endswith(".ListSweeper"):
                advice = "type hydra/sweeper=optuna hydra.sweeper.n_trials=20 for a search"
                raise ConfigError(f"{one.input_line} is no list of values; {advice}")
            if times[one.key_or_group] > 1 and "{" in str(one.input_line):
                what = f"{one.key_or_group} has lists of several keys twice, of which a sweep would drop one"
                raise ConfigError(f"{what}; type a list for each key, such as {one.key_or_group}.<key>=1,2")
        self.held = lock(self.folder, "sweep")
        self.known = [read_run(folder) for folder in find_runs([self.folder])]
        self.results = dict[Path, Outcome]()  # of jobs that have ended, by their folders

    def check(self, overrides: Sequence[str]) -> Job:
        """The job with these overrides. Raises ConfigError, with what it changes, where it would be refused."""
        changes = sorted(word for word in overrides if word.partition("=")[0] in self.varied)
        folder = self.folder / folder_name(changes)
        try:
            config, record = self._compose(overrides, folder)
            values = json.loads(json.dumps(record.shown, default=str))
            run = next((run for run in self.known if same_values(values, run["config"])), None)
            if run is not None and Path(run["folder"]) != folder:
                folder = Path(run["folder"])
                config, record = self._compose(overrides, folder)
            require_same_run(record, str(folder), "hydra.sweep.dir=<a new folder>")
            parts = preflight(config, starts=False)
        except Exception as error:
            if (known := cli.as_config_error(error)) is None:
                raise
            raise ConfigError(f"the job {' '.join(changes)}: {known}" if changes else str(known)) from error
        if run is not None and state_of(run) in (FINISHED, PAUSED):
            self.results[folder] = Outcome("finished")
        return Job(folder, " ".join(changes) or folder.name, config, record, parts)

    def _compose(self, overrides: Sequence[str], folder: Path) -> tuple[RunConfig, ConfigRecord]:
        """As `main` of train.py gets and checks them."""
        composed = self.loader.load_sweep_config(self.master, [*overrides])
        with read_write(composed), read_write(composed.hydra), open_dict(composed):
            composed.hydra.runtime.output_dir = str(folder.absolute())
            HydraConfig.instance().set_config(composed)  # its resolvers answer for this job
            del composed["hydra"]
        cfg = with_own_arguments(composed, overrides)
        config = check(cfg)
        argv = [sys.argv[0], *config_flags(sys.argv[1:]), *overrides, f"hydra.run.dir={path_value(folder)}"]
        return config, record_config(cfg, config, HydraConfig.get(), argv)

    def launch(self, lists: Iterable[Sequence[str]]) -> list[JobReturn]:
        """Run jobs for a sweeper of Hydra's. Raises ConfigError, before one starts, for one that cannot work."""
        jobs = [self.check(overrides) for overrides in lists]
        waiting = {job.folder: job for job in jobs if job.folder not in self.results}
        self.run(iter(waiting.values()), len(waiting))
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=job.value()) for job in jobs]

    def run(self, jobs: Iterator[Job], count: int) -> None:
        """Run at most `count` jobs, and show what all have given. Ends the command if not all have finished."""
        source = records.code_facts()["source"]
        others = sum(Path(run["folder"]) in self.results and run["code"].get("source") != source for run in self.known)
        said = f"sweep: {count} jobs, {self.keys['n_jobs']} at once; {len(self.results)} have finished before"
        said += f", {others} of them with other code: compare with care" * bool(others)
        print_line(f"{said}; in {self.folder}", sys.stdout)
        if count:  # imports once, and frozen: memory that is shared is copied when a collection writes to it
            import lockstep.launchers.rank_imports
            import lockstep.tasks.reports  # noqa: F401

            gc.freeze()
        code = self._run(jobs, count)
        states = Counter(outcome.state for outcome in self.results.values())
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        lines = [f"\nsweep: {counts or 'no job has ended'}, in {self.folder.absolute()}"]
        lines += of_sweep(rows_of([self.folder]), self.lists)
        bad = [(folder.name, outcome) for folder, outcome in self.results.items() if outcome.cause]
        lines += [f"{outcome.state + ':':12}{name}: {outcome.cause}" for name, outcome in bad]
        if code:
            words = [word for word in sys.argv if not word.startswith("hydra.sweep.dir=")]
            again = shlex.join(["python", *words, f"hydra.sweep.dir={path_value(self.folder)}"])
            lines.append(f"go on with: {again}")
        lines.append(f"curves:     {shlex.join(['tensorboard', '--logdir', str(self.folder.absolute())])}")
        for line in lines:
            print_line(line, sys.stdout)
        if code:
            raise SystemExit(code)

    def _run(self, jobs: Iterator[Job], count: int) -> int:
        """One job at a time in each slot, until there are no more, a signal comes, or too many have failed. One that
        fails is started again, and goes on from its snapshot. Returns the exit code."""
        free, running, limit = divide_machine(self.keys["n_jobs"]), list[Job](), self.keys["max_failures"] or math.inf
        numbered = enumerate(jobs, 1)
        with signals.Relay() as relay:
            while True:
                failures = sum(bool(outcome.cause) for outcome in self.results.values())
                stopped = any(outcome.state == "stopped" for outcome in self.results.values())
                is_over = stopped or relay.first is not None or failures >= limit
                for number, job in itertools.islice(numbered, 0 if is_over else len(free)):
                    print_line(f"sweep: job {number} of {count}, {job.title}", sys.stdout)
                    job.start(free.pop(0), job.folder / CONSOLE if self.keys["n_jobs"] > 1 else None)
                    running.append(job)
                if not running:
                    break
                relay.start([job.process.pid for job in running])
                connection.wait([job.process.sentinel for job in running], POLL_SECONDS)
                for job in list(running):
                    if job.process.exitcode is None:
                        if not job.is_pruned and self.is_hopeless(job):
                            job.is_pruned = True
                            relay.send(signal.SIGTERM, [job.process.pid])  # it saves, and ends
                        continue
                    outcome = job.outcome(relay.first is not None)
                    if outcome.state == "failed" and job.starts <= self.keys["retries"] and not is_over:
                        print_line(f"sweep: {job.title} failed, and starts again: {outcome.cause}", sys.stdout)
                        job.start(job.slot, job.console)
                        continue
                    running.remove(job)
                    free.append(job.slot)
                    del job.process, job.told, job.tells  # and their file descriptors: a sweep may have many jobs
                    print_line(f"sweep: {job.title} {outcome.state} {outcome.cause}".rstrip(), sys.stdout)
                    self.ended(job, outcome)
            if stopped or (relay.first is not None and next(numbered, None) is not None):
                return errors.EXIT_RESUMABLE
        return errors.EXIT_FAILED if failures else errors.EXIT_FINISHED

    def is_hopeless(self, job: Job) -> bool:
        """Asked of a running job again and again. True: it is stopped, and has been pruned."""
        return False

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A job has ended, and is not tried again."""
        self.results[job.folder] = outcome


def folder_name(changes: Sequence[str]) -> str:
    """A job's folder, safe for file systems and shells."""
    text = ",".join(word.lstrip("+") for word in changes) or "job"
    safe = re.sub(r"[^\w.,=+-]", "-", text, flags=re.ASCII)
    return text if safe == text and len(text) <= LONGEST_NAME else f"{safe[:LONGEST_NAME]}-{short_hash(text)[:8]}"


def same_values(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two runs compute the same. mine: flat values, of which null may wait for the data."""
    keys = [key for key in mine.keys() | theirs.keys() if not records.changes_no_number(key)]
    return all(mine.get(key, ...) in (theirs.get(key, ...), None, "balanced") for key in keys)
