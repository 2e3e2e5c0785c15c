"""How long a silence is a hang, and what it is found to be, from what is known of the ranks."""

import json
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.compat import flight_records
from lockstep.failures import verdict as verdicts
from lockstep.failures.record import PHASES, Frame, heartbeat
from lockstep.failures.verdict import Facts, find_verdict, parse_calls, parse_stack, table
from lockstep.failures.watchdog import SILENCE, Watchdog
from lockstep.source_code import PROJECT

TORCH = "/x/site-packages/torch"
USER = (Frame("/home/me/net.py", 7, "forward"),)
IN_TORCH = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 3913, "all_reduce"), *USER)
IN_BACKWARD = (Frame(f"{TORCH}/autograd/graph.py", 850, "_engine_run_backward"),)
IN_FSDP = (Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 300, "post_backward"),)
IN_PROJECT = (Frame(f"{PROJECT}/snapshots/files.py", 30, "write"),)
COMPILES = (Frame(f"{TORCH}/_inductor/codecache.py", 3, "compile"),)
STEP = [("all_reduce", [3]), ("all_reduce", [100])]


def record(*calls: Any, finished: bool = False, group: str = "0") -> str:
    """A flight record as torch writes it, whose last call has not ended unless `finished` says otherwise."""
    entries = []
    for number, (operation, sizes) in enumerate(calls, start=1):
        entry = {"process_group": [group, "default_pg"], "is_p2p": False, "collective_seq_id": number}
        entry |= {"profiling_name": f"gloo:{operation}", "state": "scheduled", "time_created_ns": 10**18 + number}
        entry |= {f"{side}_sizes": [sizes] for side in ("input", "output")}
        entry |= {f"{side}_dtypes": ["Float"] for side in ("input", "output")}
        entries.append(entry | {"retired": number < len(calls) or finished})
    return json.dumps({"entries": entries})


def facts(rank, stack=USER, *records, values=0, phase="train", busy=False, mute="", worker=0) -> Facts:
    place = PHASES.index(phase), 0, 0, 1, 5
    return Facts(rank, "h", 100 + rank, place, busy, mute, worker, stack, parse_calls(records, values))


def waits(rank: int, *calls: Any) -> Facts:
    return facts(rank, IN_TORCH, record(*calls))


def found(*ranks: Facts) -> tuple[str, tuple[int, ...]]:
    verdict = find_verdict(ranks, len(ranks))
    return verdict.kind, verdict.ranks


@pytest.mark.parametrize(
    ("guilty", "kind"),
    [
        (facts(1, (), mute=verdicts.GONE), "a rank has died"),
        (facts(1, (), mute=verdicts.STOPPED), "a rank is stopped"),
        (facts(1, USER, mute=verdicts.NO_ANSWER), verdicts.USER_CODE),
        (facts(1, IN_PROJECT, mute=verdicts.NO_ANSWER), "a rank does not answer"),
        (facts(1, USER, mute=verdicts.NO_ANSWER, busy=True), verdicts.SLOW),
        (facts(1, USER), verdicts.USER_CODE),
        (facts(1, USER, busy=True), verdicts.SLOW),  # an evaluation of one's own may compute for minutes
        (facts(1, USER, worker=7), verdicts.USER_CODE),
        (facts(1, IN_PROJECT), verdicts.MISSING_CALL),
        (facts(1, IN_PROJECT, busy=True), verdicts.SLOW),
        (facts(1, IN_BACKWARD, record(*STEP), busy=True), verdicts.SLOW),
        (facts(1, IN_FSDP, record(*STEP[:1]), busy=True), verdicts.SLOW),
        (facts(1, COMPILES), verdicts.SLOW),
        (facts(1, (Frame("/usr/lib/python3/bdb.py", 3, "dispatch_line"), *USER)), verdicts.SLOW),
    ],
)
def test_one_rank_is_not_where_the_others_wait(guilty: Facts, kind: str) -> None:
    assert found(waits(0, *STEP), guilty) == (kind, (1,))


