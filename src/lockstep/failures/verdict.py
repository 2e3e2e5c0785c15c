"""From what is known of all ranks that hang to one verdict: whose fault it is, what to do, and the table of all ranks.

Functions of facts alone. `lockstep.failures.watchdog` gathers these.
"""

import json
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lockstep.compat import COMPILERS
from lockstep.source_code import is_project, is_users
from lockstep.text import aligned

LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")
DEBUGGERS = ("/bdb.py", "/pdb.py", "/code.py", "/pydevd")
LOADERS = ("/torch/utils/data/", "/lockstep/data/")
SHOWN_PARTS, MOST_ROWS, WIDEST_CALL = 2, 16, 40
HEADER = ("rank", "pid", "state", "phase", "step", "is in", "at")

STOPPED, GONE, NO_ANSWER = "stopped", "gone", "no answer"  # of a rank that is mute
USER_CODE, MISSING_CALL, SLOW, UNKNOWN = "a rank is in user code", "a call is missing", "just slow", "no cause found"
OTHER_OPERATION, OTHER_SHAPE = "another operation", "another shape"
SAME_CALLS = "all ranks must make the same collective calls in the same order; look for a condition on the rank or its "
SAME_CALLS += "data"
YOUR_CODE = "see why that line does not end; type watch.timeout=<more seconds> if it is only slow"
CHECK_DISK = "check the disk or the network file system (dmesg, df)"
CHECK_NETWORK = "check the network between the ranks (backend.socket_ifname=<interface>); backend.timeout ends the run"


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """file:line, with the last parts of a path."""
        return f"{'/'.join(Path(self.file).parts[-SHOWN_PARTS:])}:{self.line}"

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} in {self.function}" + (f": {source}" if source else "")


Call = tuple[str, str]


@dataclass(frozen=True)
class Collective:
    """An entry of torch's flight record. group: of one backend. number: counts the collectives of the group, from 1.
    call: what all ranks must do alike, without the shape where that may differ."""

    group: str
    number: int
    operation: str
    shape: str
    call: Call
    finished: bool

    def __str__(self) -> str:
        return f"{self.operation} of {self.shape}" if self.shape else self.operation


Entries = dict[int, Collective | None]
"""The n-th collective of each rank of a group, None for one that has not come there."""


