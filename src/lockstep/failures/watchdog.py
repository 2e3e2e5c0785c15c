"""Finds hangs: how long a silence must be, what can be known of the ranks then, and what is done about it.

The monitor calls `Watchdog.look` a few times a second. Silent ranks are examined in a thread: from /proc, their
progress pages, their stacks and torch's flight records. All ranks of this machine are asked at the same time, and the
answers are in after two seconds at most.
"""

import json
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from lockstep.failures.channel import NOBODY, STEP, STEP_ENDED_AT, STEPS_ENDED, SUM_VALUES, SUM_WAITS_FOR
from lockstep.failures.reporter import ASK
from lockstep.failures.verdict import LOADERS, Diagnosis, Kind, RankFacts, find_verdict, parse_stack
from lockstep.failures.watched_rank import WatchedRank, children, parent, process_state, request_stack
from lockstep.files import write_whole

SHORTEST_SILENCE = 120.0  # seconds that watch.timeout=null waits at least
MEDIAN_STEPS = 60  # and this many times the median step: a step that takes 50 times as long is only slow
BACKEND_SHARE = 0.8  # of backend.timeout: after it, the ranks' own errors hide the cause
REMEMBERED_STEPS = 101
# How many times longer other phases may be silent than training. "meeting" has a limit of its own.
PATIENCE = {"train": 1.0, "evaluation": 1.0, "prepare": 30.0, "disk": 30.0, "meeting": math.inf, "end": math.inf}
OTHER_PATIENCE = 10.0
FIRST_STEP_PATIENCE = 10.0  # imports, compilation, the start of loader workers
LOOKS = 10  # at ranks that are slow, or wait for another machine, in the time of one such limit
OWN_PAUSE = 5.0  # seconds between two checks, after which the monitor itself was stopped
PAUSE_SILENCE = 1.0  # seconds of silence after which it is checked whether all ranks are stopped
LEAVE_SECONDS = 0.5  # for a rank whose Python threads run to exit with the code of a hang

ANSWER_SECONDS = 2.0  # for a rank's Python thread; one that holds the GIL never answers
SIGNAL_AFTER = 1.0  # seconds without an answer; the stack is then asked for by a signal
SHORTEST_SECONDS = 0.4  # of an examination, to tell a rank that computes from one that waits
PAUSE = 0.05
LARGEST_RECORD = 2**24  # bytes
MOST_WORKERS = 16  # loader workers of a rank that are asked for their stack, one after the other
WORKER_SECONDS = 0.5


