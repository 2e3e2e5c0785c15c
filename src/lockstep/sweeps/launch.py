"""A sweep: Hydra lists its jobs; here they are composed, checked, run, and shown at the end.

A job is a process that trains, as the command that a person would type.
"""

import gc
import importlib
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
from dataclasses import dataclass
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
from lockstep.compat import with_values
from lockstep.config.check import check, check_nodes, key_of, with_own_arguments
from lockstep.config.record import ConfigRecord, config_flags, record_config, typed_overrides
from lockstep.config.schema import RunConfig
from lockstep.distributed import signals
from lockstep.distributed.host import end_with_parent, usable_cores
from lockstep.distributed.run_folder import lock, require_same_run
from lockstep.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, ConfigError, path_value, print_line
from lockstep.failures.report import in_one_line, read_report
from lockstep.files import short_hash
from lockstep.modes.base import Parts
from lockstep.runs import record as records
from lockstep.runs.record import FINISHED, PAUSED, SWEEP, Run, find_runs, read_run, state_of
from lockstep.runs.table import choosing, is_repeat, rows_of, settings, show, telling

SHARED = ("launchers.rank_imports", "modes.train", "tasks.reports")  # what each job needs
CONSOLE = "console.log"  # in a job's folder: what it prints, where several run at once
POLL_SECONDS = 0.2
LONGEST_NAME = 120  # characters of a job's folder

Slot = tuple[list[int], list[str]]  # the cores and the GPUs of one job at a time; empty for all


@dataclass(frozen=True)
class Job:
    """A training that has been composed and checked. folder: of its run. title: what it changes, for people."""

    folder: Path
    title: str
    config: RunConfig
    record: ConfigRecord
    parts: Parts

    def run(self) -> Run | None:
        with suppress(errors.ConfigError):
            return read_run(self.folder)
        return None

    def value(self) -> float | None:
        run = self.run()
        return None if run is None else records.best_of(run)[0]


class Outcome(NamedTuple):
    """How a job ended. state: finished, pruned, stopped, refused, diverged, failed. cause: of the last three."""

    state: str
    cause: str = ""


