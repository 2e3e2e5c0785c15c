"""A job of a sweep in a process of its own, and how a machine is divided between jobs that run at once.

The process is forked from the sweep's parent, which has imported torch and not used it. No torch here.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import TypeVar

from lockstep.distributed import signals
from lockstep.distributed.host import cpu_count, end_with_parent, remove_temporary_folder
from lockstep.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HANG,
    EXIT_RESUMABLE,
    EXIT_STOPPED_WITHOUT_SNAPSHOT,
    ConfigError,
)
from lockstep.failures.processes import open_pid_file
from lockstep.sweeps.search import Job
from lockstep.sweeps.table import FAILED, FINISHED, STOPPED, Row, reported_cause

LONGEST_CAUSE = 300  # characters
POLL_SECONDS = 0.05  # where the end of a process cannot be waited for together with its output
REPORT_SECONDS = 3.0  # for the monitor to write the report of a hang, when the job has ended
STOP_CODES = {EXIT_RESUMABLE, EXIT_STOPPED_WITHOUT_SNAPSHOT, *(128 + number for number in signals.STOP_SIGNALS)}
Item = TypeVar("Item")


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    code: its exit code, negative for the signal that killed it.
    cause: one line, empty if none.
    refused: its config is wrong, so it would fail again.
    rank_is_missing: a rank did not come to the rendezvous.
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


Work = Callable[[Job, Row], Outcome]
"""Runs a job in this process, prints its errors, and says how it ended."""


@dataclass
class JobProcess:
    """A job that runs.

    results: the read end of the pipe on which it sends its outcome.
    output: the read end of what it prints, None if it prints to this process's own streams.
    pid_file: see `open_pid_file`.
    """

    job: Job
    slot: int
    pid: int
    results: int
    output: int | None
    pid_file: int | None
    started: float = field(default_factory=time.time)

    def stop(self) -> None:
        """Let the job save and end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def read(self) -> bytes:
        """A part of what it has printed. The output is closed where it ends. Raises BlockingIOError if none is left."""
        assert self.output is not None
        text = os.read(self.output, 65536)
        if not text:
            self.close_output()
        return text

    def close_output(self) -> None:
        if self.output is not None:
            os.close(self.output)
            self.output = None

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal that killed the job; None while it runs. Its end is seen once."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        if self.pid_file is not None:
            os.close(self.pid_file)
        return os.waitstatus_to_exitcode(status)

    def outcome(self, run_dir: Path, code: int) -> Outcome:
        """How the job ended with this exit code. run_dir: its run folder."""
        outcome = Outcome(code)
        with suppress(BlockingIOError, ValueError):
            outcome = Outcome(**json.loads(os.read(self.results, 65536)) | {"code": code})
        os.close(self.results)
        cause = outcome.cause
        if outcome.state == FAILED:
            reported = reported_cause(run_dir, self.started, was_killed=code < 0)
            deadline = time.monotonic() + (REPORT_SECONDS if code == EXIT_HANG else 0.0)
            while not reported and time.monotonic() < deadline:
                time.sleep(0.01)
                reported = reported_cause(run_dir, self.started)
            cause = reported or cause or _end_in_words(code)
        return replace(outcome, cause=" ".join(cause.split())[:LONGEST_CAUSE])


def wait_for_any(processes: Sequence[JobProcess]) -> None:
    """Wait until one of them prints something or ends."""
    outputs = [process.output for process in processes if process.output is not None]
    ends = [process.pid_file for process in processes if process.pid_file is not None]
    connection.wait([*outputs, *ends], None if len(ends) == len(processes) else POLL_SECONDS)


def start_job(
    job: Job, work: Callable[[], Outcome], slot: int, environment: Mapping[str, str], cores: set[int], captured: bool
) -> JobProcess:
    """Fork a process that runs `work()`, which composes the job.

    Signals must be blocked here; the job unblocks them when it listens to them itself.

    environment: added to its own.
    cores: those that it may use, empty for all.
    captured: read what it prints.
    """
    reader, writer = os.pipe()
    output, stream = os.pipe() if captured else (None, None)
    for text in (sys.stdout, sys.stderr):
        text.flush()
    pid = os.fork()
    if pid == 0:
        if stream is not None:
            os.dup2(stream, 1)
            os.dup2(stream, 2)
        _become(work, writer, environment, cores)
    os.close(writer)
    os.set_blocking(reader, False)
    if stream is not None and output is not None:
        os.close(stream)
        os.set_blocking(output, False)
    return JobProcess(job, slot, pid, reader, output, open_pid_file(pid))


def _become(work: Callable[[], Outcome], results: int, environment: Mapping[str, str], cores: set[int]) -> None:
    """Turn this forked process into the job. Never returns."""
    code = EXIT_FAILED
    try:
        signals.end_at_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
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
        remove_temporary_folder()
        os._exit(code)


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    number = signal.Signals(-code)
    hint = ", perhaps by the system because no memory was left" if number == signal.SIGKILL else ""
    return f"killed by {number.name}{hint}"


@dataclass(frozen=True)
class Slot:
    """What one job at a time may use. cores: empty for all. environment: such as CUDA_VISIBLE_DEVICES."""

    cores: frozenset[int] = frozenset()
    environment: dict[str, str] = field(default_factory=dict)


def divide_machine(slots: int | str, ranks: int | str) -> list[Slot]:
    """The slots of this machine: no core and no GPU is in two of them.

    slots: how many, or auto: as many as have a core, or a GPU, for each rank of a job.
    ranks: of the largest job, or a word: gpu, cpu and auto take what a slot has.
    Raises ConfigError if the slots need more GPUs or cores than there are.
    """
    gpus, cores = visible_gpus(), usable_cores()
    units = len(gpus) or len(cores)
    ranks_here = ranks if isinstance(ranks, int) else 1
    if slots == "auto":
        slots = max(1, units // ranks) if isinstance(ranks, int) else 1
    assert isinstance(slots, int)
    if slots == 1:
        return [Slot()]
    if slots * ranks_here > units:
        what = "GPUs" if gpus else "cores"
        wanted = f"{slots} of {ranks_here} ranks each" if ranks_here > 1 else slots
        raise ConfigError(
            f"sweep.slots={wanted} is more than the {units} {what} of this machine; type sweep.slots=auto"
        )
    return [
        Slot(
            frozenset(_share(cores, slots, number)),
            {"CUDA_VISIBLE_DEVICES": ",".join(_share(gpus, slots, number))} if gpus else {},
        )
        for number in range(slots)
    ]


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; macOS has no affinity
        return sorted(os.sched_getaffinity(0))
    return list(range(cpu_count()))


def visible_gpus() -> list[str]:
    """The GPUs of NVIDIA that jobs may use. Without torch: a process that has asked CUDA must not fork."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    # CUDA counts those that it sees from 0, also in a container that has nvidia3 alone.
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _share(items: Sequence[Item], parts: int, number: int) -> Sequence[Item]:
    """The part with this number of `parts` equal parts; what is left over belongs to none."""
    size = len(items) // parts
    return items[number * size : (number + 1) * size]
