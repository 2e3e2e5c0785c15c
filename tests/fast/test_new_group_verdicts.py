"""Ranks that form a process group meet at the store. If they wait there: is a rank missing, or is it the store?"""

from lockstep.failures.verdict import Frame, Kind, RankFacts, find_verdict
from lockstep.source_code import PROJECT

USER = Frame("/home/me/net.py", 7, "forward")
TORCH = "/x/site-packages/torch/distributed/distributed_c10d.py"
MAKES_GROUP = (Frame(TORCH, 669, "_create_gloo_process_group"), USER)
IN_PROJECT = (Frame(f"{PROJECT}/snapshots/files.py", 30, "write"),)


def verdict(*stacks: tuple[Frame, ...], world_size: int = 2) -> tuple[Kind, tuple[int, ...]]:
    facts = []
    for rank, frames in enumerate(stacks):
        lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]
        text = "\n".join(["Current thread 0x01 (most recent call first):", *lines])
        facts.append(RankFacts(rank, 100 + rank, "S", "train", 5, 60.0, answers=True, stacks=text))
    found = find_verdict(facts, world_size)
    return found.kind, found.ranks


def test_all_ranks_wait_for_the_store() -> None:
    assert verdict(MAKES_GROUP, MAKES_GROUP) == (Kind.STORE, (0, 1))


def test_a_rank_of_another_machine_may_be_missing() -> None:
    assert verdict(MAKES_GROUP, MAKES_GROUP, world_size=4) == (Kind.ELSEWHERE, ())


def test_a_rank_does_not_come_to_the_new_group() -> None:
    assert verdict(MAKES_GROUP, (USER,)) == (Kind.USER_CODE, (1,))
    assert verdict(MAKES_GROUP, IN_PROJECT) == (Kind.MISSING_CALL, (1,))
