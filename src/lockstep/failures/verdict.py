"""From what is known of all ranks that hang to one verdict: whose fault it is, what to do, and the table of all ranks.

Functions of the facts that `lockstep.failures.hang_detector` gathers: the state in /proc, the Python stacks that
`faulthandler` writes, torch's flight records, and the progress page.
"""

import json
import linecache
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.compat import BACKWARD, COMPILERS, GROUP_MAKERS
from lockstep.source_code import is_project, is_users
from lockstep.text import aligned

LONGEST_PATH, SHOWN_PARTS = 30, 2
LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")

DEBUGGERS = ("/bdb.py", "/pdb.py", "/code.py", "/pydevd")
COLLECTIVES = ("/torch/distributed/", "/lockstep/distributed/", "/torch/nn/parallel/")
LOADERS = ("/torch/utils/data/", "/lockstep/data/")
WAITING_CALLS = (".wait(", ".item(", ".tolist(", ".cpu(", "synchronize(")

STATES = {"R": "runs", "S": "sleeps", "D": "disk", "T": "stopped", "t": "traced", "Z": "has ended", "": "has ended"}
HEADER = ("rank", "pid", "state", "phase", "step", "silent for", "calls ended/begun", "is in", "at")
MOST_ROWS, WIDEST_CALL = 16, 40

SAME_CALLS = (
    "all ranks must make the same collective calls in the same order; look for a condition on the rank or its data"
)
YOUR_CODE = "see why that line does not end; type watch.timeout=<more seconds> if it is only slow"
CHECK_DISK = "check the disk or the network file system (dmesg, df)"
STACKS = "see the stacks of all ranks in hang.txt in the run folder"


