"""From what is known of all ranks that hang to one verdict: whose fault it is, what to do, and the table of all ranks.

Functions of facts alone. `lockstep.failures.watchdog` gathers these.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.compat import COMPILERS
from lockstep.errors import aligned
from lockstep.failures.record import Frame, Place
from lockstep.files import is_project, is_users

DEBUGGERS = ("/bdb.py", "/pdb.py", "/code.py", "/pydevd")
MOST_ROWS, WIDEST_CALL = 16, 40
HEADER = ("rank", "pid", "state", "phase", "step", "is in", "at")
STOPPED, GONE, NO_ANSWER = "stopped", "gone", "no answer"  # of a rank that is mute
USER_CODE, MISSING_CALL, SLOW, UNKNOWN = "a rank is in user code", "a call is missing", "just slow", "no cause found"
OTHER_OPERATION, OTHER_SHAPE = "another operation", "another shape"
SAME_CALLS = "all ranks must make the same collective calls in the same order; look for a condition on the rank or data"
YOUR_CODE = "see why that line does not end; type watch.timeout=<more seconds> if it is only slow"
CHECK_DISK = "check the disk or the network file system (dmesg, df)"
CHECK_NETWORK = "check the network between the ranks (backend.socket_ifname=<interface>); backend.timeout ends the run"
# A sum over ranks, and copies. NCCL gathers other shapes of each rank, too.
SAME_SHAPES = {"all_reduce", "allreduce", "broadcast", "reduce", "gloo:all_gather", "gloo:gather"}


class Collective(NamedTuple):
    """An entry of torch's flight record. number: counts those of the group, from 1. text: the operation and the shape.
    call: what all ranks must do alike: without the shape where that may differ."""

    group: str
    number: int
    operation: str
    text: str
    call: str
    finished: bool


SUM = Collective("shared memory", 1, "shared-memory sum", "shared-memory sum", "shared-memory sum", finished=False)
"""torch does not record it, and a rank that is in it waits for the others."""


class Facts:
    """What is known of a rank. All but `place` may come from JSON. busy: whether it, or a process that it has started,
    computes. mute: why it has not answered, "" for one that has. stack: of its main thread, the innermost frame first;
    or of the process `worker` of its loader, which is in the user's code. calls: its collectives, in order."""

    def __init__(
        self, rank: int, host: str, pid: int, place: Any, busy: bool, mute: str, worker: int, stack: Any, calls: Any
    ) -> None:
        self.rank, self.host, self.pid, self.place = rank, host, pid, Place(*place)
        self.busy, self.mute, self.worker, self.phase = busy, mute, worker, self.place.name
        self.stack = [Frame(*frame) for frame in stack]
        self.calls = [Collective(*call) for call in calls]
        self.calls += [SUM for frame in self.stack[:1] if frame.file.endswith("/distributed/shared_memory.py")]
        begun = [call for call in self.calls if not call.finished]
        users = [number for number, frame in enumerate(self.stack) if is_users(frame.file)]
        inner = self.stack[: users[0]] if users else self.stack
        shown = [frame for frame in self.stack if is_project(frame.file)] or self.stack
        self.users = self.stack[users[0]] if users else None  # the innermost frame of the user's code
        self.at = self.users or next(iter(shown), None)
        self.line = f"at {self.at}" if self.at else "place not known"
        self.waits_in = begun[-1].text if begun else "no collective"
        # gloo sleeps where it waits, so a rank that computes does not; a host that waits for a GPU spins. What forms a
        # process group waits without a collective.
        may_wait = any(call.group.startswith("1/") for call in begun) or not busy
        in_torch = any("/torch/distributed/" in frame.file for frame in self.stack[:1])
        self.waits = not mute and may_wait and (in_torch or bool(begun))
        # Or is in a debugger. What torch has compiled runs below a frame of it, so only the innermost ones count.
        self.compiles = any(part in frame.file for frame in inner for part in COMPILERS)
        self.compiles |= any(part in frame.file for frame in self.stack for part in DEBUGGERS)

    def where(self, call: Collective | None = None) -> str:
        """What it waits in, and at which line. call: the collective that is asked about."""
        return f"{call.text if call else self.waits_in}, {self.line}"


