"""Runs the jobs of a sweep, in one or several slots, and keeps the table while they run."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from lockstep.distributed.run_folder import SWEEP_FOLDER
from lockstep.distributed.signal_relay import Relay
from lockstep.distributed.signals import blocked
from lockstep.errors import EXIT_RESUMABLE
from lockstep.runs.record import is_locked
from lockstep.sweeps.job_process import JobProcess, Outcome, Work, start_job
from lockstep.sweeps.search import Job, Search
from lockstep.sweeps.slots import Slot
from lockstep.sweeps.table import FAILED, FINISHED, RUNNING, STOPPED, SUBMITTED, SweepTable

POLL_SECONDS = 0.01
LOCK_SECONDS = 20.0  # for the ranks of a sweep that was killed to end


class SweepRunner:
    """max_failures: the sweep ends when so many jobs have failed in it. slots: how many jobs may run at once."""

    def __init__(
        self, table: SweepTable, search: Search, work: Work, max_failures: int | None, slots: Sequence[Slot] = (Slot(),)
    ) -> None:
        self.table, self.search, self.work = table, search, work
        self.max_failures, self.slots = max_failures, slots
        self.running: dict[int, JobProcess] = {}  # slot -> its job
        self.lines: dict[int, bytes] = {}  # slot -> the begin of a line that its job has printed
        self.failures = 0
        self.stop_code: int | None = None  # of the jobs that a signal has stopped

    def run(self) -> None:
        """Run what the search asks for until it has nothing more, or a signal stops the jobs."""
        with Relay() as relay:
            while self._fill(relay) or self.running:
                time.sleep(POLL_SECONDS)
                for slot, process in list(self.running.items()):
                    self._forward(process)
                    outcome = process.poll(self.table.folder / self.table.rows[process.job.number].folder)
                    if outcome is not None:
                        self._forward(process, to_end=True)
                        del self.running[slot]
                        self._record(process, outcome, asked=relay.first is not None)
            if relay.first is not None and self.stop_code is None:
                self.stop_code = EXIT_RESUMABLE  # it came between two jobs

    def _fill(self, relay: Relay) -> bool:
        """Start jobs in the free slots. Returns whether any was started."""
        started = False
        for number, slot in enumerate(self.slots):
            if number in self.running or relay.first is not None or self._is_hopeless():
                continue
            job = self.search.ask()
            if job is None:
                break
            self._start(job, number, slot, relay)
            started = True
        return started

    def _is_hopeless(self) -> bool:
        return self.max_failures is not None and self.failures >= self.max_failures

    def _start(self, job: Job, number: int, slot: Slot, relay: Relay) -> None:
        row = self.table.rows[job.number]
        folder = self.table.folder / row.folder
        deadline = time.monotonic() + LOCK_SECONDS
        while is_locked(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.table.update(job.number, state=RUNNING, cause="")
        captured = len(self.slots) > 1
        if not captured:
            print(f"sweep: {job.describe(row.overrides)}", flush=True)
        environment = slot.environment | {SWEEP_FOLDER: str(self.table.folder)}
        with blocked():
            process = start_job(job, lambda: self.work(job, row), number, environment, set(slot.cores), captured)
            self.running[number] = process
            if relay.first is None:
                relay.pids = [running.pid for running in self.running.values()]
            else:
                relay.start([process.pid])

    def _record(self, process: JobProcess, outcome: Outcome, asked: bool) -> None:
        job, state = process.job, outcome.state
        row = self.table.rows[job.number]
        if asked and state == FAILED and outcome.code < 0:
            state = STOPPED  # its launcher or a second signal has killed it
        cause = outcome.cause
        if state == FINISHED and outcome.objective is None:
            state, cause = RUNNING, SUBMITTED
        if state == STOPPED:
            self.stop_code = max(self.stop_code or 0, outcome.code if outcome.code > 0 else EXIT_RESUMABLE)
        self.failures += state == FAILED
        seconds = round(row.seconds + time.monotonic() - process.started, 2)
        best = self.table.read_best(job.number)
        self.table.update(job.number, state=state, objective=outcome.objective, seconds=seconds, cause=cause, **best)
        self.search.tell(job.number, outcome.objective if state == FINISHED else None)
        if process.output is not None:
            os.close(process.output)
            print(f"sweep: job {job.number} {row.state}, {row.overrides}", flush=True)

    def _forward(self, process: JobProcess, to_end: bool = False) -> None:
        """Print the whole lines that a job of several at once has printed, with its number before each."""
        if process.output is None:
            return
        text = self.lines.pop(process.slot, b"")
        with suppress(BlockingIOError):
            while chunk := os.read(process.output, 65536):
                text += chunk
        *lines, rest = text.split(b"\n")
        if to_end and rest:
            lines, rest = [*lines, rest], b""
        self.lines[process.slot] = rest
        for line in lines:
            print(f"[{process.job.number}] {line.decode(errors='replace')}", flush=True)
