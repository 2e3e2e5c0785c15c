"""What can be known of a rank that hangs: from /proc, its progress page, its stacks and torch's flight record.

All ranks of this machine are asked at the same time, and the answers are in after two seconds at most.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.monitor.hang_collectives import Record, parse_record
from lockstep.monitor.hang_stack import LOADERS, Frame, Stack, parse_stack
from lockstep.monitor.linux_processes import (
    children,
    handles_stack_signal,
    kernel_function,
    process_state,
    request_stack,
)
from lockstep.monitor.progress_page import COLLECTIVE, COLLECTIVES, NOBODY, STEP, VALUES, WAITS_FOR, ProgressPage
from lockstep.monitor.rank_probe import ASK
from lockstep.monitor.watched_rank import WatchedRank

ANSWER_SECONDS = 2.0  # for a rank's Python thread; one that holds the GIL never answers
SIGNAL_AFTER = 1.0  # seconds without an answer; the stack is then asked for by a signal
SHORTEST_SECONDS = 0.4  # to tell a rank that waits for the disk from one that just reads
PAUSE = 0.05
LARGEST_RECORD = 2**24  # bytes
MOST_WORKERS = 16  # loader workers of a rank that are asked for their stack, one after the other
WORKER_SECONDS = 0.5


@dataclass(frozen=True)
class SharedSum:
    """A sum through shared memory that has not ended. waits_for: a rank."""

    values: int
    waits_for: int | None

    def __str__(self) -> str:
        return f"shared-memory sum of {self.values:,} values"


@dataclass(frozen=True)
class RankFacts:
    """state: the letter in /proc/<pid>/stat, "" for no such process; D only if it was D each time. answers: whether
    its Python threads run, None if they cannot be asked. seconds: since its last progress. busy_worker: the pid of a
    process that it has started, such as a loader worker, and where that is in the user's code. kernel: where in the
    kernel it waits."""

    rank: int
    pid: int
    state: str
    phase: str
    step: int
    seconds: float
    answers: bool | None = None
    stack: Stack = field(default_factory=Stack)
    record: Record = field(default_factory=Record)
    shared_sum: SharedSum | None = None
    busy_worker: tuple[int, Frame] | None = None
    kernel: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks in a collective."""
        if self.shared_sum is not None:
            return self.stack.top is None or not self.stack.top.is_users
        has_unfinished = self.record.unfinished is not None or bool(self.record.point_to_point)
        return self.state != "R" and self.stack.waits_in_collective(has_unfinished)


class Examination:
    """The questions to one rank, and what has come back so far."""

    def __init__(self, watched: WatchedRank) -> None:
        self.watched, self.states, self.answer, self.asked, self.signalled = watched, "", b"", False, False
        self.stacks_before = _size(watched.stacks)
        if watched.asks is not None:
            os.set_blocking(watched.asks, False)
            with suppress(OSError):  # it has ended
                with suppress(BlockingIOError):
                    while os.read(watched.asks, 2**16):
                        pass  # an answer that came too late
                os.write(watched.asks, ASK)
                self.asked = True

    def look(self, waited: float) -> None:
        """Read the state, and what the rank has answered since the last call. waited: seconds since the first one."""
        if not self.signalled and not self.answer and (waited > SIGNAL_AFTER or not self.asked):
            self.signalled = True
            request_stack(self.watched.pid)
        self.states += process_state(self.watched.pid) or "-"
        if self.asked and self.watched.asks is not None:
            with suppress(OSError):
                while len(self.answer) < LARGEST_RECORD and (data := os.read(self.watched.asks, 2**16)):
                    self.answer += data

    @property
    def has_answered(self) -> bool:
        return self.answer.endswith(b"\n") and _size(self.watched.stacks) > self.stacks_before

    def facts(self, now: float) -> RankFacts:
        """Everything that is known of the rank now."""
        watched, page = self.watched, self.watched.page
        stack = parse_stack(_read(watched.stacks, self.stacks_before), watched.main_thread)
        is_disk = set(self.states) == {"D"}  # at some moments any rank that reads is in this state
        state = "D" if is_disk else max("SRTtZX-", key=self.states.count).replace("-", "")
        return RankFacts(
            rank=watched.rank,
            pid=watched.pid,
            state=state,
            phase=page.phase,
            step=page.get(STEP),
            seconds=now - page.last_progress,
            answers=self.answer.endswith(b"\n") if self.asked else None,
            stack=stack,
            record=parse_record(self.answer.decode(errors="replace")),
            shared_sum=_shared_sum(page),
            busy_worker=self._busy_worker() if stack.is_inside(LOADERS) else None,
            kernel=kernel_function(watched.pid) if state == "D" else "",
        )

    def _busy_worker(self) -> tuple[int, Frame] | None:
        """Ask the rank's loader workers for their stacks, one after the other: they write to the same file."""
        watched = self.watched
        for pid in children(watched.pid)[:MOST_WORKERS]:
            before = _size(watched.stacks)
            request_stack(pid)
            deadline = time.monotonic() + WORKER_SECONDS
            while _size(watched.stacks) == before and time.monotonic() < deadline and handles_stack_signal(pid):
                time.sleep(PAUSE / 5)
            time.sleep(PAUSE)  # until it is written whole
            users = parse_stack(_read(watched.stacks, before), watched.main_thread).users
            if users is not None:
                return pid, users
        return None


def gather(ranks: Sequence[WatchedRank]) -> list[RankFacts]:
    """The facts of all `ranks`. Takes 0.4 s, or 2 s and more if a rank does not answer."""
    examinations = [Examination(watched) for watched in ranks]
    start = time.monotonic()
    while True:
        time.sleep(PAUSE)
        waited = time.monotonic() - start
        for examination in examinations:
            examination.look(waited)
        answered = all(examination.has_answered for examination in examinations)
        if waited > ANSWER_SECONDS or (answered and waited > SHORTEST_SECONDS):
            now = time.monotonic()
            return [examination.facts(now) for examination in examinations]


def _shared_sum(page: ProgressPage) -> SharedSum | None:
    if not COLLECTIVES[page.get(COLLECTIVE)]:
        return None
    peer = page.get(WAITS_FOR)
    return SharedSum(page.get(VALUES), None if peer == NOBODY else peer)


def _size(file: int) -> int:
    return os.fstat(file).st_size


def _read(file: int, start: int) -> str:
    return os.pread(file, LARGEST_RECORD, start).decode(errors="replace")
