"""When the ranks of a machine are examined, how long a silence must be to be a hang, and what is done about one."""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.monitor.hang_evidence import RankFacts, gather
from lockstep.monitor.hang_machines import exchange
from lockstep.monitor.hang_rules import different_calls, find_verdict
from lockstep.monitor.hang_verdict import Diagnosis, Kind, Verdict
from lockstep.monitor.linux_processes import kill_children, parent, process_state
from lockstep.monitor.progress_page import STEPS_ENDED
from lockstep.monitor.watched_rank import WatchedRank

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


@dataclass(frozen=True)
class HangRules:
    """timeout: watch.timeout, None for a multiple of the median step. on_hang: "stop" or "report"."""

    timeout: float | None
    on_hang: str
    backend_timeout: float


class HangDetector:
    """Finds hangs. The monitor calls `check` a few times a second; a thread asks the ranks, if they are silent."""

    def __init__(self, rules: HangRules) -> None:
        self.rules = rules
        self.steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)  # seconds of one step, a mean over each check
        self.seen: dict[int, tuple[int, float]] = {}  # of each pid: steps ended, and when the last one did
        self.last_check = 0.0
        self.ignored_until = 0.0  # silence before this moment does not count
        self.next_look = 0.0
        self.is_slow = False  # by the last verdict
        self.examination: threading.Thread | None = None
        self.found: list[RankFacts] = []  # what it has found, nothing if it failed
        self.elsewhere: list[RankFacts] = []  # and what other machines have shown, if all ranks here wait for them
        self.reported: tuple[Kind, tuple[int, ...]] | None = None

    @property
    def is_examining(self) -> bool:
        """Whether a thread asks ranks now."""
        return self.examination is not None and self.examination.is_alive()

    def expect_new_ranks(self, now: float) -> None:
        """Other processes take the place of ranks. now: time.monotonic()."""
        self.reported, self.ignored_until = None, now  # the same hang of theirs is another one

    def check(
        self, ranks: Sequence[WatchedRank], world_size: int, now: float, run_dir: str | None = None
    ) -> Diagnosis | None:
        """The diagnosis of a new hang, None as long as there is none. now: time.monotonic().

        run_dir: where machines show each other what their ranks do.
        """
        self._note_steps(ranks)
        progress = max(rank.page.last_progress for rank in ranks)
        last = max(progress, self.ignored_until)
        was_stopped = now - self.last_check > OWN_PAUSE
        self.last_check = now
        if was_stopped or (now - last > PAUSE_SILENCE and _are_paused(ranks, world_size)):
            self.ignored_until = last = now  # Ctrl-Z
        if self.examination is not None:
            return None if self.examination.is_alive() else self._conclude(ranks, world_size, now, last)
        is_silent = now - last > self._limit(ranks, capped=True) or (self.is_slow and progress < self.ignored_until)
        if (is_silent and now > self.next_look) or any(rank.waits_in_crash for rank in ranks):
            self.found, self.elsewhere = [], []
            asked = (list(ranks), world_size, run_dir)
            self.examination = threading.Thread(target=self._examine, args=asked, daemon=True)
            self.examination.start()
        return None

    def _examine(self, ranks: Sequence[WatchedRank], world_size: int, run_dir: str | None) -> None:
        with suppress(OSError, ValueError):  # the rank has ended in the meantime, or the run folder cannot be read
            self.found = gather(ranks)
            if run_dir is not None and find_verdict(self.found, world_size).kind is Kind.ELSEWHERE:
                self.elsewhere = exchange(run_dir, self.found, ranks[0].clock_ahead)

    def _find_verdict(self, world_size: int) -> tuple[Verdict, tuple[RankFacts, ...]]:
        """The verdict on the ranks of all machines, if it names one of this machine; else on those of this machine.

        The machine that it names ends the run and reports it.
        """
        everywhere = (*self.found, *self.elsewhere)
        if self.elsewhere and len(everywhere) == world_size:
            verdict = find_verdict(everywhere, world_size)
            if {rank.rank for rank in self.found} & set(verdict.ranks):
                return verdict, everywhere
        return find_verdict(self.found, world_size), tuple(self.found)

    def _note_steps(self, ranks: Sequence[WatchedRank]) -> None:
        for rank in ranks:
            steps, ended_at = rank.page.get(STEPS_ENDED), rank.page.last_step_end
            before = self.seen.get(rank.pid)
            if before is not None and 0 < before[0] < steps:
                self.steps.append((ended_at - before[1]) / (steps - before[0]))
                self.reported = None
            self.seen[rank.pid] = steps, ended_at

    def _limit(self, ranks: Sequence[WatchedRank], capped: bool) -> float:
        """Seconds of silence after which the ranks are examined. capped: while a rank waits for another one."""
        timeout = self.rules.timeout
        if timeout is None:
            median = statistics.median(self.steps) if self.steps else 0.0
            timeout = max(SHORTEST_SILENCE, MEDIAN_STEPS * median)
        patience = max(PATIENCE.get(rank.page.phase, OTHER_PATIENCE) for rank in ranks)
        if not any(rank.page.get(STEPS_ENDED) for rank in ranks):  # a rank may serve others and end none itself
            patience = max(patience, FIRST_STEP_PATIENCE)
        limit = timeout * patience
        if capped and patience <= OTHER_PATIENCE:  # in the other phases no rank waits in a collective that ends then
            most = max(BACKEND_SHARE * self.rules.backend_timeout, self.rules.timeout or 0.0)
            limit = min(limit, most)  # never less than the user has typed
        return limit

    def _conclude(self, ranks: Sequence[WatchedRank], world_size: int, now: float, last: float) -> Diagnosis | None:
        self.examination = None
        silence, limit = now - last, self._limit(ranks, capped=True)
        self.next_look = now + limit
        if {facts.pid for facts in self.found} != {rank.pid for rank in ranks}:
            return None
        crashing = tuple(rank.rank for rank in ranks if rank.waits_in_crash)
        if crashing:
            different = different_calls(self.found)
            return None if different is None else Diagnosis(different, tuple(self.found), silence, crashing)
        verdict, facts = self._find_verdict(world_size)
        self.is_slow = verdict.kind is Kind.SLOW
        if self.is_slow:  # silence counts from the end of a compilation, or of a debugger
            self.ignored_until, self.next_look = now, now + max(1.0, limit / LOOKS)
        if self.is_slow or silence < limit:
            return None
        if verdict.kind is Kind.ELSEWHERE:  # another machine may show more soon
            self.next_look = now + max(1.0, limit / LOOKS)
        longest = self._limit(ranks, capped=False)
        if not any(facts.is_waiting for facts in self.found) and silence < longest:
            self.next_look = last + longest
            return None  # no rank's patience with another one ends
        if self.reported == (verdict.kind, verdict.ranks):
            return None
        self.reported = verdict.kind, verdict.ranks
        return Diagnosis(verdict, facts, silence)