class Watchdog:
    """Looks at the ranks of this machine.

    timeout: watch.timeout, None for a multiple of the median step.
    on_hang: "stop" or "report".
    backend_timeout: seconds that ranks wait for each other.
    """

    def __init__(self, timeout: float | None, on_hang: str, backend_timeout: float) -> None:
        self.timeout, self.on_hang, self.backend_timeout = timeout, on_hang, backend_timeout
        self.steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)  # seconds of one step, a mean over each check
        self.seen: dict[int, tuple[int, float]] = {}  # of each pid: steps ended, and when the last one did
        self.last_check = 0.0
        self.ignored_until = 0.0  # silence before this moment does not count
        self.next_look = 0.0
        self.is_slow = False  # by the last verdict
        self.examination: threading.Thread | None = None
        self.facts: list[RankFacts] = []  # what it has found, nothing if it failed
        self.elsewhere: list[RankFacts] = []  # and what other machines have shown, if all ranks here wait for them
        self.reported: tuple[Kind, tuple[int, ...]] | None = None

    @property
    def is_examining(self) -> bool:
        """Whether a thread asks ranks now."""
        return self.examination is not None and self.examination.is_alive()

    def expect_new_ranks(self, now: float) -> None:
        """Other processes take the place of ranks. now: time.monotonic()."""
        self.reported, self.ignored_until = None, now  # the same hang of theirs is another one

    def look(self, ranks: Sequence[WatchedRank], run_dir: str | None) -> None:
        """With watch.on_hang=stop a hang is the failure of the rank that causes it. run_dir: for hang.txt."""
        living = [rank for rank in ranks if rank.is_alive and not rank.end_is_known and rank.is_visible]
        if not living:
            return
        diagnosis = self.check(living, int(living[0].hello["world_size"]), time.monotonic(), run_dir)
        if diagnosis is None:
            return
        lines = diagnosis.lines()
        if run_dir is not None:
            stacks = [f"rank {rank}:\n  " + "\n  ".join(frames) for rank, frames in diagnosis.stacks().items()]
            with suppress(OSError):
                Path(run_dir, "hang.txt").write_text("\n".join([*lines, "", *stacks]) + "\n")
        if self.on_hang == "report" or not diagnosis.is_certain:
            print("\n".join([f"{lines[0]}; the run is not ended", *lines[1:]]), file=sys.stderr, flush=True)
            return
        cause = next((rank for rank in living if rank.rank in diagnosis.verdict.ranks), living[0])
        cause.hangs(diagnosis.as_dict())
        for rank in living:
            rank.leave()
            for child in children(rank.pid):  # such as loader workers that hang with it
                if child != os.getpid():  # the first rank may have started the monitor
                    with suppress(OSError):
                        os.kill(child, signal.SIGKILL)
        threading.Timer(LEAVE_SECONDS, _kill, [living]).start()

    def check(
        self, ranks: Sequence[WatchedRank], world_size: int, now: float, run_dir: str | None = None
    ) -> Diagnosis | None:
        """The diagnosis of a new hang, None as long as there is none. now: time.monotonic().

        run_dir: where machines show each other what their ranks do.
        """
        for rank in ranks:
            steps, ended_at = rank.page.get(STEPS_ENDED), rank.page.get_time(STEP_ENDED_AT)
            before = self.seen.get(rank.pid)
            if before is not None and 0 < before[0] < steps:
                self.steps.append((ended_at - before[1]) / (steps - before[0]))
                self.reported = None
            self.seen[rank.pid] = steps, ended_at
        progress = max(rank.page.last_progress for rank in ranks)
        last = max(progress, self.ignored_until)
        was_stopped = now - self.last_check > OWN_PAUSE
        self.last_check = now
        if was_stopped or (now - last > PAUSE_SILENCE and _are_paused(ranks, world_size)):
            self.ignored_until = last = now  # Ctrl-Z
        if self.examination is not None:
            return None if self.examination.is_alive() else self._conclude(ranks, world_size, now, last)
        is_silent = now - last > self._limit(ranks, capped=True) or (self.is_slow and progress < self.ignored_until)
        if is_silent and now > self.next_look:
            self.facts, self.elsewhere = [], []
            asked = (list(ranks), world_size, run_dir)
            self.examination = threading.Thread(target=self._examine, args=asked, daemon=True)
            self.examination.start()
        return None

    def _limit(self, ranks: Sequence[WatchedRank], capped: bool) -> float:
        """Seconds of silence after which the ranks are examined. capped: while a rank waits for another one."""
        timeout = self.timeout
        if timeout is None:
            median = statistics.median(self.steps) if self.steps else 0.0
            timeout = max(SHORTEST_SILENCE, MEDIAN_STEPS * median)
        patience = max(PATIENCE.get(rank.page.phase, OTHER_PATIENCE) for rank in ranks)
        if not any(rank.page.get(STEPS_ENDED) for rank in ranks):  # a rank may serve others and end none itself
            patience = max(patience, FIRST_STEP_PATIENCE)
        limit = timeout * patience
        if capped and patience <= OTHER_PATIENCE:  # in the other phases no rank waits in a collective that ends then
            most = max(BACKEND_SHARE * self.backend_timeout, self.timeout or 0.0)
            limit = min(limit, most)  # never less than the user has typed
        return limit

    def _examine(self, ranks: Sequence[WatchedRank], world_size: int, run_dir: str | None) -> None:
        with suppress(OSError, ValueError):  # a rank was replaced in the meantime, or the run folder cannot be read
            self.facts = gather(ranks)
            if run_dir is not None and find_verdict(self.facts, world_size).kind is Kind.ELSEWHERE:
                self.elsewhere = exchange(run_dir, self.facts, ranks[0].clock_ahead)

    def _conclude(self, ranks: Sequence[WatchedRank], world_size: int, now: float, last: float) -> Diagnosis | None:
        self.examination = None
        silence, limit = now - last, self._limit(ranks, capped=True)
        self.next_look = now + limit
        if {facts.pid for facts in self.facts} != {rank.pid for rank in ranks}:
            return None
        facts = tuple(self.facts)
        verdict = find_verdict(facts, world_size)
        everywhere = (*self.facts, *self.elsewhere)
        if self.elsewhere and len(everywhere) == world_size:
            # The machine of the rank that is named ends the run and reports it.
            of_all = find_verdict(everywhere, world_size)
            if {rank.rank for rank in self.facts} & set(of_all.ranks):
                verdict, facts = of_all, everywhere
        self.is_slow = verdict.kind is Kind.SLOW
        if self.is_slow:  # silence counts from the end of a compilation, or of a debugger
            self.ignored_until, self.next_look = now, now + max(1.0, limit / LOOKS)
        if self.is_slow or silence < limit:
            return None
        if verdict.kind is Kind.ELSEWHERE:  # another machine may show more soon
            self.next_look = now + max(1.0, limit / LOOKS)
        longest = self._limit(ranks, capped=False)
        if not any(rank.is_waiting for rank in self.facts) and silence < longest:
            self.next_look = last + longest
            return None  # no rank's patience with another one ends
        if self.reported == (verdict.kind, verdict.ranks):
            return None
        self.reported = verdict.kind, verdict.ranks
        return Diagnosis(verdict, facts, silence)


