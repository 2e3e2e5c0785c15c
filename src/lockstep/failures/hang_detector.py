"""Finds hangs: how long a silence must be, what can be known of the ranks then, and what is done about it.

The monitor calls `HangDetector.look` a few times a second. Silent ranks are examined from /proc, their progress pages,
their stacks and torch's flight records. All ranks of this machine are asked at the same time, and the answers are in
after two seconds, or later where a rank's loader has many workers; the monitor does nothing else meanwhile.
"""

import math
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.failures.channel import STEP, STEP_ENDED_AT, STEPS_ENDED, SUM_VALUES
from lockstep.failures.monitored_rank import MonitoredRank, children, parent, process_state, request_stack
from lockstep.failures.verdict import LOADERS, Diagnosis, Kind, RankFacts, find_verdict, parse_stack

SHORTEST_SILENCE = 120.0  # seconds that watch.timeout=null waits at least
MEDIAN_STEPS = 60  # and this many times the median step: a step that takes 50 times as long is only slow
BACKEND_SHARE = 0.8  # of backend.timeout: after it, the ranks' own errors hide the cause
REMEMBERED_STEPS = 101
# How many times longer other phases may be silent than training. "meeting" has a limit of its own.
PATIENCE = {"train": 1.0, "evaluation": 1.0, "prepare": 30.0, "disk": 30.0, "meeting": math.inf, "end": math.inf}
OTHER_PATIENCE = 10.0
FIRST_STEP_PATIENCE = 10.0  # imports, compilation, the start of loader workers
OWN_PAUSE = 5.0  # seconds between two looks, after which the monitor itself was stopped
PAUSE_SILENCE = 1.0  # seconds of silence after which it is checked whether all ranks are stopped

PROBE_SECONDS = 2.0  # for a rank's Python thread; one that holds the GIL never answers
SIGNAL_AFTER = 1.0  # seconds without an answer; the stack is then asked for by a signal
SHORTEST_SECONDS = 0.4  # of an examination, to tell a rank that computes from one that waits
PAUSE = 0.05
MOST_WORKERS = 16  # loader workers of a rank that are asked for their stack, one after the other
WORKER_SECONDS = 0.5


class HangDetector:
    """Looks at the ranks of this machine.

    timeout: watch.timeout, None for a multiple of the median step.
    on_hang: "stop" or "report".
    backend_timeout: seconds that ranks wait for each other.
    """

    def __init__(self, timeout: float | None, on_hang: str, backend_timeout: float) -> None:
        self.timeout, self.on_hang, self.backend_timeout = timeout, on_hang, backend_timeout
        self.steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)  # seconds of one step, a mean over each look
        self.seen: dict[int, tuple[int, float]] = {}  # of each pid: steps ended, and when the last one did
        self.last_look = 0.0
        self.ignored_until = 0.0  # silence before this moment does not count
        self.next_examination = 0.0
        self.reported: tuple[bool, Kind, tuple[int, ...]] | None = None  # whether it was slow, and the verdict

    def look(self, ranks: Sequence[MonitoredRank], run_dir: str | None) -> None:
        """With watch.on_hang=stop a hang is the failure of the rank that causes it, if the diagnosis is certain.

        run_dir: for hang.txt.
        """
        living = [rank for rank in ranks if not rank.end_is_known]
        if not living or self.silence(living, time.monotonic()) is None:
            return
        diagnosis = self.examine(living)
        self.last_look = time.monotonic()  # the examination was no pause
        if diagnosis is None:
            return
        lines = diagnosis.lines()
        if run_dir is not None:
            stacks = [f"rank {rank}:\n  " + "\n  ".join(frames) for rank, frames in diagnosis.stacks().items()]
            with suppress(OSError), Path(run_dir, "hang.txt").open("a") as file:  # other machines write there, too
                file.write("\n".join([*lines, "", *stacks]) + "\n")
        if self.on_hang == "report" or not diagnosis.is_certain:
            print("\n".join([f"{lines[0]}; the run is not ended", *lines[1:]]), file=sys.stderr, flush=True)
            return
        cause = next((rank for rank in living if rank.rank in diagnosis.verdict.ranks), living[0])
        cause.hangs(diagnosis.as_dict())
        for rank in living:
            rank.leave()
            for child in children(rank.pid):  # a program that it waits for would go on without it
                if child != os.getpid():  # the first rank may have started the monitor
                    with suppress(OSError):
                        os.kill(child, signal.SIGKILL)

    def silence(self, ranks: Sequence[MonitoredRank], now: float) -> float | None:
        """Seconds since the last progress of any rank, if so many are to be explained. now: time.monotonic()."""
        for rank in ranks:
            steps, ended_at = rank.page.get(STEPS_ENDED), rank.page.get_time(STEP_ENDED_AT)
            before = self.seen.get(rank.pid)
            if before is not None and 0 < before[0] < steps:
                self.steps.append((ended_at - before[1]) / (steps - before[0]))
                self.reported = None
            self.seen[rank.pid] = steps, ended_at
        is_paused = now - self.last_look > OWN_PAUSE
        self.last_look = now
        silence = now - max(self.ignored_until, *(rank.page.last_progress for rank in ranks))
        if silence > PAUSE_SILENCE and all(process_state(rank.pid) == "T" for rank in ranks):
            # Ctrl-Z stops the launcher, too, and the ranks of other machines cannot be seen from here.
            are_all = len(ranks) == ranks[0].hello["world_size"]
            is_paused |= are_all or all(process_state(parent(rank.pid)) == "T" for rank in ranks)
        if is_paused:
            self.ignored_until = now
            return None
        return silence if silence > self.limit(ranks, True, 1.0) and now > self.next_examination else None

    def limit(self, ranks: Sequence[MonitoredRank], capped: bool, first_step: float = FIRST_STEP_PATIENCE) -> float:
        """Seconds of silence that are no hang. capped: while a rank waits for another one.

        first_step: how many times longer it may take; 1 for when a line says where it is, and the run goes on.
        """
        timeout = self.timeout
        if timeout is None:
            median = statistics.median(self.steps) if self.steps else 0.0
            timeout = max(SHORTEST_SILENCE, MEDIAN_STEPS * median)
        patience = max(PATIENCE.get(rank.page.phase, OTHER_PATIENCE) for rank in ranks)
        if not any(rank.page.get(STEPS_ENDED) for rank in ranks):  # a rank may serve others and end none itself
            patience = max(patience, first_step)
        if capped and patience <= OTHER_PATIENCE:  # in the other phases no rank waits in a collective that ends then
            # Never less than the user has typed.
            return min(timeout * patience, max(BACKEND_SHARE * self.backend_timeout, self.timeout or 0.0))
        return timeout * patience

    def examine(self, ranks: Sequence[MonitoredRank]) -> Diagnosis | None:
        """The diagnosis of a new hang, None if there is none, and of slow ranks a line. Takes up to a few seconds."""
        facts = tuple(gather(ranks))
        verdict = find_verdict(facts, int(ranks[0].hello["world_size"]))
        now, limit = time.monotonic(), self.limit(ranks, capped=True)
        progress = max(rank.page.last_progress for rank in ranks)
        silence = now - max(self.ignored_until, progress)
        self.next_examination = now + (limit - silence if silence < limit else limit)
        if silence < self.limit(ranks, True, 1.0):  # a rank has made progress meanwhile
            return None
        is_slow = verdict.kind is Kind.SLOW
        if is_slow:  # silence counts from the end of a compilation, or of a debugger
            self.ignored_until = now
        if not any(rank.is_waiting for rank in facts):  # no rank's patience with another one ends
            limit = self.limit(ranks, capped=False)
        is_slow = is_slow or silence < limit
        if self.reported == (is_slow, verdict.kind, verdict.ranks):
            return None
        self.reported = is_slow, verdict.kind, verdict.ranks
        if is_slow:
            text = f"lockstep: no rank has made progress for {now - progress:.0f} s, and the run goes on"
            print(f"{text}: {verdict.meaning}", file=sys.stderr, flush=True)
            return None
        return Diagnosis(verdict, facts, silence)


