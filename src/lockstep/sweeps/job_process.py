"""A job of a sweep in a process of its own, forked from the sweep's parent: it has imported torch and not used it."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.distributed import signals
from lockstep.distributed.environment import SLURM_JOB_FILE
from lockstep.distributed.host import end_with_parent
from lockstep.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HANG,
    EXIT_RESUMABLE,
    EXIT_STOPPED_WITHOUT_SNAPSHOT,
)
from lockstep.failures.report import RAISED_BY_ALL, read_report
from lockstep.sweeps.search import Job
from lockstep.sweeps.table import FAILED, FINISHED, REFUSED, RUNNING, STOPPED, SUBMITTED, WAITING, Row, SweepTable

LONGEST_CAUSE = 300  # characters
REPORT_SECONDS = 3.0  # for the monitor to write the report of a hang
STOP_CODES = {EXIT_RESUMABLE, EXIT_STOPPED_WITHOUT_SNAPSHOT, *(128 + number for number in signals.STOP_SIGNALS)}


@dataclass(frozen=True)
class Outcome:
    """How a job ended. code: its exit code, negative for the signal that killed it. cause: one line, empty if none.

    refused: its config is wrong, so it would fail again. rank_is_missing: a rank did not come to the rendezvous.
    """

    code: int
    objective: float | None = None
    cause: str = ""
    refused: bool = False
    rank_is_missing: bool = False

    @property
    def state(self) -> str:
        if self.code == EXIT_FINISHED:
            return FINISHED
        return STOPPED if self.code in STOP_CODES else FAILED

    @property
    def stop_code(self) -> int:
        """The exit code of a sweep that a signal ends in this job, which may have had nothing to save yet."""
        return EXIT_STOPPED_WITHOUT_SNAPSHOT if self.code == EXIT_STOPPED_WITHOUT_SNAPSHOT else EXIT_RESUMABLE


turns: list[int] = []  # in a job that has not had its turn: the pipe on which it waits


def wait_for_turn() -> None:
    """In a job of a sweep: wait until the job before it has ended. Code of the user's must not run earlier: two
    processes at once could disturb each other. A second call does nothing.
    """
    if turns:
        is_asked = os.read(turns[0], 1)
        os.close(turns.pop())
        if not is_asked:  # the sweep was killed
            os._exit(EXIT_FAILED)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)


Work = Callable[[Job, Row], Outcome]
"""Runs a job in this process, prints its errors, and says how it ended."""


@dataclass
class JobProcess:
    """A job that runs, or that is ready to. output: the read end of what it prints, None if it prints to this process's
    own streams. turn: the end of a pipe that `begin` writes to.
    """

    job: Job
    pid: int
    results: int
    output: int | None
    slot: int
    turn: int
    started: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """It is the job's turn: it may train."""
        self.started = time.monotonic()
        with suppress(BrokenPipeError):  # it has ended already
            os.write(self.turn, b"1")
        os.close(self.turn)

    def discard(self) -> None:
        """End a job whose turn does not come."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def stop(self) -> None:
        """Let the job save and end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, whatever became of it."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # `poll` has seen its end
            return True

    def poll(self, run_dir: Path) -> Outcome | None:
        """How the job ended, None while it runs. run_dir: its run folder."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        outcome = self._sent(code)
        os.close(self.results)
        cause = outcome.cause
        if outcome.state == FAILED:
            cause = self._reported(run_dir, code) or cause or _end_in_words(code)
        return replace(outcome, cause=" ".join(cause.split())[:LONGEST_CAUSE])

    @property
    def started_at(self) -> float:
        """By the clock of the wall."""
        return time.time() - (time.monotonic() - self.started)

    def _reported(self, run_dir: Path, code: int) -> str:
        """What the failure report says. That of a hang is written when the job has ended."""
        deadline = time.monotonic() + (REPORT_SECONDS if code == EXIT_HANG else 0.0)
        cause = reported_cause(run_dir, self.started_at, was_killed=code < 0)
        while not cause and time.monotonic() < deadline:
            time.sleep(0.01)
            cause = reported_cause(run_dir, self.started_at)
        return cause

    def _sent(self, code: int) -> Outcome:
        with suppress(BlockingIOError, ValueError):
            return Outcome(**json.loads(os.read(self.results, 65536)) | {"code": code})
        return Outcome(code)


def record_outcome(table: SweepTable, number: int, outcome: Outcome, state: str, seconds: float) -> Row:
    """Write how a job ended to its row, which is returned. seconds: of this life of the job."""
    row = table.rows[number]
    cause = f"{REFUSED}{outcome.cause}" if outcome.refused else outcome.cause
    if state == FINISHED and outcome.objective is None:
        is_submitted = (table.folder / row.folder / SLURM_JOB_FILE).exists()
        state, cause = (RUNNING, SUBMITTED) if is_submitted else (WAITING, "nothing was trained or submitted")
    seconds = round(row.seconds + seconds, 2)
    values: dict[str, Any] = {"state": state, "objective": outcome.objective, "cause": cause[:LONGEST_CAUSE]}
    return table.update(number, seconds=seconds, **values, **table.read_best(number))


def start_job(
    job: Job, work: Callable[[], Outcome], slot: int, environment: Mapping[str, str], cores: set[int], captured: bool
) -> JobProcess:
    """Fork a process that runs `work()`, which composes the job and waits in `wait_for_turn` until `JobProcess.begin`.

    Signals must be blocked here; the job listens to them itself when its turn has come.

    environment: added to its own. cores: those that it may use, empty for all. captured: read what it prints.
    """
    reader, writer = os.pipe()
    turn, begin = os.pipe()
    output, stream = os.pipe() if captured else (None, None)
    for text in (sys.stdout, sys.stderr):
        text.flush()
    pid = os.fork()
    if pid == 0:
        os.close(begin)
        if stream is not None:
            os.dup2(stream, 1)
            os.dup2(stream, 2)
        _become(work, writer, turn, environment, cores)
    os.close(writer)
    os.close(turn)
    os.set_blocking(reader, False)
    if stream is not None and output is not None:
        os.close(stream)
        os.set_blocking(output, False)
    return JobProcess(job, pid, reader, output, slot, begin)


def _become(
    work: Callable[[], Outcome], results: int, turn: int, environment: Mapping[str, str], cores: set[int]
) -> None:
    """Turn this forked process into the job. Never returns."""
    code = EXIT_FAILED
    turns.append(turn)
    try:
        signals.end_at_signals()
        end_with_parent()
        os.environ.update(environment)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        outcome = work()
        code = outcome.code
        os.write(results, json.dumps(asdict(replace(outcome, cause=outcome.cause[:LONGEST_CAUSE]))).encode())
    finally:
        for text in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                text.flush()
        os._exit(code)


def reported_cause(run_dir: Path, since: float, was_killed: bool = False) -> str:
    """What a failure report in the run folder says, in one line. Empty without one newer than `since`.

    was_killed: this process knows by which signal, and the report does not; only the verdict on a hang is better.
    """
    report = read_report(run_dir)
    if report is None or report["run"]["time"] < since or (was_killed and "verdict" not in report["first"]):
        return ""
    return cause_in_words(report)


def cause_in_words(report: Mapping[str, Any]) -> str:
    """One line of what failure.json holds: "rank 1 of 2: RuntimeError: mat1 and mat2 ..." """
    first = report["first"]
    if first["kind"] in RAISED_BY_ALL:
        return str(first["message"])
    what = f"hangs: {first['verdict']}" if "verdict" in first else str(first.get("signal") or first["kind"])
    if first["kind"] == "killed":
        what = f"{what}: {first['meaning']}"
    if "type" in first:
        what = f"{first['type']}: {next(iter(first['message'].splitlines()), '')}"
    return f"rank {first['rank']} of {report['world_size']}: {what}"


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    number = signal.Signals(-code)
    hint = ", perhaps by the system because no memory was left" if number == signal.SIGKILL else ""
    return f"killed by {number.name}{hint}"
