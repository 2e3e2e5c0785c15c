"""Runs the jobs of a sweep, in processes of their own or in ranks that are there, and keeps its table meanwhile."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.distributed import signals
from lockstep.distributed.environment import SLURM_JOB_FILE, read_rank_info
from lockstep.distributed.run_folder import SWEEP_RESUME
from lockstep.errors import EXIT_FINISHED, EXIT_RESUMABLE
from lockstep.failures.report import typed_command
from lockstep.runs.record import is_locked
from lockstep.sweeps.process import LONGEST_CAUSE, JobProcess, Outcome, Slot, Work, start_job, wait_for_any
from lockstep.sweeps.search import Search, SweepSettings
from lockstep.sweeps.summary import exit_code, print_summary, say
from lockstep.sweeps.table import (
    FAILED,
    FINISHED,
    REFUSED,
    RUNNING,
    STOPPED,
    SUBMITTED,
    WAITING,
    Row,
    SweepTable,
    lock_sweep,
    write_sweep_record,
)

LOCK_SECONDS = 20.0  # for the ranks of a sweep that was killed to end
LEFT = "left"  # key in the store: how many ranks have


class Screen:
    """Shows the output of jobs that run at once: whole lines with a job's number before each."""

    def __init__(self) -> None:
        self.rests: dict[int, bytes] = {}  # job -> the begin of a line that it has printed

    def forward(self, process: JobProcess, to_end: bool = False) -> None:
        """Show what the job has printed since the last call. to_end: it has ended."""
        if process.output is None and not to_end:
            return
        number = process.job.number
        text = self.rests.pop(number, b"")
        with suppress(BlockingIOError):
            while process.output is not None:
                text += process.read()
        *lines, rest = text.split(b"\n")
        if to_end:
            process.close_output()  # a process of the job's may still hold the other end
            lines, rest = [*lines, *filter(None, [rest])], b""
        self.rests[number] = rest
        for line in lines:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]  # a carriage return goes back to the line's begin
            say(f"[{number}] {shown.decode(errors='replace')}")


class OpenSweep:
    """A sweep while it runs: its folder is locked, `sweep.json` is checked, and its table is open.

    fixed: the words of each job's command.
    config: the flat config of a job without what the sweep varies.
    modules: {module: hash} of the user's modules that the jobs import.
    words: of this command, without flags.
    Raises ConfigError if the folder cannot be locked, or if its sweep is another one.
    """

    def __init__(
        self,
        folder: Path,
        settings: SweepSettings,
        fixed: Sequence[str],
        config: Mapping[str, Any],
        modules: dict[str, str],
        words: Sequence[str],
    ) -> None:
        self.settings, self.fixed = settings, fixed
        self.lock = lock_sweep(folder)
        self.table = SweepTable(folder, words)
        write_sweep_record(folder, sys.argv[1:], config, modules, settings.changes == "accept")
        self.table.note_killed()
        self.stop_code: int | None = None  # of the jobs that a signal has kept from their end
        self.failures = 0  # jobs that have failed in this command

    @property
    def is_hopeless(self) -> bool:
        """Whether `sweep.max_failures` jobs have failed."""
        return self.settings.max_failures is not None and self.failures >= self.settings.max_failures

    @property
    def starts_no_more(self) -> bool:
        """Whether no other job is to be started."""
        return self.stop_code is not None or self.is_hopeless

    def note_stop(self, code: int = EXIT_RESUMABLE) -> None:
        """A signal keeps jobs from their start or end. code: of the one that ended; no snapshot outweighs some."""
        self.stop_code = max(self.stop_code or 0, code)

    def begin(self, number: int) -> Row:
        """Write that a job runs, once nobody holds its folder any more. Returns its row."""
        folder = self.table.folder / self.table.rows[number].folder
        deadline = time.monotonic() + LOCK_SECONDS
        while is_locked(folder) and time.monotonic() < deadline:  # by the ranks of a sweep that was killed
            time.sleep(0.1)
        (folder / SLURM_JOB_FILE).unlink(missing_ok=True)  # of an earlier start
        return self.table.update(number, state=RUNNING, cause="")

    def record(self, number: int, outcome: Outcome, state: str, seconds: float) -> Row:
        """Write how a job ended to its row, which is returned. seconds: of this life of the job."""
        row = self.table.rows[number]
        cause = f"{REFUSED}{outcome.cause}" if outcome.refused else outcome.cause
        has_trained = (self.table.folder / row.folder / "run.json").exists()  # without a validation set
        if state == FINISHED and outcome.objective is None and not has_trained:
            is_submitted = (self.table.folder / row.folder / SLURM_JOB_FILE).exists()
            state, cause = (RUNNING, SUBMITTED) if is_submitted else (WAITING, "nothing was trained or submitted")
        self.failures += state == FAILED
        return self.table.update(
            number,
            state=state,
            objective=outcome.objective,
            cause=cause[:LONGEST_CAUSE],
            seconds=round(row.seconds + seconds, 2),
            **self.table.read_results(number),
        )

    def finish(self) -> int:
        """Print the summary. Returns the exit code."""
        signals.stop_listening()  # the sweep is over, and nothing is left to save
        words = typed_command(read_rank_info().started_by)
        script = words[: 1 + next((index for index, word in enumerate(words) if word.endswith("train.py")), 1)]
        resume = [*script, "-m", *self.table.resume]
        print_summary(self.table, self.settings.objective, self.settings.mode, [*script, *self.fixed], resume)
        return exit_code(list(self.table), self.stop_code)


