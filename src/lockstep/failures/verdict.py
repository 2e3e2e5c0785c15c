"""From the facts of all ranks to one verdict on a hang."""

import json
import linecache
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.source_code import is_project, is_users
from lockstep.text import aligned

LONGEST_PATH, SHOWN_PARTS = 30, 2
LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")

COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/")
DEBUGGERS = ("/bdb.py", "/pdb.py", "/code.py", "/pydevd")
COLLECTIVE_CODE = ("/torch/distributed/", "/lockstep/distributed/", "/torch/nn/parallel/")
STORES = (
    *("/lockstep/distributed/rendezvous.py", "/lockstep/distributed/store.py", "/lockstep/distributed/store_waits.py"),
    "/torch/distributed/rendezvous.py",
)
GROUP_MAKERS = ("_store_based_barrier", "_create_gloo_process_group")  # functions of torch
WAITING_CALLS = (".wait(", ".item(", ".tolist(", ".cpu(", "synchronize(")
LOADERS = ("/torch/utils/data/", "/lockstep/data/")


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
    def waits_at_store(self) -> bool:
        top = self.top
        if top is None:
            return False
        return top.file.endswith(STORES) or self.makes_group or "store." in top.source

    @property
    def makes_group(self) -> bool:
        """Whether the innermost frame forms a process group, for which the ranks meet at the store."""
        return self.top is not None and self.top.function in GROUP_MAKERS

    def waits_in_collective(self, has_unfinished: bool) -> bool:
        """Whether the innermost frame waits for other ranks.

        has_unfinished: whether a collective that this rank has begun has not ended. Then a backward pass, in which
        DistributedDataParallel waits without a Python frame of its own, and calls that wait for a result count too.
        """
        top = self.top
        if top is None:
            return has_unfinished
        if any(part in top.file for part in COLLECTIVE_CODE):
            return has_unfinished or self.makes_group or not self.waits_at_store
        is_call = any(call in top.source for call in WAITING_CALLS)
        return has_unfinished and (top.function == "_engine_run_backward" or is_call)


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


Call = tuple[str, str]
"""(operation, shapes) of a collective, such as ("all_reduce", "(10,) Float")."""

UNCERTAIN: Call = ("", "")
# A sum over ranks, and copies. NCCL gathers other shapes of each rank, too.
SAME_SHAPES = {"all_reduce", "allreduce", "broadcast", "reduce", "gloo:all_gather", "gloo:gather"}


@dataclass(frozen=True)
class Collective:
    """One entry of a rank's record. number: counts the collectives of one process group, from 1.

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
class Record:
    """What a rank has begun, in order. Without `entries` it is not known."""

    entries: tuple[Collective, ...] = ()
    point_to_point: tuple[str, ...] = ()  # sends and receives that have not ended
    enqueued: int = 0  # of all process groups together
    completed: int = 0

    @property
    def unfinished(self) -> Collective | None:
        """The newest collective that has not ended."""
        return next((entry for entry in reversed(self.entries) if not entry.finished), None)

    def of_group(self, group: str) -> dict[int, Collective]:
        return {entry.number: entry for entry in self.entries if entry.group == group}


def parse_record(text: str) -> Record:
    """torch's record as JSON -> Record. An unreadable one is an empty one: the format is private to torch."""
    try:
        raw = json.loads(text)
        entries = [_collective(entry) for entry in raw.get("entries", []) if not entry["is_p2p"]]
        sends = [_operation(entry) for entry in raw.get("entries", []) if entry["is_p2p"] and not _has_ended(entry)]
        status = raw.get("pg_status", {}).values()
        enqueued = sum(max(0, int(group["last_enqueued_collective"])) for group in status)
        completed = sum(max(0, int(group["last_completed_collective"])) for group in status)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Record()
    return Record(tuple(entries), tuple(sends), enqueued, completed)


