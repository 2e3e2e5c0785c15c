"""The verdict on a hang: one of a closed list, with whose fault it is, what to do, and the table of all ranks."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.monitor.hang_evidence import RankFacts
from lockstep.monitor.hang_stack import Frame
from lockstep.text import aligned

STATES = {"R": "runs", "S": "sleeps", "D": "disk", "T": "stopped", "t": "traced", "Z": "has ended", "": "has ended"}
HEADER = ("rank", "pid", "state", "phase", "step", "silent for", "calls ended/begun", "is in", "at")
MOST_ROWS, WIDEST_CALL = 16, 40


class Kind(Enum):
    """What a hang can be. The last three are none, or none that this machine can name."""

    MISSING_CALL = "a call is missing"
    OTHER_OPERATION = "another operation"
    OTHER_SHAPE = "another shape"
    DEAD = "a rank has died"
    STOPPED = "a rank is stopped"
    USER_CODE = "a rank is in user code"
    GIL_HELD = "the GIL is held"
    DISK = "a rank waits for the disk"
    STORE = "the store does not answer"
    SLOW = "just slow"
    ELSEWHERE = "another machine"
    UNKNOWN = "no cause found"


@dataclass(frozen=True)
class Verdict:
    """ranks: whose fault it is, as far as this is known. meaning: a sentence. advice: what to type or to change."""

    kind: Kind
    ranks: tuple[int, ...]
    meaning: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """A verdict with its evidence. silence: seconds since the last progress of any rank.

    crashing: the ranks that do not hang: gloo is about to end them, as they receive more than they expect.
    """

    verdict: Verdict
    facts: tuple[RankFacts, ...]
    silence: float
    crashing: tuple[int, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Not where the cause may be a rank of another machine that is only slow, or a download that takes hours."""
        return self.verdict.kind is not Kind.ELSEWHERE and all(rank.phase != "prepare" for rank in self.facts)

    def print(self, run_dir: str | None) -> None:
        """Print the table and the verdict, and write them to hang.txt in the run folder."""
        lines = [
            f"lockstep: no rank has made progress for {self.silence:.0f} s; the run is not ended",
            *self.table(),
            f"verdict: {self.verdict.kind.value}",
            f"what it means: {self.verdict.meaning}",
            f"what to do: {self.verdict.advice}",
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        if run_dir is not None:
            with suppress(OSError):
                Path(run_dir, "hang.txt").write_text("\n".join(lines) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON, for the failure report."""
        return {
            "verdict": self.verdict.kind.value,
            "ranks": list(self.verdict.ranks),
            "meaning": self.verdict.meaning,
            "advice": self.verdict.advice,
            "table": self.table(),
            "silent_seconds": round(self.silence, 1),
            "ended_by_gloo": list(self.crashing),
        }

    def table(self) -> list[str]:
        """One line a rank, after a header. Of many ranks some are left out, but not those whose fault it is."""
        ordered = sorted(self.facts, key=lambda rank: (rank.rank not in self.verdict.ranks, rank.rank))
        rows = [HEADER, *map(_row, sorted(ordered[:MOST_ROWS], key=lambda rank: rank.rank))]
        lines = aligned(rows)
        left_out = len(self.facts) - MOST_ROWS
        return [*lines, f"and {left_out} other ranks"] if left_out > 0 else lines


def _row(rank: RankFacts) -> tuple[str, ...]:
    record = rank.record
    calls = f"{record.completed}/{record.enqueued}" if record.enqueued else "-"
    state = f"{rank.state} {STATES.get(rank.state, '')}".strip()
    position = (str(rank.rank), str(rank.pid), state, rank.phase, str(rank.step))
    return *position, f"{rank.seconds:.0f} s", calls, _call(rank), _place(rank)


def _call(rank: RankFacts) -> str:
    if rank.shared_sum is not None:
        peer = "" if rank.shared_sum.waits_for is None else f", for rank {rank.shared_sum.waits_for}"
        return f"{rank.shared_sum}{peer}"
    if not rank.is_waiting:
        return "no collective"
    text = ", ".join(rank.record.point_to_point) if rank.record.unfinished is None else str(rank.record.unfinished)
    return text if len(text) <= WIDEST_CALL else f"{text[: WIDEST_CALL - 3]}..."


def _place(rank: RankFacts) -> str:
    who, frame = "", rank.stack.place
    if rank.busy_worker is not None:
        pid, frame = rank.busy_worker
        who = f"loader worker {pid}: "
    elif rank.answers is False and frame is not None:
        who = "GIL held: "
    return "not known" if frame is None else f"{who}{frame.short} in {frame.function}"


def at(frame: Frame | None) -> str:
    if frame is None:
        return "place not known"
    source = f": {frame.source}" if frame.source else ""
    return f"at {frame} in {frame.function}{source}"


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