class SweepRunner:
    """Counts in `sweep` the jobs that fail, and ends at its `max_failures`. slots: how many jobs may run at once."""

    def __init__(self, sweep: OpenSweep, search: Search, work: Work, slots: Sequence[Slot]) -> None:
        self.sweep, self.table = sweep, sweep.table
        self.search, self.work, self.slots = search, work, slots
        self.running: dict[int, JobProcess] = {}  # slot -> its job
        self.screen = Screen()
        self.was_stopped = False  # by a signal, which may have come when all jobs had ended

    def run(self) -> None:
        """Run what the search asks for until it has nothing more, or a signal stops the jobs.

        Raises ConfigError if the table cannot be written. No job is left then.
        """
        with signals.Relay() as relay:
            try:
                self._fill(relay)
                while self.running:
                    for process, code in self._wait():
                        self._record(process, code, relay)
                    self._fill(relay)
            finally:  # if an error ends the sweep, jobs still run: they save, and end, too
                for process in self.running.values():
                    process.stop()
                while self.running:
                    self._wait()
            self.was_stopped = relay.first is not None

    def _wait(self) -> list[tuple[JobProcess, int]]:
        """Wait until a job prints something or ends. Returns those that have ended, with their exit codes."""
        wait_for_any(list(self.running.values()))
        ended = []
        for slot, process in list(self.running.items()):
            code = process.exit_code()
            self.screen.forward(process, to_end=code is not None)
            if code is not None:
                del self.running[slot]
                ended.append((process, code))
        return ended

    def _fill(self, relay: signals.Relay) -> None:
        """Start jobs in the free slots; none after a signal."""
        for number, slot in enumerate(self.slots):
            if number in self.running:
                continue
            job = None if self.sweep.starts_no_more else self.search.ask()
            if job is None:
                break
            if relay.first is not None:
                self.sweep.note_stop()
                break
            row = self.sweep.begin(job.number)
            environment = slot.environment | {SWEEP_RESUME: shlex.join(self.table.resume)}
            captured = len(self.slots) > 1
            if not captured:
                say(f"sweep: job {job.number}, {row.overrides or 'no override'}")
            with signals.blocked():
                work = partial(self.work, job, row)
                self.running[number] = start_job(job, work, number, environment, set(slot.cores), captured)
                relay.start(self._pids())

    def _pids(self) -> list[int]:
        return [process.pid for process in self.running.values()]

    def _record(self, process: JobProcess, code: int, relay: signals.Relay) -> None:
        relay.start(self._pids())  # another process may get the number of this one
        job = process.job
        outcome = process.outcome(self.table.folder / self.table.rows[job.number].folder, code)
        state = outcome.state
        if relay.first is not None and state == FAILED and code < 0:
            state = STOPPED  # its launcher or a second signal has killed it
        row = self.sweep.record(job.number, outcome, state, time.time() - process.started)
        if row.state == STOPPED:
            self.sweep.note_stop(outcome.stop_code)
        if len(self.slots) > 1:
            say(f"sweep: job {job.number} {row.state}, {row.overrides}")


class JobFailed(Exception):
    """What a sweeper of Hydra's raises to end at a job that has failed. The row of the job has the cause."""


class _Command:
    """What is left to do at the end of a command with -m. Hydra returns nothing, so the sweep leaves it here.

    finish: prints the summary, and returns the exit code. The same after a sweeper of Hydra's as after this project's.
    nothing_finished: a sweeper of Hydra's has got its jobs' results, and all jobs of the sweep have failed.
    """

    finish: Callable[[], int] | None = None
    nothing_finished = False


_command = _Command()


def at_end(finish: Callable[[], int]) -> None:
    """Call `finish` at the end of this command. It returns the exit code."""
    _command.finish = finish


def end_sweep() -> int:
    """Print the summary of the sweep that this command has run. Returns the exit code; 0 if it has run none."""
    finish, _command.finish = _command.finish, None
    return finish() if finish else EXIT_FINISHED


def sweeper_goes_on(nothing_finished: bool) -> None:
    """A sweeper of Hydra's gets the results of its jobs. nothing_finished: all jobs of the sweep have failed."""
    _command.nothing_finished = nothing_finished


def run_command(main: Callable[[], Any]) -> int:
    """Call a hydra.main function that runs a sweep, and print the summary. Returns the exit code.

    An error with which a sweeper of Hydra's ends at failed jobs is dropped, for the summary tells more. Optuna raises
    one of its own where no job has finished: there is no best one.
    """
    try:
        main()
    except JobFailed:
        pass
    except Exception as error:
        if not _command.nothing_finished:
            raise
        say(f"sweep: no job has finished, and the sweeper ends with {type(error).__name__}: {error}")
    return end_sweep()