@dataclass(frozen=True)
class Facts:
    """What is known of a rank.

    mute: why it has not answered, "" for one that has. busy: whether it, or a process that it has started, computes.
    stack: of its main thread, the innermost frame first; or of the process `worker` of its loader, which is in the
    user's code. calls: its collectives, in order; a sum through shared memory is one.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    mute: str = ""
    busy: bool = False
    stack: tuple[Frame, ...] = ()
    calls: tuple[Collective, ...] = ()
    worker: int = 0

    @property
    def unfinished(self) -> Collective | None:
        """The newest collective that has not ended."""
        return next((call for call in reversed(self.calls) if not call.finished), None)

    @property
    def users(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return next((frame for frame in self.stack if is_users(frame.file)), None)

    @property
    def place(self) -> Frame | None:
        """The frame to show: the innermost of the user's code, else of this project, else of all."""
        projects = (frame for frame in self.stack if is_project(frame.file))
        return self.users or next(projects, self.stack[0] if self.stack else None)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks. gloo sleeps there, so a rank that computes does not; a host that waits for
        a GPU spins. What forms a process group waits without a collective."""
        is_nccl = any(call.group.startswith("1/") for call in self.calls if not call.finished)
        in_torch = any("/torch/distributed/" in frame.file for frame in self.stack[:1])
        return not self.mute and (is_nccl or not self.busy) and (in_torch or self.unfinished is not None)

    @property
    def compiles(self) -> bool:
        """Or is in a debugger. What torch has compiled runs below a frame of it, so only the innermost ones count."""
        inner = next((number for number, frame in enumerate(self.stack) if is_users(frame.file)), len(self.stack))
        in_compiler = any(part in frame.file for frame in self.stack[:inner] for part in COMPILERS)
        return in_compiler or any(part in frame.file for frame in self.stack for part in DEBUGGERS)

    def where(self, call: Collective | None = None) -> str:
        """What it waits in, and at which line. call: the collective that is asked about."""
        return f"{call or self.unfinished or 'no collective'}, {at(self.place)}"


@dataclass(frozen=True)
class Verdict:
    """ranks: whose fault it is, as far as known. ends: whether it is certain enough to end the run."""

    kind: str
    ranks: tuple[int, ...]
    meaning: str
    advice: str
    ends: bool = True


def find_verdict(facts: Sequence[Facts], world_size: int) -> Verdict:
    """The first of six rules that fits. facts: of all ranks that are known. world_size: the ranks of all machines."""
    free = [rank for rank in facts if not rank.waits]
    may_take_hours = any(rank.phase in ("prepare", "mode") for rank in facts)
    in_users_code = [rank for rank in free if rank.users is not None]
    # 1. A rank does not answer.
    for rank in sorted(facts, key=lambda rank: rank.mute != GONE):
        who, one = f"rank {rank.rank} (pid {rank.pid})", (rank.rank,)
        if rank.mute == GONE:
            meaning = f"{who} has ended, and its sockets are still open in another process"
            return Verdict("a rank has died", one, meaning, f"see logs/rank{rank.rank}.log for how it ended")
        if rank.mute == STOPPED:
            advice = f"type kill -CONT {rank.pid}, with watch.on_hang=report or before watch.timeout"
            return Verdict("a rank is stopped", one, f"{who} is stopped by SIGSTOP", advice)
        if rank.mute == NO_ANSWER and not rank.busy:
            meaning = f"{who} holds Python's lock or waits in the kernel, {at(rank.place)}"
            return Verdict(USER_CODE if rank.users else "a rank does not answer", one, meaning, YOUR_CODE)
    # 4, before what it would be taken for. A rank that does not wait computes, or another process does for it.
    for rank in free:
        if rank.busy or rank.compiles:
            what = "compiles or is in a debugger" if rank.compiles else f"computes in the phase {rank.phase}"
            return Verdict(SLOW, (rank.rank,), f"rank {rank.rank} {what}, {at(rank.place)}", "wait", ends=False)
    # 2. The ranks' n-th collectives are not alike.
    difference = None if in_users_code else first_difference(facts)
    if difference is not None and (not free or all(difference[0].values())):
        return _unlike(facts, *difference)
    # 3 and 5. A rank is in user code, or has not come to where others wait.
    for rank in in_users_code:
        who = f"loader worker {rank.worker} of rank {rank.rank}" if rank.worker else f"rank {rank.rank}"
        meaning = f"{who} is in user code, {at(rank.users)}"
        return Verdict(USER_CODE, (rank.rank,), meaning, YOUR_CODE, ends=not may_take_hours)
    if free:
        ranks, advice = tuple(rank.rank for rank in free), CHECK_DISK if free[0].phase == "disk" else SAME_CALLS
        where = f"in the phase {free[0].phase}, {at(free[0].place)}"
        other = next((rank for rank in facts if rank.waits), None)
        if other is None:
            meaning = f"{are(ranks)} {where}, and neither compute nor wait"
            return Verdict(UNKNOWN, ranks, meaning, CHECK_DISK, ends=False)
        meaning = f"{name_ranks(ranks)} did not come to {other.where()}, where rank {other.rank} waits: it is {where}"
        return Verdict(MISSING_CALL, ranks, meaning, advice, ends=not may_take_hours)
    # 6. All wait alike: the network, or a machine that cannot be asked.
    missing = sorted({*range(world_size)} - {rank.rank for rank in facts})
    lost = f"; nothing is known of {name_ranks(missing)}" if missing else ""
    return Verdict(UNKNOWN, (), f"all ranks wait in {facts[0].where()}{lost}", CHECK_NETWORK, ends=False)


def first_difference(facts: Sequence[Facts]) -> tuple[Entries, tuple[int, ...], bool] | None:
    """The first collective that not all ranks of its group do alike: (what each does, the odd ranks, whether these left
    out a call). None if there is none.

    A rank that has not made the call counts only if others wait for it there. It does not count while it is in a call
    that all ranks have made alike: it waits for the network, and has left out no call.
    """
    for group in dict.fromkeys(call.group for rank in facts for call in rank.calls):
        members = {rank.rank: {call.number: call for call in rank.calls if call.group == group} for rank in facts}
        members = {rank: known for rank, known in members.items() if known}
        history: list[Call | None] = []  # of all members alike
        in_common_call: set[int] = set()
        for number in range(max(map(min, members.values())), max(map(max, members.values())) + 1):
            entries = {rank: known.get(number) for rank, known in members.items()}
            waiting = {rank for rank, entry in entries.items() if entry and not entry.finished}
            calls = {entry.call if entry else None for entry in entries.values()}
            if len(calls) == 1:
                history += calls
                in_common_call |= waiting
            elif waiting:
                if any(entries[rank] is None for rank in in_common_call):
                    break
                return entries, *_odd(entries, history)
    return None


def _odd(entries: Entries, history: list[Call | None]) -> tuple[tuple[int, ...], bool]:
    """(the ranks in the minority, whether they left out the others' call). A tie is decided by the call that came after
    the last common one before; all ranks are odd if that does not tell."""
    by_call: dict[Call | None, list[int]] = {}
    for rank, entry in entries.items():
        by_call.setdefault(entry.call if entry else None, []).append(rank)
    nexts = [after for before, after in pairwise([None, *history]) if before == (history or [None])[-1]]

    def usualness(call: Call | None) -> tuple[int, bool, bool]:
        return len(by_call[call]), call in nexts, call is None and bool(history)

    usual, second, *_ = sorted(by_call, key=usualness, reverse=True)
    if usualness(usual) == usualness(second):
        return tuple(entries), False
    odd = tuple(rank for call, ranks in by_call.items() if call != usual for rank in ranks)
    return odd, usual is not None and {*by_call} <= {usual, None, *history}


def _unlike(facts: Sequence[Facts], entries: Entries, odd: tuple[int, ...], left_out: bool) -> Verdict:
    """All ranks are in a collective, but not in the same one."""
    together: dict[str, list[int]] = {}  # place -> ranks
    for rank in facts:
        if rank.rank in entries:
            together.setdefault(rank.where(entries[rank.rank]), []).append(rank.rank)
    places = "; ".join(f"{are(ranks)} in {place}" for place, ranks in together.items())
    if left_out:
        usual = next(entry for rank, entry in entries.items() if rank not in odd and entry is not None)
        return Verdict(MISSING_CALL, odd, f"{name_ranks(odd)} did not call {usual}: {places}", SAME_CALLS)
    is_same_operation = len({entry and entry.operation for entry in entries.values()}) == 1
    kind = OTHER_SHAPE if is_same_operation else OTHER_OPERATION
    return Verdict(kind, odd, f"{name_ranks(odd)}: {kind} than the other ranks: {places}", SAME_CALLS)


def table(facts: Sequence[Facts], verdict: Verdict) -> list[str]:
    """One line a rank, after a header. Of many ranks some are left out, but not those whose fault it is."""
    ordered = sorted(facts, key=lambda rank: (rank.rank not in verdict.ranks, rank.rank))
    lines = aligned([HEADER, *map(_row, sorted(ordered[:MOST_ROWS], key=lambda rank: rank.rank))])
    left_out = len(facts) - MOST_ROWS
    return [*lines, f"and {left_out} other ranks"] if left_out > 0 else lines


def _row(rank: Facts) -> tuple[str, ...]:
    call = str(rank.unfinished or "no collective")
    call = f"{call[: WIDEST_CALL - 3]}..." if len(call) > WIDEST_CALL else call
    where = "not known" if rank.place is None else f"{rank.place.short} in {rank.place.function}"
    where += f" (loader worker {rank.worker})" * bool(rank.worker)
    state = rank.mute or ("computes" if rank.busy else "waits" if rank.waits else "sleeps")
    return str(rank.rank), str(rank.pid), state, rank.phase, str(rank.step), call, where


def at(frame: Frame | None) -> str:
    return "place not known" if frame is None else f"at {frame}"


def name_ranks(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def are(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"


# Reading what faulthandler and torch's flight recorder write.


def parse_stack(text: str, main_thread: str | None = None) -> tuple[Frame, ...]:
    """The last stack of the main thread in `text`; the stack of the thread that took the signal if none is named.

    main_thread: its identity, as `faulthandler` writes it.
    """
    threads: dict[str, list[Frame]] = {}
    first = ""
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := THREAD.match(line):
            frames = threads[thread["ident"]] = []
            first = thread["ident"] if line.startswith("Current") else first
        elif match := LINE.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(threads.get(main_thread if main_thread in threads else first, ()))


# A sum over ranks, and copies. NCCL gathers other shapes of each rank, too.
SAME_SHAPES = {"all_reduce", "allreduce", "broadcast", "reduce", "gloo:all_gather", "gloo:gather"}


def parse_calls(texts: Sequence[str], values: int = 0) -> tuple[Collective, ...]:
    """torch's records (JSON: gloo's, NCCL's) -> the collectives, in order of time. An unreadable one has none: the
    format is private to torch. values: of a sum through shared memory that has not ended."""
    entries: list[tuple[int, Collective]] = []
    try:
        for backend, text in enumerate(texts):
            for entry in json.loads(text).get("entries", []):
                name = str(entry["profiling_name"])
                operation, group = name.rpartition(":")[2], f"{backend}/{entry['process_group'][0]}"
                finished = bool(entry["retired"]) or entry["state"] == "completed"  # gloo's stay "scheduled"
                sizes = entry["input_sizes"] or entry["output_sizes"]
                dtypes = entry["input_dtypes"] or entry["output_dtypes"]
                shape = ", ".join(
                    f"({', '.join(map(str, size))}{',' * (len(size) == 1)}) {dtype}"
                    for size, dtype in zip(sizes, dtypes, strict=False)
                )
                call = operation, shape if {name, operation} & SAME_SHAPES else ""
                number = int(entry["collective_seq_id"])
                if entry["is_p2p"]:  # the other end is one rank, and numbers do not fit together
                    group, number = f"{backend}/{operation}/{len(entries)}", 1
                if not (entry["is_p2p"] and finished):
                    found = Collective(group, number, operation, shape, call, finished)
                    entries.append((int(entry.get("time_created_ns", 0)), found))
    except (ValueError, KeyError, TypeError, AttributeError):
        entries = []
    calls = [collective for _, collective in sorted(entries, key=lambda entry: entry[0])]
    if values:
        operation, shape = "shared-memory sum", f"{values:,} values"
        calls.append(Collective("shared memory", 1, operation, shape, (operation, shape), finished=False))
    return tuple(calls)
