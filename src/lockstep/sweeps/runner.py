"""Runs the jobs of a sweep, in one or several slots, and keeps the table while they run."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from lockstep.distributed.run_folder import SWEEP_FOLDER
from lockstep.distributed.signals import Relay, blocked
from lockstep.errors import EXIT_RESUMABLE
from lockstep.sweeps.folder import wait_for_lock
from lockstep.sweeps.job_process import JobProcess, Outcome, Work, record_outcome, start_job
from lockstep.sweeps.output import show
from lockstep.sweeps.screen import Screen
from lockstep.sweeps.search import Search
from lockstep.sweeps.slots import Slot
from lockstep.sweeps.sweep import OpenSweep
from lockstep.sweeps.table import FAILED, FINISHED, RUNNING, STOPPED

POLL_SECONDS = 0.005


class SweepRunner:
    """Counts in `sweep` the jobs that fail, and ends at its `max_failures`. slots: how many jobs may run at once."""

    def __init__(self, sweep: OpenSweep, search: Search, work: Work, slots: Sequence[Slot]) -> None:
        self.sweep, self.table = sweep, sweep.table
        self.search, self.work, self.slots = search, work, slots
        self.running: dict[int, JobProcess] = {}  # slot -> its job
        self.screen = Screen()
        self.ready: JobProcess | None = None  # the next job, which waits for its turn
        self.was_stopped = False  # by a signal, which may have come when all jobs had ended

    def run(self) -> None:
        """Run what the search asks for until it has nothing more, or a signal stops the jobs.

        Raises ConfigError if the table cannot be written. No job is left then.
        """
        with Relay() as relay:
            try:
                while self._fill(relay) or self.running:
                    time.sleep(POLL_SECONDS)
                    self._poll(relay)
            finally:
                self._end_jobs()
            self.was_stopped = relay.first is not None
            if self.was_stopped and self.sweep.stop_code is None:
                is_more_to_run = self.ready is not None or self.search.ask() is not None
                self.sweep.stop_code = EXIT_RESUMABLE if is_more_to_run else None  # the signal came between two jobs

    def _poll(self, relay: Relay) -> None:
        """Show what the jobs print, and record those that have ended."""
        for slot, process in list(self.running.items()):
            self.screen.forward(process)
            outcome = process.poll(self.table.folder / self.table.rows[process.job.number].folder)
            if outcome is not None:
                self.screen.forward(process, to_end=True)
                del self.running[slot]
                relay.pids = self._pids()  # another process may get the number of this one
                self._record(process, outcome, asked=relay.first is not None)

    def _end_jobs(self) -> None:
        """End the job that is ready. If an error ends the sweep, jobs still run: they save, and end, too."""
        for process in self.running.values():
            process.stop()
        while self.running:
            time.sleep(POLL_SECONDS)
            for slot, process in list(self.running.items()):
                ended = process.has_ended
                self.screen.forward(process, to_end=ended)  # a job whose output nobody reads would wait
                if ended:
                    del self.running[slot]
        if self.ready is not None:
            self.ready.discard()
            with suppress(OSError):  # a job that goes on has files there
                (self.table.folder / self.table.rows[self.ready.job.number].folder).rmdir()

    def _fill(self, relay: Relay) -> bool:
        """Start jobs in the free slots. Returns whether any was started."""
        started = False
        for number in range(len(self.slots)):
            if number in self.running or relay.first is not None or self.sweep.is_hopeless:
                continue
            self.ready = self.ready or self._prepare(number)
            if self.ready is None:
                break
            self._start(self.ready, relay)
            self.ready = None
            started = True
        if started and len(self.slots) == 1:  # with more of them the cores have work already
            self.ready = self._prepare(0)
        return started

    def _prepare(self, number: int) -> JobProcess | None:
        """The next job, which prepares itself and waits for its turn. None if the search has none now."""
        job = self.search.ask()
        if job is None:
            return None
        row, slot = self.table.rows[job.number], self.slots[number]
        environment = slot.environment | {SWEEP_FOLDER: str(self.table.folder)}
        captured = len(self.slots) > 1
        if captured:
            environment |= self.screen.environment
        with blocked():
            return start_job(job, lambda: self.work(job, row), number, environment, set(slot.cores), captured)

    def _start(self, process: JobProcess, relay: Relay) -> None:
        row = self.table.rows[process.job.number]
        wait_for_lock(self.table.folder / row.folder)
        self.table.update(process.job.number, state=RUNNING, cause="")
        if process.output is None:
            show(f"sweep: {process.job.describe(row.overrides)}")
        with blocked():
            self.running[process.slot] = process
            if relay.first is None:
                relay.pids = self._pids()
            else:
                relay.start([process.pid])
        process.begin()

    def _pids(self) -> list[int]:
        return [process.pid for process in self.running.values()]

    def _record(self, process: JobProcess, outcome: Outcome, asked: bool) -> None:
        job, state = process.job, outcome.state
        if asked and state == FAILED and outcome.code < 0:
            state = STOPPED  # its launcher or a second signal has killed it
        row = record_outcome(self.table, job.number, outcome, state, time.monotonic() - process.started)
        if row.state == STOPPED:
            self.sweep.stop_code = max(self.sweep.stop_code or 0, outcome.stop_code)
        self.sweep.failures += row.state == FAILED
        self.search.tell(job.number, row.objective if row.state == FINISHED else None)
        if process.output is not None:
            os.close(process.output)
            self.screen.show([f"sweep: job {job.number} {row.state}, {row.overrides}"])