class Process:
    """A job that runs in `slot`. to_file: its output goes to CONSOLE.
    It is a fork, and so it shares the imports and the checked config. macOS kills forks of a process that has used its
    libraries: there a job imports torch itself."""

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

    def train() -> None:  # as `main` of train.py, after its checks
        try:
            with errors.exits_are_failures("the command left before the training"):
                begin(job.config, job.parts)
                job.folder.mkdir(parents=True, exist_ok=True)  # for a script of Slurm
                gc.enable()
                job.parts.launcher.launch(job.parts.mode.work, job.config, job.record, job.parts)
        except errors.ConfigError as refusal:
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
        self.parser = OverridesParser.create(config_loader=loader)
        self.overrides = self.parser.parse_overrides([*params, *typed_overrides(master.hydra)])
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
        self.composed = dict[tuple[str, ...], DictConfig]()  # by the words that Hydra must compose

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
        """As `main` of train.py gets and checks them. Hydra composes once for all jobs that differ in values alone."""
        parsed = self.parser.parse_overrides([*overrides])
        others = tuple(word for word in overrides if "." not in key_of(word) and key_of(word) != "seed")
        if others not in self.composed:
            self.composed[others] = self.loader.load_sweep_config(self.master, [*others])
        values = [one for one, word in zip(parsed, overrides, strict=True) if word not in others]
        composed = with_values(self.composed[others], values, parsed)
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
        source, self.count = records.code_facts()["source"], count
        others = sum(Path(run["folder"]) in self.results and run["code"].get("source") != source for run in self.known)
        said = f"sweep: {count} jobs, {self.keys['n_jobs']} at once; {len(self.results)} have finished before"
        said += f", {others} of them with other code: compare with care" * bool(others)
        print_line(f"{said}; in {self.folder}", sys.stdout)
        if count:  # imports once, and frozen: memory that is shared is copied when a collection writes to it
            gc.disable()
            for name in SHARED:
                importlib.import_module(f"lockstep.{name}")
            records.versions()  # are kept, too
            gc.freeze()
            gc.enable()
        code = self._run(jobs)
        # The table of runs, the best one, what choosing costs, and what to type.
        states = Counter(outcome.state for outcome in self.results.values())
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        lines = [f"\nsweep: {counts or 'no job has ended'}, in {self.folder.absolute()}"]
        if table := settings(rows_of([self.folder])):
            keys = [key for key in (key.lstrip("+") for key in self.varied) if key in table[0]]
            columns = ["state", "objective", "test", "best_step", "seconds", *keys, "source", "run"]
            lines += show(table, telling(table, columns))
            own = [key for key in keys if not is_repeat(key)]
            if table[0]["count"] and own and len({row["metric"] for row in table}) == 1:
                of_lists = [key for key in own if key in self.lists and is_at_edge([row.get(key) for row in table])]
                edges = "".join(f"; {key} is at the edge of its list" for key in of_lists)
                lines.append(f"best:       {', '.join(f'{key}={table[0][key]}' for key in own)}{edges}")
            lines += [f"choosing:   {text}" for text in [choosing(table)] if text]
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

    def _run(self, jobs: Iterator[Job]) -> int:
        """One job at a time in each slot, until there are no more, a signal comes, or too many have failed. One that
        fails is started again, and goes on from its snapshot. Returns the exit code."""
        n_jobs, limit = self.keys["n_jobs"], self.keys["max_failures"] or math.inf
        free, running, failures, stopped = divide_machine(n_jobs), list[Process](), 0, False
        number = itertools.count(1)
        with signals.Relay() as relay:
            while True:
                is_over = stopped or relay.first is not None or failures >= limit
                while free and not is_over and (job := next(jobs, None)) is not None:
                    print_line(f"sweep: job {next(number)} of {self.count}, {job.title}", sys.stdout)
                    running.append(Process(job, free.pop(0), to_file=n_jobs > 1))
                if not running:
                    break
                relay.start([one.process.pid for one in running])
                connection.wait([one.process.sentinel for one in running], POLL_SECONDS)
                for one in list(running):
                    if one.process.exitcode is None:
                        if not one.is_pruned and self.is_hopeless(one.job):
                            one.is_pruned = True
                            relay.send(signal.SIGTERM, [one.process.pid])  # it saves, and ends
                        continue
                    outcome = one.outcome(relay.first is not None)
                    if outcome.state == "failed" and one.starts <= self.keys["retries"] and not is_over:
                        print_line(f"sweep: {one.job.title} failed, and starts again: {outcome.cause}", sys.stdout)
                        one.start()
                        continue
                    running.remove(one)
                    free.append(one.slot)
                    failures += bool(outcome.cause)
                    stopped |= outcome.state == "stopped"
                    print_line(f"sweep: {one.job.title} {outcome.state} {outcome.cause}".rstrip(), sys.stdout)
                    self.ended(one.job, outcome)
            if stopped or (relay.first is not None and next(jobs, None) is not None):
                return EXIT_RESUMABLE
        return EXIT_FAILED if failures else EXIT_FINISHED

    def is_hopeless(self, job: Job) -> bool:
        """Asked of a running job again and again. True: it is stopped, and has been pruned."""
        return False

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A job has ended, and is not tried again."""
        self.results[job.folder] = outcome


def is_at_edge(values: Sequence[Any]) -> bool:
    """Whether the best of these values, the first, is the least or greatest: a better one may lie beyond it."""
    numbers = {one for one in values if isinstance(one, int | float) and not isinstance(one, bool)}
    return len(numbers) > 2 and values[0] in (min(numbers), max(numbers))


def folder_name(changes: Sequence[str]) -> str:
    """A job's folder, safe for file systems and shells."""
    text = ",".join(word.lstrip("+") for word in changes) or "job"
    safe = re.sub(r"[^\w.,=+-]", "-", text, flags=re.ASCII)
    return text if safe == text and len(text) <= LONGEST_NAME else f"{safe[:LONGEST_NAME]}-{short_hash(text)[:8]}"


def same_values(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two runs compute the same. mine: flat values, of which null may wait for the data."""
    keys = [key for key in mine.keys() | theirs.keys() if not records.changes_no_number(key)]
    return all(mine.get(key, ...) in (theirs.get(key, ...), None, "balanced") for key in keys)