# Stacks.


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the code is neither of this project nor of Python nor of an installed package."""
        return is_users(self.file)

    @property
    def source(self) -> str:
        """The line of code, as far as this machine can read it."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def short(self) -> str:
        """file:line, with the last parts of a long path."""
        parts = Path(self.file).parts
        path = self.file if len(self.file) <= LONGEST_PATH else os.path.join("...", *parts[-SHOWN_PARTS:])
        return f"{path}:{self.line}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """The frames of a rank's main thread, the innermost first."""

    frames: tuple[Frame, ...] = ()

    @property
    def top(self) -> Frame | None:
        return self.frames[0] if self.frames else None

    @property
    def users(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return next((frame for frame in self.frames if frame.is_users), None)

    @property
    def place(self) -> Frame | None:
        """The frame to show: the innermost of the user's code, else of this project, else of all."""
        projects = (frame for frame in self.frames if is_project(frame.file))
        return self.users or next(projects, self.top)

    def is_inside(self, parts: Sequence[str]) -> bool:
        """Whether a file of the stack has one of `parts` in its path."""
        return any(part in frame.file for frame in self.frames for part in parts)

    @property
    def is_compiling_or_debugged(self) -> bool:
        # What dynamo has compiled runs below a frame of dynamo, so only the innermost frames count.
        inner = self.frames[: next((i for i, frame in enumerate(self.frames) if frame.is_users), len(self.frames))]
        return Stack(inner).is_inside(COMPILERS) or self.is_inside(DEBUGGERS)

    @property
    def makes_group(self) -> bool:
        """Whether the innermost frame forms a process group, for which the ranks meet at the store."""
        return self.top is not None and self.top.function in GROUP_MAKERS

    @property
    def waits_at_store(self) -> bool:
        if self.top is None:
            return False
        is_rendezvous = self.top.file.endswith("/torch/distributed/rendezvous.py")
        return is_rendezvous or self.makes_group or "store." in self.top.source


def parse_stack(text: str, main_thread: str | None = None) -> Stack:
    """The last stack of the main thread in `text`; the stack of the thread that took the signal if none is named.

    main_thread: its identity, as `faulthandler` writes it.
    """
    threads: dict[str, list[Frame]] = {}
    first: str | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        thread = THREAD.match(line)
        if thread is not None:
            frames = threads[thread["ident"]] = []
            if line.startswith("Current"):
                first = thread["ident"]
        elif (match := LINE.match(line)) is not None:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    wanted = main_thread if main_thread in threads else first
    return Stack(tuple(threads.get(wanted or "", ())))


# Flight records.

Call = tuple[str, str]
"""(operation, shapes) of a collective, such as ("all_reduce", "(10,) Float")."""

# A sum over ranks, and copies. NCCL gathers other shapes of each rank, too.
SAME_SHAPES = {"all_reduce", "allreduce", "broadcast", "reduce", "gloo:all_gather", "gloo:gather"}


@dataclass(frozen=True)
class Collective:
    """One entry of a rank's record.

    group: the process group, of one backend.
    number: counts the collectives of the group, from 1.
    call: what all ranks must do alike, without the shape where that may differ.
    """

    group: str
    number: int
    operation: str
    shape: str
    call: Call
    finished: bool

    def __str__(self) -> str:
        return f"{self.operation} of {self.shape}" if self.shape else self.operation


@dataclass(frozen=True)
class FlightRecord:
    """What a rank has begun, in order. Without `entries` it is not known."""

    entries: tuple[Collective, ...] = ()
    point_to_point: tuple[str, ...] = ()  # sends and receives that have not ended
    enqueued: int = 0  # of all process groups together
    completed: int = 0

    @property
    def unfinished(self) -> Collective | None:
        """The newest collective that has not ended."""
        return next((entry for entry in reversed(self.entries) if not entry.finished), None)

    @property
    def waits_asleep(self) -> bool:
        """Whether what has not ended is gloo's, whose waiting threads sleep."""
        return all(entry.group.startswith("0/") for entry in self.entries if not entry.finished)


def parse_records(text: str) -> FlightRecord:
    """torch's records (a JSON list: gloo's, NCCL's) -> one FlightRecord, in order of time.

    An unreadable one is an empty one: the format is private to torch.
    """
    entries: list[tuple[int, Collective]] = []
    sends: list[str] = []
    enqueued = completed = 0
    try:
        for backend, raw in enumerate(json.loads(text)):
            for entry in raw.get("entries", []):
                name = str(entry["profiling_name"])
                operation = name.rpartition(":")[2]
                finished = bool(entry["retired"]) or entry["state"] == "completed"  # gloo's stay "scheduled"
                if entry["is_p2p"]:
                    sends += [] if finished else [operation]
                    continue
                sizes = entry["input_sizes"] or entry["output_sizes"]
                dtypes = entry["input_dtypes"] or entry["output_dtypes"]
                shape = ", ".join(
                    f"({', '.join(map(str, size))}{',' * (len(size) == 1)}) {dtype}"
                    for size, dtype in zip(sizes, dtypes, strict=False)
                )
                call = (operation, shape if {name, operation} & SAME_SHAPES else "")
                group = f"{backend}/{entry['process_group'][0]}"
                collective = Collective(group, int(entry["collective_seq_id"]), operation, shape, call, finished)
                entries.append((int(entry.get("time_created_ns", 0)), collective))
            for group in raw.get("pg_status", {}).values():
                enqueued += max(0, int(group["last_enqueued_collective"]))
                completed += max(0, int(group["last_completed_collective"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return FlightRecord()
    ordered = sorted(entries, key=lambda entry: entry[0])
    return FlightRecord(tuple(collective for _, collective in ordered), tuple(sends), enqueued, completed)


@dataclass(frozen=True)
class Difference:
    """Where the ranks of a process group first do different things.

    entries: of each rank, None if it has not come there.
    odd: the ranks that do not do what is usual; all ranks if it cannot be told what is usual.
    skipped: whether the odd ranks do what usually comes next.
    """

    entries: dict[int, Collective | None]
    odd: tuple[int, ...]
    skipped: bool


def first_difference(records: Mapping[int, FlightRecord]) -> Difference | None:
    """The first collective that not all ranks do alike, None if there is none.

    A rank that has not made the call counts only if others wait for it there. It does not count while it is in a call
    that all ranks have made alike: it waits for the network, and has left out no call.
    """
    for group in dict.fromkeys(entry.group for record in records.values() for entry in record.entries):
        members: dict[int, dict[int, Collective]] = {}  # not all ranks belong to all groups
        for rank, record in records.items():
            if known := {entry.number: entry for entry in record.entries if entry.group == group}:
                members[rank] = known
        history: list[Call | None] = []  # of all members alike
        in_common_call: set[int] = set()
        first_known = max(map(min, members.values()))  # how far all records reach back
        for number in range(first_known, max(map(max, members.values())) + 1):
            entries = {rank: known.get(number) for rank, known in members.items()}
            waiting = {rank for rank, entry in entries.items() if entry and not entry.finished}
            calls = {entry.call if entry else None for entry in entries.values()}
            if len(calls) == 1:
                history += calls
                in_common_call |= waiting
            elif waiting:
                if any(entries[rank] is None for rank in in_common_call):
                    break
                return _difference(entries, history)
    return None


def _difference(entries: dict[int, Collective | None], history: Sequence[Call | None]) -> Difference:
    """Usual is what most ranks do. Of two such calls it is the one that came after the last common call before, or
    else one that was made before at all. None, which stands for "not come there yet", is more usual than a new call.

    history: the common calls before, in order.
    """
    by_call: dict[Call | None, list[int]] = {}
    for rank, entry in entries.items():
        by_call.setdefault(entry.call if entry else None, []).append(rank)

    def followers(call: Call | None) -> set[Call | None]:
        return {after for before, after in pairwise([None, *history]) if before == call}

    def usualness(call: Call | None) -> tuple[int, bool, bool, bool]:
        is_next = call in followers(history[-1] if history else None)
        return len(by_call[call]), is_next, call in history, call is None and bool(history)

    usual, second, *_ = sorted(by_call, key=usualness, reverse=True)
    if usualness(usual) == usualness(second):
        return Difference(entries, tuple(entries), skipped=False)
    odd = tuple(rank for call, ranks in by_call.items() if call != usual for rank in ranks)
    skipped = usual is not None and {*by_call} - {usual} <= {None, *followers(usual)}
    return Difference(entries, odd, skipped)


# The facts of a rank.


@dataclass(frozen=True)
class RankFacts:
    """What is known of one rank.

    state: the letter in /proc/<pid>/stat, "" for no such process.
    children_run: whether a process that it has started computes, such as a loader worker.
    seconds: since its last progress.
    stacks, main_thread: what faulthandler has written, and the thread to look at.
    records: torch's flight records, as JSON.
    sum_values: the size of a sum through shared memory that has not ended, or 0.
    worker: the pid of a process that it has started, such as a loader worker, and the stacks of that one.
    """

    rank: int
    pid: int
    state: str
    phase: str
    step: int
    seconds: float
    children_run: bool = False
    stacks: str = ""
    main_thread: str | None = None
    records: str = "[]"
    sum_values: int = 0
    worker: tuple[int, str] | None = None

    @cached_property
    def stack(self) -> Stack:
        return parse_stack(self.stacks, self.main_thread)

    @cached_property
    def record(self) -> FlightRecord:
        """Torch's, and the sum through shared memory, which torch does not record."""
        record = parse_records(self.records)
        if not self.sum_values:
            return record
        operation, shape = "shared-memory sum", f"{self.sum_values:,} values"
        entry = Collective("shared memory", 1, operation, shape, (operation, shape), finished=False)
        return replace(record, entries=(*record.entries, entry))

    @cached_property
    def workers_frame(self) -> Frame | None:
        """Where the process that it has started is in the user's code."""
        return None if self.worker is None else parse_stack(self.worker[1], self.main_thread).users

    @cached_property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks in a collective.

        With a collective that has begun and not ended, a backward pass, in which DistributedDataParallel waits without
        a Python frame of its own, and calls that wait for a result count, too: a GPU's result is waited for in state R.
        """
        top = self.stack.top
        has_unfinished = self.record.unfinished is not None or bool(self.record.point_to_point)
        if top is None or top.function == BACKWARD:
            return has_unfinished and self.state != "R"
        if any(part in top.file for part in COLLECTIVES):
            if self.record.entries and self.record.waits_asleep and self.state == "R":
                return False  # fsdp computes in torch's files, between its calls and while it gathers the next layer
            return has_unfinished or self.stack.makes_group or not self.stack.waits_at_store
        return has_unfinished and any(call in top.source for call in WAITING_CALLS)

    def call(self, entry: Collective | None = None) -> str:
        """What it waits in. entry: the collective of its record that is asked about."""
        otherwise = "a new process group" if self.stack.makes_group else "no collective"
        return str(entry or self.record.unfinished or ", ".join(self.record.point_to_point) or otherwise)

    def place(self, entry: Collective | None = None) -> str:
        """As `call`, and where."""
        return f"{self.call(entry)}, {at(self.stack.place)}"


# The verdict.


class Kind(Enum):
    """What a hang can be. The last three are none, or none that this machine can name."""

    MISSING_CALL = "a call is missing"
    OTHER_OPERATION = "another operation"
    OTHER_SHAPE = "another shape"
    DEAD = "a rank has died"
    STOPPED = "a rank is stopped"
    USER_CODE = "a rank is in user code"
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


def find_verdict(facts: Sequence[RankFacts], world_size: int) -> Verdict:
    """The first verdict that fits: those that need no guess come first.

    facts: of the living ranks of this machine. world_size: the ranks of all machines.
    """
    waiting = [rank for rank in facts if rank.is_waiting]
    free = [rank for rank in facts if not rank.is_waiting]
    in_users_code = [rank for rank in free if rank.stack.users is not None]

    for rank in sorted(facts, key=lambda rank: rank.state not in ("", "Z", "X")):
        who = f"rank {rank.rank} (pid {rank.pid})"
        if rank.state in ("", "Z", "X"):
            meaning = f"{who} has ended, and its sockets are still open in another process"
            return Verdict(Kind.DEAD, (rank.rank,), meaning, f"see logs/rank{rank.rank}.log for how it ended")
        if rank.state == "T":
            advice = f"type kill -CONT {rank.pid}, with watch.on_hang=report or before watch.timeout"
            return Verdict(Kind.STOPPED, (rank.rank,), f"{who} is stopped by SIGSTOP", advice)
    for rank in facts:
        if rank.state == "t" or (rank in free and rank.stack.is_compiling_or_debugged):
            meaning = f"rank {rank.rank} compiles or is in a debugger, {at(rank.stack.top)}"
            return Verdict(Kind.SLOW, (rank.rank,), meaning, "wait")

    asking = [rank for rank in facts if rank.stack.waits_at_store]
    # Of a new group that some ranks make, the others are missing.
    makes_group = any(rank.stack.makes_group for rank in asking)
    if asking and not in_users_code and not (makes_group and len(asking) < world_size):
        ranks, frame = tuple(rank.rank for rank in asking), asking[0].stack.users or asking[0].stack.top
        meaning = f"{are(ranks)} waiting for an answer of the store, {at(frame)}"
        return Verdict(Kind.STORE, ranks, meaning, "check the network to MASTER_ADDR, and whether its process is alive")

    difference = first_difference({rank.rank: rank.record for rank in facts})
    if difference and not in_users_code and (all(difference.entries.values()) or not free):
        return _unlike(facts, difference)

    for rank in free:
        if rank.workers_frame is not None and rank.worker is not None:
            where = f"a data loader worker of rank {rank.rank} (pid {rank.worker[0]})"
            meaning = f"{where} is in user code, {at(rank.workers_frame)}"
            return Verdict(Kind.USER_CODE, (rank.rank,), meaning, YOUR_CODE)
    for rank in in_users_code:
        meaning = f"rank {rank.rank} is in user code{_activity(rank)}, {at(rank.stack.users)}"
        return Verdict(Kind.USER_CODE, (rank.rank,), meaning, YOUR_CODE)

    if free:  # neither in a collective nor in the user's code
        computing = [rank for rank in free if rank.state == "R" or rank.children_run]
        rank = (computing or free)[0]
        where = f"in the phase {rank.phase}"
        where += f", {at(rank.stack.place)}" if rank.stack.frames else ""
        if computing:
            return Verdict(Kind.SLOW, (rank.rank,), f"rank {rank.rank} computes {where}", "wait")
        ranks, is_disk = tuple(rank.rank for rank in free), rank.phase == "disk" or rank.state == "D"
        if waiting:
            other = waiting[0]
            meaning = (
                f"{name_ranks(ranks)} did not come to {other.place()}, where rank {other.rank} waits: it is {where}"
            )
            return Verdict(Kind.MISSING_CALL, ranks, meaning, CHECK_DISK if is_disk else SAME_CALLS)
        meaning = f"{are(ranks)} {where}, and neither computing nor waiting for another rank"
        return Verdict(Kind.UNKNOWN, ranks, meaning, CHECK_DISK if is_disk else STACKS)

    here = facts[0]
    if len(facts) < world_size:
        meaning = f"all ranks of this machine wait in {here.place()} for ranks of other machines"
        advice = "read the report of the other machines, and check the network to them"
        return Verdict(Kind.ELSEWHERE, (), meaning, advice)
    advice = f"check the network between the ranks (backend.socket_ifname=<interface>), and {STACKS}"
    return Verdict(Kind.UNKNOWN, (), f"all ranks wait in {here.place()}; the table shows all that is known", advice)


def _unlike(facts: Sequence[RankFacts], difference: Difference) -> Verdict:
    """All ranks are in a collective, but not in the same one."""
    odd, entries = difference.odd, difference.entries
    calls = [entry for entry in entries.values() if entry is not None]
    together: dict[str, list[int]] = {}  # place -> ranks
    for rank in facts:
        if rank.rank in entries:
            together.setdefault(rank.place(entries[rank.rank]), []).append(rank.rank)
    places = "; ".join(f"{are(ranks)} in {place}" for place, ranks in together.items())
    if difference.skipped:
        usual = next(entry for rank, entry in entries.items() if rank not in odd and entry is not None)
        return Verdict(Kind.MISSING_CALL, odd, f"{name_ranks(odd)} did not call {usual}: {places}", SAME_CALLS)
    is_same_operation = len(calls) == len(entries) and len({entry.operation for entry in calls}) == 1
    kind = Kind.OTHER_SHAPE if is_same_operation else Kind.OTHER_OPERATION
    return Verdict(kind, odd, f"{name_ranks(odd)}: {kind.value} than the other ranks: {places}", SAME_CALLS)


def _activity(rank: RankFacts) -> str:
    if rank.phase == "prepare":
        return " (dataset.prepare)"
    within = " of an evaluation" if rank.phase == "evaluation" else ""
    if rank.stack.is_inside(LOADERS):
        return f" (the data loader{within})"
    if rank.stack.is_inside(("/torch/nn/modules/",)):
        return f" (the model{within})"
    return " (an evaluation)" if within else ""


@dataclass(frozen=True)
class Diagnosis:
    """A verdict with its evidence. silence: seconds since the last progress of any rank."""

    verdict: Verdict
    facts: tuple[RankFacts, ...]
    silence: float

    @property
    def is_certain(self) -> bool:
        """Not where no cause is found, or it may be a rank of another machine: they may only be slow.

        Nor in a download, which may take hours, or in a mode that only works with a trained net.
        """
        may_take_hours = any(rank.phase in ("prepare", "mode") for rank in self.facts)
        return self.verdict.kind not in (Kind.ELSEWHERE, Kind.UNKNOWN) and not may_take_hours

    def lines(self) -> list[str]:
        """What is printed if the run is not ended."""
        return [
            f"lockstep: no rank has made progress for {self.silence:.0f} s",
            *self.table(),
            f"verdict: {self.verdict.kind.value}",
            f"what it means: {self.verdict.meaning}",
            f"what to do: {self.verdict.advice}",
        ]

    def stacks(self) -> dict[str, list[str]]:
        """Of each rank: the lines of its main thread, the innermost first."""
        return {
            str(rank.rank): [f"{frame} in {frame.function}: {frame.source}" for frame in rank.stack.frames]
            for rank in self.facts
        }

    def as_dict(self) -> dict[str, Any]:
        """As values of JSON, for the failure report."""
        return {
            "verdict": self.verdict.kind.value,
            "ranks": list(self.verdict.ranks),
            "meaning": self.verdict.meaning,
            "advice": self.verdict.advice,
            "table": self.table(),
            "stacks": self.stacks(),
            "silent_seconds": round(self.silence, 1),
        }

    def table(self) -> list[str]:
        """One line a rank, after a header. Of many ranks some are left out, but not those whose fault it is."""
        ordered = sorted(self.facts, key=lambda rank: (rank.rank not in self.verdict.ranks, rank.rank))
        rows = [HEADER, *map(_row, sorted(ordered[:MOST_ROWS], key=lambda rank: rank.rank))]
        lines = aligned(rows)
        left_out = len(self.facts) - MOST_ROWS
        return [*lines, f"and {left_out} other ranks"] if left_out > 0 else lines


def _row(rank: RankFacts) -> tuple[str, ...]:
    record, frame = rank.record, rank.workers_frame or rank.stack.place
    calls = f"{record.completed}/{record.enqueued}" if record.enqueued else "-"
    call = rank.call() if rank.is_waiting else "no collective"
    if len(call) > WIDEST_CALL:
        call = f"{call[: WIDEST_CALL - 3]}..."
    who = f"loader worker {rank.worker[0]}: " if rank.worker and rank.workers_frame else ""
    where = "not known" if frame is None else f"{who}{frame.short} in {frame.function}"
    state = f"{rank.state} {STATES.get(rank.state, '')}".strip()
    return str(rank.rank), str(rank.pid), state, rank.phase, str(rank.step), f"{rank.seconds:.0f} s", calls, call, where


def at(frame: Frame | None) -> str:
    if frame is None:
        return "place not known"
    source = f": {frame.source}" if frame.source else ""
    return f"at {frame} in {frame.function}{source}"


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def are(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"