PAST, NCCL = STEP * 3, record(*STEP, ("all_reduce", [7]))
DONE, SPUN, ONE = (record(*calls, finished=True) for calls in (PAST, STEP, STEP[:1]))
BOTH = [facts(rank, IN_TORCH, record(*STEP, finished=True), record(*STEP, group="1")) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("ranks", "kind", "odd"),
    [
        ([waits(0, *PAST, STEP[0]), waits(1, *PAST, STEP[1])], verdicts.MISSING_CALL, (1,)),
        ([waits(0, *PAST, STEP[0]), waits(1, *PAST, ("broadcast", [3]))], verdicts.OTHER_OPERATION, (1,)),
        ([waits(0, *PAST, STEP[0]), waits(1, *PAST, ("all_reduce", [5]))], verdicts.OTHER_SHAPE, (1,)),
        ([waits(rank, *PAST, ("all_gather", [3 + (rank == 1)])) for rank in range(3)], verdicts.OTHER_SHAPE, (1,)),
        # Nothing says which of them is right.
        ([waits(rank, ("all_reduce", [3 + rank])) for rank in (0, 1)], verdicts.OTHER_SHAPE, (0, 1)),
        ([*(waits(rank, *STEP) for rank in (0, 2, 3)), facts(1, IN_TORCH, ONE)], verdicts.MISSING_CALL, (1,)),
        # The network was cut off after rank 1 sent its part: the others have ended its call, and wait in the next one.
        ([waits(0, *STEP[:1] * 5), waits(1, *STEP[:1] * 4)], verdicts.UNKNOWN, ()),
        ([waits(0, *STEP[:1] * 5), waits(1, *STEP[:1] * 3, ("all_reduce", [9]))], verdicts.OTHER_SHAPE, (1,)),
        # A rank is not missed in a process group of others.
        ([*BOTH, facts(2, USER, record(*STEP, finished=True))], verdicts.USER_CODE, (2,)),
        # A sum through shared memory beside a collective.
        ([waits(0, *PAST, STEP[0]), facts(1, IN_PROJECT, DONE, values=1000)], verdicts.MISSING_CALL, (1,)),
        ([waits(0, *PAST, ("all_reduce", [9])), facts(1, IN_PROJECT, DONE, values=9)], verdicts.OTHER_OPERATION, (0,)),
        ([facts(rank, IN_PROJECT, DONE, values=9 + rank) for rank in (0, 1)], verdicts.OTHER_SHAPE, (0, 1)),
        # A host that waits for a GPU waits although it spins. NCCL's calls are in a record of their own.
        ([facts(0, (), DONE, NCCL, busy=True), facts(1, USER, DONE, SPUN)], verdicts.USER_CODE, (1,)),
        ([facts(rank, (), DONE, NCCL, busy=True) for rank in (0, 1)], verdicts.UNKNOWN, ()),
    ],
)
def test_ranks_in_different_collectives(ranks: list[Facts], kind: str, odd: tuple[int, ...]) -> None:
    assert found(*ranks) == (kind, odd)


def test_what_may_only_be_slow_or_elsewhere_does_not_end_the_run() -> None:
    assert find_verdict([waits(0, *STEP), facts(1)], 2).ends
    rows = [
        [waits(0, *STEP), waits(1, *STEP)],  # backend.timeout ends it
        [waits(0, *STEP), facts(1, phase="prepare")],  # a download may take hours
        [waits(0, *STEP), facts(1, IN_PROJECT, phase="prepare")],
        [facts(0, IN_PROJECT), facts(1, IN_PROJECT)],  # a disk, perhaps
        [waits(0, *STEP), facts(1, busy=True)],
    ]
    assert [ranks for ranks in rows if find_verdict(ranks, 2).ends] == []
    assert "nothing is known of ranks 2 and 3" in find_verdict([waits(0, *STEP), waits(1, *STEP)], 4).meaning