def gather(ranks: Sequence[MonitoredRank]) -> list[RankFacts]:
    """The facts of all `ranks`. Takes 0.4 s, or 2 s and more if a rank does not answer."""
    stacks_before = {rank.pid: rank.stacks_size() for rank in ranks}
    states, answers = dict.fromkeys(stacks_before, ""), dict.fromkeys(stacks_before, b"")
    with_busy_child: set[int] = set()
    for rank in ranks:
        rank.probe()
    start, waited, has_signalled, is_complete = time.monotonic(), 0.0, False, False
    while waited < (SHORTEST_SECONDS if is_complete else PROBE_SECONDS):
        time.sleep(PAUSE)
        waited = time.monotonic() - start
        for rank in ranks:
            states[rank.pid] += process_state(rank.pid) or "-"
            answers[rank.pid] += rank.read_answer()
            if any(process_state(child) == "R" for child in children(rank.pid)):
                with_busy_child.add(rank.pid)
        unanswered = [pid for pid, answer in answers.items() if not answer.endswith(b"\n")]
        if unanswered and not has_signalled and waited > SIGNAL_AFTER:
            has_signalled = True
            for pid in unanswered:
                request_stack(pid)
        is_complete = not unanswered
    now, facts = time.monotonic(), []
    for rank in ranks:
        stacks = rank.read_stacks(stacks_before[rank.pid])
        facts.append(
            RankFacts(
                rank=rank.rank,
                pid=rank.pid,
                state=max("SRDTtZX-", key=states[rank.pid].count).replace("-", ""),
                phase=rank.page.phase,
                step=rank.page.get(STEP),
                seconds=now - rank.page.last_progress,
                children_run=rank.pid in with_busy_child,
                stacks=stacks,
                main_thread=rank.main_thread,
                records=answers[rank.pid].decode(errors="replace"),
                sum_values=rank.page.get(SUM_VALUES),
                worker=_busy_worker(rank) if parse_stack(stacks, rank.main_thread).is_inside(LOADERS) else None,
            )
        )
    return facts


def _busy_worker(rank: MonitoredRank) -> tuple[int, str] | None:
    """The first loader worker that is in the user's code, and its stacks.

    They are asked one after the other: they write to the same file.
    """
    for pid in children(rank.pid)[:MOST_WORKERS]:
        before, deadline = rank.stacks_size(), time.monotonic() + WORKER_SECONDS
        if not request_stack(pid):
            continue
        while rank.stacks_size() == before and time.monotonic() < deadline:
            time.sleep(PAUSE / 5)
        time.sleep(PAUSE)  # until it is written whole
        stacks = rank.read_stacks(before)
        if parse_stack(stacks, rank.main_thread).users is not None:
            return pid, stacks
    return None
