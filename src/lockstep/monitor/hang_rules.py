"""From the facts of all ranks of a machine to one verdict. Pure functions: each rule knows one kind of hang."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.monitor.hang_collectives import Collective, Difference, first_difference
from lockstep.monitor.hang_evidence import RankFacts
from lockstep.monitor.hang_stack import LOADERS
from lockstep.monitor.hang_verdict import Kind, Verdict, at, name_ranks

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