def _are_paused(ranks: Sequence[WatchedRank], world_size: int) -> bool:
    """Whether the run was stopped as a whole, as by Ctrl-Z, which stops the launcher, too.

    A machine cannot see by its own ranks alone whether those of other machines are stopped.
    """
    if not all(process_state(rank.pid) == "T" for rank in ranks):
        return False
    return len(ranks) == world_size or all(process_state(parent(rank.pid)) == "T" for rank in ranks)


def look_for_hang(detector: HangDetector, ranks: Sequence[WatchedRank], run_dir: str | None) -> None:
    """Called a few times a second. With watch.on_hang=stop a hang is the failure of the rank that causes it."""
    living = [rank for rank in ranks if rank.is_alive and not rank.end_is_known and rank.is_visible]
    if not living:
        return
    diagnosis = detector.check(living, int(living[0].hello["world_size"]), time.monotonic(), run_dir)
    if diagnosis is None:
        for rank in living:
            if rank.waits_in_crash and detector.examination is None:
                rank.read_crash()
        return
    if not diagnosis.crashing and (detector.rules.on_hang == "report" or not diagnosis.is_certain):
        diagnosis.print(run_dir)
        return
    cause = next((rank for rank in living if rank.rank in diagnosis.verdict.ranks), living[0])
    cause.hangs(diagnosis.as_dict())
    for rank in living:
        rank.leave()
        kill_children(rank.pid)
    threading.Timer(LEAVE_SECONDS, _kill, [living]).start()


def _kill(ranks: Sequence[WatchedRank]) -> None:
    for rank in ranks:
        if rank.died_at is None:
            rank.kill()