def _collective(entry: Mapping[str, Any]) -> Collective:
    name, operation = str(entry["profiling_name"]), _operation(entry)
    shape = _shape(entry["input_sizes"] or entry["output_sizes"], entry["input_dtypes"] or entry["output_dtypes"])
    return Collective(
        group=str(entry["process_group"][0]),
        number=int(entry["collective_seq_id"]),
        operation=operation,
        shape=shape,
        call=(operation, shape if {name, operation} & SAME_SHAPES else ""),
        finished=_has_ended(entry),
    )


def _operation(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _has_ended(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"  # gloo's stay "scheduled"


def _shape(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    return ", ".join(
        f"({', '.join(map(str, size))}{',' * (len(size) == 1)}) {dtype}"
        for size, dtype in zip(sizes, dtypes, strict=False)
    )


@dataclass(frozen=True)
class Difference:
    """Where the ranks of a process group first do different things.

    entries: of each rank, None if it has not come there. odd: the ranks that do not do what is usual; all ranks if it
    cannot be told what is usual. skipped: whether the odd ranks do what usually comes next.
    """

    entries: dict[int, Collective | None]
    odd: tuple[int, ...]
    skipped: bool

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.entries if rank not in self.odd)


def first_difference(records: Mapping[int, Record]) -> Difference | None:
    """The first collective that not all ranks do alike, None if there is none.

    A rank that has not made the call counts only if others wait for it there. It does not count while it is in a call
    that all ranks have made alike: it waits for the network, and has left out no call.
    """
    for group in dict.fromkeys(entry.group for record in records.values() for entry in record.entries):
        # Not all ranks belong to all groups.
        members = {rank: calls for rank, record in records.items() if (calls := record.of_group(group))}
        first_known = max(map(min, members.values()))  # how far all records reach back
        for number in range(first_known, max(map(max, members.values())) + 1):
            found = {rank: calls.get(number) for rank, calls in members.items()}
            is_alike = len({entry.call if entry else None for entry in found.values()}) == 1
            if not is_alike and not all(entry is None or entry.finished for entry in found.values()):
                if any(found[rank] is None and _is_in_common_call(rank, members) for rank in found):
                    break
                shortest = min(members.values(), key=len)
                return _compare(found, [shortest[past].call for past in range(first_known, number) if past in shortest])
    return None


def _is_in_common_call(rank: int, members: Mapping[int, Mapping[int, Collective]]) -> bool:
    """Whether `rank` has a call that has not ended, and that all members of its process group have made alike."""
    for number, call in members[rank].items():
        of_all = [calls.get(number) for calls in members.values()]
        if not call.finished and all(entry is not None and entry.call == call.call for entry in of_all):
            return True
    return False


def _compare(entries: dict[int, Collective | None], history: Sequence[Call]) -> Difference:
    by_call: dict[Call | None, list[int]] = {}
    for rank, entry in entries.items():
        by_call.setdefault(entry.call if entry else None, []).append(rank)
    usual = _usual_call(by_call, history)
    if usual is UNCERTAIN:
        return Difference(entries, tuple(entries), skipped=False)
    odd = tuple(rank for call, ranks in by_call.items() if call != usual for rank in ranks)
    after = usual_followers(history).get(usual, set())
    calls = {entry.call if (entry := entries[rank]) else None for rank in odd}
    return Difference(entries, odd, skipped=usual is not None and calls <= {None, *after})


def _usual_call(by_call: Mapping[Call | None, Sequence[int]], history: Sequence[Call]) -> Call | None:
    """What most ranks do. Of several such calls, such as those of two ranks, what the earlier steps make usual:

    1. the call that has come after the last common call before; 2. the call that the others have followed before;
    3. the call that was made before at all; 4. None, which stands for "not come there yet", if only it and calls that
    no rank has made before are left. UNCERTAIN if nothing of this decides.
    """
    most = max(map(len, by_call.values()))
    leaders = [call for call, ranks in by_call.items() if len(ranks) == most]
    followers = usual_followers(history)
    expected = followers.get(history[-1] if history else None, set())
    for usual in (
        leaders,
        [call for call in leaders if call in expected],
        [call for call in leaders if call and {*leaders} - {call} <= followers.get(call, set())],
        [call for call in leaders if call in history],
        [None] if None in leaders and history and not set(leaders) & set(history) else [],
    ):
        if len(usual) == 1:
            return usual[0]
    return UNCERTAIN


def usual_followers(history: Sequence[Call]) -> dict[Call | None, set[Call]]:
    """{call: the calls that have come right after it}; None stands before the first."""
    followers: dict[Call | None, set[Call]] = {}
    for before, after in zip([None, *history], history, strict=False):
        followers.setdefault(before, set()).add(after)
    return followers


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
    return *position, f"{rank.seconds:.0f} s", calls, _call(rank), _shown_place(rank)


def _call(rank: RankFacts) -> str:
    if rank.shared_sum is not None:
        peer = "" if rank.shared_sum.waits_for is None else f", for rank {rank.shared_sum.waits_for}"
        return f"{rank.shared_sum}{peer}"
    if not rank.is_waiting:
        return "no collective"
    text = ", ".join(rank.record.point_to_point) if rank.record.unfinished is None else str(rank.record.unfinished)
    return text if len(text) <= WIDEST_CALL else f"{text[: WIDEST_CALL - 3]}..."


def _shown_place(rank: RankFacts) -> str:
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


SAME_CALLS = (
    "all ranks must make the same collective calls in the same order; look for a condition on the rank or its data"
)
CHECK_DISK = "check the disk or the network file system (dmesg, df)"
YOUR_CODE = "see why that line does not end; type watch.timeout=<more seconds> if it is only slow"


@dataclass(frozen=True)
class MachineFacts:
    """The facts of all ranks of this machine. world_size: the ranks of all machines."""

    facts: tuple[RankFacts, ...]
    world_size: int

    @property
    def waiting(self) -> list[RankFacts]:
        return [rank for rank in self.facts if rank.is_waiting]

    @property
    def free(self) -> list[RankFacts]:
        return [rank for rank in self.facts if not rank.is_waiting]

    @property
    def difference(self) -> Difference | None:
        return first_difference({rank.rank: rank.record for rank in self.facts})


Rule = Callable[[MachineFacts], Verdict | None]


def find_verdict(facts: Sequence[RankFacts], world_size: int) -> Verdict:
    """The verdict of the first rule that fits: those that need no guess come first."""
    machine = MachineFacts(tuple(facts), world_size)
    return next(verdict for rule in RULES if (verdict := rule(machine)) is not None)


def different_calls(facts: Sequence[RankFacts]) -> Verdict | None:
    """The verdict on ranks whose n-th collectives are not alike, wherever the ranks are now. None if they are alike."""
    machine = MachineFacts(tuple(facts), len(facts))
    difference = machine.difference
    return _unlike(machine, difference) if difference and all(difference.entries.values()) else None


def by_state(machine: MachineFacts) -> Verdict | None:
    """What the kernel tells of a process."""
    for rank in sorted(machine.facts, key=lambda rank: rank.state not in ("", "Z", "X")):
        who = f"rank {rank.rank} (pid {rank.pid})"
        if rank.state in ("", "Z", "X"):
            meaning = f"{who} has ended, and its sockets are still open in another process"
            return Verdict(Kind.DEAD, (rank.rank,), meaning, f"see logs/rank{rank.rank}.log for how it ended")
        if rank.state == "T":
            advice = f"type kill -CONT {rank.pid}, with watch.on_hang=report or before watch.timeout"
            return Verdict(Kind.STOPPED, (rank.rank,), f"{who} is stopped by SIGSTOP", advice)
        if rank.state == "t":
            return Verdict(Kind.SLOW, (rank.rank,), f"{who} is stopped by a debugger", "wait")
        if rank.state == "D" and not rank.stack.is_compiling_or_debugged:  # a compiler reads many files
            where = f" ({rank.kernel})" if rank.kernel else ""
            meaning = f"{who} waits in the kernel{where}, as for a disk that does not answer"
            return Verdict(Kind.DISK, (rank.rank,), meaning, CHECK_DISK)
    return None


def gil(machine: MachineFacts) -> Verdict | None:
    for rank in machine.facts:
        if rank.answers is False and rank.stack.frames:
            meaning = f"rank {rank.rank} runs C code that holds the GIL, {at(rank.stack.place)}"
            return Verdict(Kind.GIL_HELD, (rank.rank,), meaning, "release the GIL in that extension, or end that call")
    return None


def compiling_or_debugged(machine: MachineFacts) -> Verdict | None:
    for rank in machine.free:
        if rank.stack.is_compiling_or_debugged:
            meaning = f"rank {rank.rank} compiles or is in a debugger, {at(rank.stack.top)}"
            return Verdict(Kind.SLOW, (rank.rank,), meaning, "wait")
    return None


def store(machine: MachineFacts) -> Verdict | None:
    asking = [rank for rank in machine.facts if rank.stack.waits_at_store]
    if not asking or any(rank.stack.users for rank in machine.free):
        return None
    if any(rank.stack.makes_group for rank in asking) and len(asking) < machine.world_size:
        return None  # the others did not come to the new group
    ranks = tuple(rank.rank for rank in asking)
    meaning = f"{_are(ranks)} waiting for an answer of the store, {at(asking[0].stack.users or asking[0].stack.top)}"
    return Verdict(Kind.STORE, ranks, meaning, "check the network to MASTER_ADDR, and whether its process is alive")


def other_call(machine: MachineFacts) -> Verdict | None:
    """All ranks are in a collective, but not in the same one."""
    difference = machine.difference
    if difference is None or any(rank.stack.users and not rank.is_waiting for rank in machine.facts):
        return None
    is_certain = all(difference.entries.values()) or not machine.free
    return _unlike(machine, difference) if is_certain else None


def _unlike(machine: MachineFacts, difference: Difference) -> Verdict:
    odd, entries = difference.odd, difference.entries
    calls = [entry for entry in entries.values() if entry is not None]
    places = _places({rank: _place(rank, entries.get(rank.rank)) for rank in machine.facts if rank.rank in entries})
    if difference.skipped:
        usual = next(entry for rank in difference.others if (entry := entries[rank]) is not None)
        return Verdict(Kind.MISSING_CALL, odd, f"{name_ranks(odd)} did not call {usual}: {places}", SAME_CALLS)
    is_same_operation = len(calls) == len(entries) and len({entry.operation for entry in calls}) == 1
    kind = Kind.OTHER_SHAPE if is_same_operation else Kind.OTHER_OPERATION
    return Verdict(kind, odd, f"{name_ranks(odd)}: {kind.value} than the other ranks: {places}", SAME_CALLS)


def _places(places: Mapping[RankFacts, str]) -> str:
    """rank 1 is in a broadcast at ...; ranks 0 and 2 are in ..."""
    together: dict[str, list[int]] = {}
    for rank, place in places.items():
        together.setdefault(place, []).append(rank.rank)
    return "; ".join(f"{_are(ranks)} in {place}" for place, ranks in together.items())


def _are(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _place(rank: RankFacts, entry: Collective | None = None) -> str:
    otherwise = "a new process group" if rank.stack.makes_group else "no collective"
    what = str(rank.shared_sum or entry or rank.record.unfinished or otherwise)
    return f"{what}, {at(rank.stack.place)}"


def user_code(machine: MachineFacts) -> Verdict | None:
    for rank in machine.free:
        if rank.busy_worker is not None:
            pid, frame = rank.busy_worker
            where = f"a data loader worker of rank {rank.rank} (pid {pid})"
            return Verdict(Kind.USER_CODE, (rank.rank,), f"{where} is in user code, {at(frame)}", YOUR_CODE)
    for rank in machine.free:
        if rank.stack.users is not None:
            meaning = f"rank {rank.rank} is in user code{_activity(rank)}, {at(rank.stack.users)}"
            return Verdict(Kind.USER_CODE, (rank.rank,), meaning, YOUR_CODE)
    return None


def _activity(rank: RankFacts) -> str:
    if rank.phase == "prepare":
        return " (dataset.prepare)"
    within = " of an evaluation" if rank.phase == "evaluation" else ""
    if rank.stack.is_inside(LOADERS):
        return f" (the data loader{within})"
    if rank.stack.is_inside(("/torch/nn/modules/",)):
        return f" (the model{within})"
    return " (an evaluation)" if within else ""


def other_sum(machine: MachineFacts) -> Verdict | None:
    """Sums through shared memory, which the flight recorder does not record."""
    sums = {rank: rank.shared_sum.values for rank in machine.waiting if rank.shared_sum is not None}
    sizes = list(sums.values())
    if len(set(sizes)) < 2:
        return None
    usual = max(sizes, key=sizes.count)
    odd = tuple(rank.rank for rank, size in sums.items() if size != usual or len(set(sizes)) == len(sizes))
    meaning = f"{name_ranks(odd)}: another shape than the other ranks: {_places({rank: _place(rank) for rank in sums})}"
    return Verdict(Kind.OTHER_SHAPE, odd, meaning, SAME_CALLS)


def slow_disk(machine: MachineFacts) -> Verdict | None:
    """The others wait for a rank that reads or writes snapshots, or whose thread writes them."""
    for rank in machine.free:
        if rank.phase == "disk" and rank.state != "R" and machine.waiting:
            meaning = f"rank {rank.rank} has not yet read or written its snapshots, {at(rank.stack.place)}"
            return Verdict(Kind.DISK, (rank.rank,), meaning, CHECK_DISK)
    return None


def absent(machine: MachineFacts) -> Verdict | None:
    """Some ranks wait, and others are neither in a collective nor in the user's code."""
    if not machine.free:
        return None
    rank = machine.free[0]
    where = f"in the phase {rank.phase}, {at(rank.stack.place)}" if rank.stack.frames else f"in the phase {rank.phase}"
    if rank.state == "R" or not machine.waiting:
        return Verdict(Kind.SLOW, (rank.rank,), f"rank {rank.rank} computes {where}", "wait")
    other, ranks = machine.waiting[0], tuple(free.rank for free in machine.free)
    meaning = f"{name_ranks(ranks)} did not come to {_place(other)}, where rank {other.rank} waits: it is {where}"
    return Verdict(Kind.MISSING_CALL, ranks, meaning, SAME_CALLS)


def elsewhere(machine: MachineFacts) -> Verdict | None:
    if len(machine.facts) == machine.world_size:
        return None
    here = machine.facts[0]
    peers = f" ({', '.join(here.record.point_to_point)})" if here.record.point_to_point else ""
    meaning = f"all ranks of this machine wait in {_place(here)}{peers} for ranks of other machines"
    return Verdict(Kind.ELSEWHERE, (), meaning, "read the report of the other machines, and check the network to them")


def unknown(machine: MachineFacts) -> Verdict:
    meaning = f"all ranks wait in {_place(machine.facts[0])}; the table shows all that is known"
    advice = "check the network between the ranks; type backend.socket_ifname=<interface>"
    return Verdict(Kind.UNKNOWN, (), meaning, advice)


RULES: tuple[Rule, ...] = (
    *(by_state, compiling_or_debugged, gil, store),
    *(other_call, user_code, other_sum, slow_disk, absent, elsewhere, unknown),
)