class Verdict(NamedTuple):
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
            meaning = f"{who} holds Python's lock or waits in the kernel, {rank.line}"
            return Verdict(USER_CODE if rank.users else "a rank does not answer", one, meaning, YOUR_CODE)
    # 2. A rank that does not wait computes, or another process does for it.
    for rank in free:
        if rank.busy or rank.compiles:
            what = "compiles or is in a debugger" if rank.compiles else f"computes in the phase {rank.phase}"
            return Verdict(SLOW, (rank.rank,), f"rank {rank.rank} {what}, {rank.line}", "wait", ends=False)
    # 3. A rank is in user code.
    for rank in free:
        if rank.users is not None:
            who = f"loader worker {rank.worker} of rank {rank.rank}" if rank.worker else f"rank {rank.rank}"
            meaning = f"{who} is in user code, {rank.line}"
            return Verdict(USER_CODE, (rank.rank,), meaning, YOUR_CODE, ends=not may_take_hours)
    # 4. The ranks' n-th collectives are not alike.
    if (verdict := different_calls(facts, all_begun=bool(free))) is not None:
        return verdict
    # 5. A rank has not come to where others wait.
    ranks, waiting = tuple(rank.rank for rank in free), [rank for rank in facts if rank.waits]
    if free:
        where = f"in the phase {free[0].phase}, {free[0].line}"
        if not waiting:
            return Verdict(UNKNOWN, ranks, f"no rank computes or waits; {where}", CHECK_DISK, ends=False)
        there = f"{waiting[0].where()}, where rank {waiting[0].rank} waits"
        advice = CHECK_DISK if free[0].phase == "disk" else SAME_CALLS
        meaning = f"{name_ranks(ranks)} did not come to {there}: it is {where}"
        return Verdict(MISSING_CALL, ranks, meaning, advice, ends=not may_take_hours)
    # 6. All wait alike: the network, or a machine that cannot be asked.
    missing = sorted({*range(world_size)} - {rank.rank for rank in facts})
    lost = f"; nothing is known of {name_ranks(missing)}" if missing else ""
    return Verdict(UNKNOWN, (), f"all ranks wait in {facts[0].where()}{lost}", CHECK_NETWORK, ends=False)


def different_calls(facts: Sequence[Facts], all_begun: bool) -> Verdict | None:
    """On the first collective in which a rank waits, and which not all ranks of its group do alike. all_begun: whether
    it must be one that each of them has begun. A rank that waits in a call which all have made waits for the network,
    and has left out no later one."""
    for group in dict.fromkeys(call.group for rank in facts for call in rank.calls):
        members = {rank.rank: {call.number: call for call in rank.calls if call.group == group} for rank in facts}
        members = {rank: calls for rank, calls in members.items() if calls}
        begun, in_common_call = [call for calls in members.values() for call in calls.values()], set[int]()
        for number in sorted({call.number for call in begun if not call.finished}):
            entries = {rank: known.get(number) for rank, known in members.items()}
            missing = {rank for rank, entry in entries.items() if entry is None}
            if missing & in_common_call or (missing and all_begun):
                break
            if len({entry and entry.call for entry in entries.values()}) > 1:
                past = [call.call for call in next(iter(members.values())).values() if call.number < number]
                return _unlike([rank for rank in facts if rank.rank in entries], entries, past)
            in_common_call |= {rank for rank, entry in entries.items() if entry and not entry.finished}
    return None