def test_the_table_of_many_ranks_shows_the_one_whose_fault_it_is() -> None:
    ranks = [*(waits(rank, *STEP) for rank in range(40)), facts(40, USER)]
    lines = table(ranks, find_verdict(ranks, 41))
    assert [line.split()[0] for line in lines[1:-1]] == [*map(str, range(15)), "40"]
    assert lines[-1] == "and 25 other ranks"


def test_a_flight_record_of_another_torch_has_no_calls() -> None:
    for text in ("", "{}", "[]", "3", '{"entries": [{"new": 1}]}', '{"entries": 3}'):
        assert parse_calls([text]) == []
    assert len(flight_records()) == 1 + torch.distributed.is_nccl_available()


def test_the_main_threads_stack_is_read_whichever_thread_took_the_signal() -> None:
    text = 'Current thread 0x01 (most recent call first):\n  File "/a.py", line 1 in f\n\n'
    text += 'Thread 0x02 [python] (most recent call first):\n  File "/b.py", line 2 in g\n  File "/c.py", line 3 in h\n'
    assert [frame.line for frame in parse_stack(text)] == [2, 3]
    assert [frame.line for frame in parse_stack(text, of_crash=True)] == [1]
    # gloo and NCCL end a process in threads that run no Python.
    text = text[text.index("Thread") :]
    assert [frame.line for frame in parse_stack(f"Fatal Python error: Aborted\n\n{text}", of_crash=True)] == [2, 3]


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A watchdog of this process with watch.timeout=10, whose `examined` counts."""
    heartbeat.begin()
    world = SimpleNamespace(here={0: os.getpid()}, rank=0, size=1, machines=[0], timeout=300.0)
    made: Any = Watchdog(world, lambda: None, 10.0, "stop", None)
    made.examined = []
    monkeypatch.setattr(made, "examine", lambda: made.examined.append(made.silence))
    yield made
    heartbeat.begin()


# The phase, the steps before it, watch.timeout, the seconds of silence, and whether the ranks are looked at then.
# Where backend.timeout, 300 s, ends a wait, a look comes at 80 % of it; a typed watch.timeout may be longer.
SILENCES = """
train 5 10 12 yes | train 5 10 9 no | train 5 280 278 no | train 5 280 283 yes | train 0 10 12 yes
evaluation 5 10 12 yes | snapshot 5 10 90 no | snapshot 5 30 238 no | snapshot 5 30 243 yes | prepare 0 10 290 no
disk 5 10 290 no | disk 5 10 303 yes | end 5 10 1000 no
"""
ROWS = [row.split() for row in SILENCES.strip().replace("\n", "|").split("|")]
ROWS += [["train", 5, None, SILENCE - 2, "no"], ["train", 5, None, SILENCE + 3, "yes"]]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_how_long_a_rank_may_be_silent(row: list[Any], dog: Any) -> None:
    phase, steps, timeout, silent, examined = row
    dog.timeout, now = timeout and float(timeout), dog.last_look
    for step in range(int(steps)):
        heartbeat.step_ended(1, step)
        dog.look(now)
    heartbeat.enter(phase)
    for second in range(int(silent) + 1):
        dog.look(now + second)
    assert bool(dog.examined) == (examined == "yes")


def test_a_slow_first_step_is_told_once_and_a_pause_is_no_silence(dog: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Only that step may take longer. After Ctrl-Z, or a laptop's sleep, a look counts as one second."""
    heartbeat.enter("train")
    for seconds in (0, 1, 1, 1, 300, 300, 300):
        dog.look(dog.last_look + seconds)
    assert (dog.examined, dog.limit()) == ([], 100.0)
    for silence in (12.0, 14.0):
        dog.silence = silence
        (thread := threading.Thread(target=Watchdog.examine, args=(dog,))).start()
        thread.join()
    assert caplog.text.count("and the run goes on: rank 0 is in user code, at ") == 1
    assert "test_watchdog.py:" in caplog.text
    heartbeat.step_ended(1, 1)
    dog.look(dog.last_look)
    assert dog.limit() == 10.0