def _kill(ranks: Sequence[WatchedRank]) -> None:
    for rank in ranks:
        rank.kill()


def _are_paused(ranks: Sequence[WatchedRank], world_size: int) -> bool:
    """Whether the run was stopped as a whole, as by Ctrl-Z, which stops the launcher, too.

    A machine cannot see by its own ranks alone whether those of other machines are stopped.
    """
    if not all(process_state(rank.pid) == "T" for rank in ranks):
        return False
    return len(ranks) == world_size or all(process_state(parent(rank.pid)) == "T" for rank in ranks)


class Examination:
    """The questions to one rank, and what has come back so far."""

    def __init__(self, watched: WatchedRank) -> None:
        self.watched, self.states, self.answer, self.asked, self.signalled = watched, "", b"", False, False
        self.children_run = False
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
        self.children_run |= any(process_state(child) == "R" for child in children(self.watched.pid))
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
        stacks, peer = _read(watched.stacks, self.stacks_before), page.get(SUM_WAITS_FOR)
        return RankFacts(
            rank=watched.rank,
            pid=watched.pid,
            state=max("SRDTtZX-", key=self.states.count).replace("-", ""),
            phase=page.phase,
            step=page.get(STEP),
            seconds=now - page.last_progress,
            children_run=self.children_run,
            answers=self.answer.endswith(b"\n") if self.asked else None,
            stacks=stacks,
            main_thread=watched.main_thread,
            records=self.answer.decode(errors="replace"),
            sum_values=page.get(SUM_VALUES),
            sum_waits_for=None if peer == NOBODY else peer,
            worker=self._busy_worker() if parse_stack(stacks, watched.main_thread).is_inside(LOADERS) else None,
        )

    def _busy_worker(self) -> tuple[int, str] | None:
        """The first loader worker that is in the user's code, and its stacks.

        They are asked one after the other: they write to the same file.
        """
        watched = self.watched
        for pid in children(watched.pid)[:MOST_WORKERS]:
            before, deadline = _size(watched.stacks), time.monotonic() + WORKER_SECONDS
            if not request_stack(pid):
                continue
            while _size(watched.stacks) == before and time.monotonic() < deadline:
                time.sleep(PAUSE / 5)
            time.sleep(PAUSE)  # until it is written whole
            stacks = _read(watched.stacks, before)
            if parse_stack(stacks, watched.main_thread).users is not None:
                return pid, stacks
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


def exchange(run_dir: str, mine: Sequence[RankFacts], clock_ahead: float) -> list[RankFacts]:
    """Show `mine`, the facts of this machine's ranks, in the run folder, which machines share.

    Returns what other machines have shown since these ranks fell silent. clock_ahead: seconds from the clock of rank
    0's machine to this machine's. Raises OSError, ValueError. A network file system may not answer for long, so call
    this in a thread.
    """
    now = time.time() - clock_ahead
    folder = Path(run_dir, "logs")
    own = folder / f"hang_of_rank{mine[0].rank}.json"
    write_whole(own, json.dumps({"time": now, "ranks": [asdict(rank) for rank in mine]}), sync=False)
    silent_since = now - min(rank.seconds for rank in mine)
    others: list[RankFacts] = []
    for path in set(folder.glob("hang_of_rank*.json")) - {own}:
        shown = json.loads(path.read_text())
        if shown["time"] >= silent_since:  # else it is of an earlier hang
            others += [RankFacts(**values | {"worker": None}) for values in shown["ranks"]]
    return others


def _size(file: int) -> int:
    return os.fstat(file).st_size


def _read(file: int, start: int) -> str:
    return os.pread(file, LARGEST_RECORD, start).decode(errors="replace")