def _unlike(facts: Sequence[Facts], entries: dict[int, Collective | None], past: list[str]) -> Verdict:
    """The ranks in the minority are odd. A tie is decided by what came after the last common call before; all ranks are
    odd if that does not tell. entries: the collective of each rank, None for one that has not come there."""
    by_call: dict[str | None, list[int]] = {}
    by_place: dict[str, list[int]] = {}
    for rank in facts:
        entry = entries[rank.rank]
        by_call.setdefault(entry and entry.call, []).append(rank.rank)
        by_place.setdefault(rank.where(entry), []).append(rank.rank)
    nexts = [after for before, after in pairwise(past) if before == past[-1]]
    usualness = {call: (len(by_call[call]), call in nexts, call is None and bool(past)) for call in by_call}
    usual, second, *_ = sorted(by_call, key=lambda call: usualness[call], reverse=True)
    is_tie = usualness[usual] == usualness[second]
    odd = tuple(rank for call, ranks in by_call.items() if is_tie or call != usual for rank in ranks)
    places = "; ".join(f"{name_ranks(ranks)} in {place}" for place, ranks in by_place.items())
    if not is_tie and usual is not None and {*by_call} <= {usual, None, *past}:
        left_out = next(entry.text for entry in entries.values() if entry and entry.call == usual)
        return Verdict(MISSING_CALL, odd, f"{name_ranks(odd)} did not call {left_out}: {places}", SAME_CALLS)
    is_same_operation = len({entry and entry.operation for entry in entries.values()}) == 1
    kind = OTHER_SHAPE if is_same_operation else OTHER_OPERATION
    who = "the ranks do not call the same" if is_tie else f"{name_ranks(odd)}: {kind} than the other ranks"
    return Verdict(kind, odd, f"{who}: {places}", SAME_CALLS)


def table(facts: Sequence[Facts], verdict: Verdict) -> list[str]:
    """One line a rank, after a header. Of many ranks some are left out, but not those whose fault it is."""
    rows, ordered = [HEADER], sorted(facts, key=lambda rank: (rank.rank not in verdict.ranks, rank.rank))
    for rank in sorted(ordered[:MOST_ROWS], key=lambda rank: rank.rank):
        call, where = rank.waits_in, "not known"
        call = f"{call[: WIDEST_CALL - 3]}..." if len(call) > WIDEST_CALL else call
        if rank.at is not None:
            where = f"{'/'.join(Path(rank.at.file).parts[-2:])}:{rank.at.line} in {rank.at.function}"
        where += f" (loader worker {rank.worker})" * bool(rank.worker)
        state = rank.mute or ("computes" if rank.busy else "waits" if rank.waits else "sleeps")
        rows.append((str(rank.rank), str(rank.pid), state, rank.phase, str(rank.place.step), call, where))
    left_out = len(facts) - MOST_ROWS
    return [*aligned(rows), *[f"and {left_out} other ranks"] * (left_out > 0)]


def name_ranks(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def parse_stack(text: str, of_crash: bool = False) -> list[Frame]:
    """The stack of the main thread, which faulthandler writes last. of_crash: of the thread that has crashed."""
    _, *blocks = re.split(r"^(Current thread|Thread) 0x.*$", text, flags=re.M)
    chosen = blocks.index("Current thread") + 1 if of_crash and "Current thread" in blocks else -1
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', blocks[chosen] if blocks else "", re.M)
    return [Frame(file, int(line), function) for file, line, function in lines]


def parse_calls(texts: Sequence[str | bytes]) -> list[Collective]:
    """torch's records (JSON: gloo's, NCCL's) -> the collectives, in order of time. An unreadable one has none: the
    format is private to torch."""
    found: list[tuple[int, Collective]] = []
    with suppress(ValueError, KeyError, TypeError):
        for backend, text in enumerate(texts):
            for entry in json.loads(text)["entries"]:
                name, number = str(entry["profiling_name"]), int(entry["collective_seq_id"])
                operation, group = name.rpartition(":")[2], f"{backend}/{entry['process_group'][0]}"
                finished = bool(entry["retired"]) or entry["state"] == "completed"  # gloo's stay "scheduled"
                sizes = entry["input_sizes"] or entry["output_sizes"]
                dtypes = entry["input_dtypes"] or entry["output_dtypes"]
                shape = ", ".join(f"{tuple(size)} {dtype}" for size, dtype in zip(sizes, dtypes, strict=False))
                text = f"{operation} of {shape}" if shape else operation
                call = text if {name, operation} & SAME_SHAPES else operation
                if entry["is_p2p"]:  # the other end is one rank, and numbers do not fit together
                    group, number = f"{backend}/{operation}/{len(found)}", 1
                if not (finished and entry["is_p2p"]):
                    collective = Collective(group, number, operation, text, call, finished)
                    found.append((int(entry["time_created_ns"]), collective))
    return [call for _, call in sorted(found)]
