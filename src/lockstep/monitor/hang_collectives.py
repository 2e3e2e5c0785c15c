"""The collectives of the ranks by torch's flight recorder: what each waits in, and where the ranks differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
