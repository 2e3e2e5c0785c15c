"""How long a silence is a hang, and what it is found to be, from what is known of the ranks."""

import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.compat import flight_records
from lockstep.failures import verdict as verdicts
from lockstep.failures.record import Heartbeat
from lockstep.failures.verdict import Facts, Frame, find_verdict, parse_calls, parse_stack, table
from lockstep.failures.watchdog import SILENCE, Watchdog
from lockstep.source_code import PROJECT

TORCH = "/x/site-packages/torch"
USER = (Frame("/home/me/net.py", 7, "forward"),)
IN_TORCH = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 3913, "all_reduce"), *USER)
IN_BACKWARD = (Frame(f"{TORCH}/autograd/graph.py", 850, "_engine_run_backward"),)
IN_PROJECT = (Frame(f"{PROJECT}/snapshots/files.py", 30, "write"),)
COMPILES = (Frame(f"{TORCH}/_inductor/codecache.py", 3, "compile"),)
STEP = [("all_reduce", [3]), ("all_reduce", [100])]


def record(*calls: Any, finished: bool = False, group: str = "0") -> str:
    """A flight record as torch writes it, whose last call has not ended unless `finished` says otherwise."""
    entries = [
        {
            "process_group": [group, "default_pg"],
            "is_p2p": False,
            "collective_seq_id": number,
            "profiling_name": f"gloo:{operation}",
            "input_sizes": [sizes],
            "input_dtypes": ["Float"],
            "output_sizes": [sizes],
            "output_dtypes": ["Float"],
            "retired": number < len(calls) or finished,
            "state": "scheduled",
            "time_created_ns": 10**18 + number,
        }
        for number, (operation, sizes) in enumerate(calls, start=1)
    ]
    return json.dumps({"entries": entries})


def facts(rank: int, stack: Any = USER, *records: str, values: int = 0, **more: Any) -> Facts:
    return Facts(rank, "h", 100 + rank, "train", 5, stack=stack, calls=parse_calls(records, values), **more)


def waits(rank: int, *calls: Any) -> Facts:
    return facts(rank, IN_TORCH, record(*calls))


def found(*ranks: Facts, world_size: int | None = None) -> tuple[str, tuple[int, ...]]:
    verdict = find_verdict(ranks, world_size or len(ranks))
    return verdict.kind, verdict.ranks


IN_FSDP = (Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 300, "post_backward"),)


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


def test_ranks_in_different_collectives() -> None:
    history = STEP * 3
    in_first = waits(0, *history, STEP[0])
    assert found(in_first, waits(1, *history, STEP[1])) == (verdicts.MISSING_CALL, (1,))
    assert found(in_first, waits(1, *history, ("broadcast", [3]))) == (verdicts.OTHER_OPERATION, (1,))
    assert found(in_first, waits(1, *history, ("all_reduce", [5]))) == (verdicts.OTHER_SHAPE, (1,))
    gathered, larger = (waits(rank, *history, ("all_gather", [3 + rank])) for rank in (0, 1))
    assert found(gathered, replace(gathered, rank=2), larger) == (verdicts.OTHER_SHAPE, (1,))
    both = [waits(rank, ("all_reduce", [3 + rank])) for rank in (0, 1)]
    assert found(*both) == (verdicts.OTHER_SHAPE, (0, 1))  # nothing says which of them is right
    others = [replace(in_first, rank=rank) for rank in (0, 2, 3)]
    assert found(*others, facts(1, IN_TORCH, record(*STEP[:1], finished=True)))[1] == (1,)


def test_a_rank_that_waits_in_a_call_of_all_ranks_has_left_out_none() -> None:
    """Its network was cut off after it sent its part: the others have ended this call, and wait in the next one."""
    history = STEP[:1] * 5
    ahead, behind = waits(0, *history), waits(1, *history[:-1])
    assert found(ahead, behind) == (verdicts.UNKNOWN, ())
    assert found(ahead, replace(ahead, rank=2), behind) == (verdicts.UNKNOWN, ())
    assert found(ahead, waits(1, *history[:-2], ("all_reduce", [9]))) == (verdicts.OTHER_SHAPE, (1,))


def test_a_rank_is_not_missed_in_a_process_group_of_others() -> None:
    everybody, group = record(*STEP, finished=True), record(*STEP, group="1")
    ranks = [facts(rank, IN_TORCH, everybody, group) for rank in (0, 1)]
    assert found(*ranks, facts(2, USER, everybody)) == (verdicts.USER_CODE, (2,))


def test_a_sum_through_shared_memory_beside_a_collective() -> None:
    history = STEP[:1] * 3
    in_sum = facts(1, IN_PROJECT, record(*history, finished=True), values=1000)
    assert found(waits(0, *history, STEP[0]), in_sum) == (verdicts.MISSING_CALL, (1,))
    assert found(waits(0, *history, ("all_reduce", [9])), in_sum) == (verdicts.OTHER_OPERATION, (0,))
    larger = facts(0, IN_PROJECT, record(*history, finished=True), values=2000)
    assert found(larger, in_sum) == (verdicts.OTHER_SHAPE, (0, 1))


def test_what_may_only_be_slow_or_elsewhere_does_not_end_the_run() -> None:
    waiting = waits(0, *STEP)
    rows = [
        ((waiting, facts(1)), True),
        ((waiting, waits(1, *STEP)), False),  # backend.timeout ends it
        ((waiting, replace(facts(1), phase="prepare")), False),  # a download may take hours
        ((waiting, replace(facts(1, IN_PROJECT), phase="prepare")), False),
        ((facts(0, IN_PROJECT), facts(1, IN_PROJECT)), False),  # a disk, perhaps
        ((waiting, facts(1, busy=True)), False),
    ]
    assert [find_verdict(ranks, 2).ends for ranks, _ in rows] == [ends for _, ends in rows]
    assert "nothing is known of ranks 2 and 3" in find_verdict([waiting, waits(1, *STEP)], 4).meaning


def test_a_host_that_waits_for_a_gpu_waits_although_it_spins() -> None:
    """NCCL's calls are in a record of their own."""
    gloo, nccl = record(*STEP, finished=True), record(*STEP, ("all_reduce", [7]))
    waiting = facts(0, (), gloo, nccl, busy=True)
    assert waiting.waits
    assert str(waiting.unfinished) == "all_reduce of (7,) Float"
    behind = facts(1, USER, gloo, record(*STEP, finished=True))
    assert found(waiting, behind) == (verdicts.USER_CODE, (1,))
    assert found(waiting, replace(waiting, rank=1)) == (verdicts.UNKNOWN, ())


def test_the_table_of_many_ranks_shows_the_one_whose_fault_it_is() -> None:
    ranks = [*(waits(rank, *STEP) for rank in range(40)), facts(40, USER)]
    lines = table(ranks, find_verdict(ranks, 41))
    assert [line.split()[0] for line in lines[1:-1]] == [*map(str, range(15)), "40"]
    assert lines[-1] == "and 25 other ranks"


def test_a_flight_record_of_another_torch_has_no_calls() -> None:
    for text in ("", "{}", "[]", "3", '{"entries": [{"new": 1}]}', '{"entries": 3}'):
        assert parse_calls([text]) == ()


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_both_records_are_asked_for() -> None:
    assert len(flight_records()) == 2


def test_the_main_threads_stack_is_read_whichever_thread_took_the_signal() -> None:
    text = 'Current thread 0x01 (most recent call first):\n  File "/a.py", line 1 in f\n\n'
    text += 'Thread 0x02 [python] (most recent call first):\n  File "/b.py", line 2 in g\n  File "/c.py", line 3 in h\n'
    assert [frame.line for frame in parse_stack(text, "0x02")] == [2, 3]
    assert [frame.line for frame in parse_stack(text)] == [1]


def watchdog(heartbeat: Heartbeat, timeout: float | None) -> Watchdog:
    return Watchdog({0: os.getpid()}, 1, heartbeat, [0], lambda: None, timeout, "stop", 300.0, None)  # type: ignore


@pytest.mark.parametrize(
    ("phase", "steps", "timeout", "silent", "examined"),
    [
        ("train", 5, 10.0, 12, True),
        ("train", 5, 10.0, 9, False),
        ("train", 5, 280.0, 278, False),  # more than 80 % of backend.timeout, but typed
        ("train", 5, 280.0, 283, True),
        ("train", 0, 10.0, 12, True),  # the first step: a line says where it is
        ("evaluation", 5, 10.0, 12, True),
        ("snapshot", 5, 10.0, 90, False),
        ("snapshot", 5, 30.0, 238, False),
        ("snapshot", 5, 30.0, 243, True),  # 80 % of backend.timeout
        ("prepare", 0, 10.0, 290, False),
        ("disk", 5, 10.0, 290, False),
        ("disk", 5, 10.0, 303, True),
        ("meeting", 0, 10.0, 1000, False),
        ("end", 5, 10.0, 1000, False),
        ("train", 5, None, int(SILENCE) - 2, False),
        ("train", 5, None, int(SILENCE) + 3, True),
    ],
)
def test_how_long_a_rank_may_be_silent(
    phase: str, steps: int, timeout: float | None, silent: int, examined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat, found = Heartbeat(), list[float]()
    dog = watchdog(heartbeat, timeout)
    monkeypatch.setattr(dog, "examine", lambda: found.append(dog.silence))
    now = dog.last_look
    for step in range(steps):
        heartbeat.step_ended(1, step)
        dog.look(now)
    heartbeat.enter(phase)
    dog.look(now)
    for second in range(1, silent + 1):
        dog.look(now + second)
    assert bool(found) == examined


def test_only_the_first_step_may_take_longer() -> None:
    """Also if others ended before the first look."""
    heartbeat = Heartbeat()
    dog = watchdog(heartbeat, 10.0)
    heartbeat.enter("train")
    dog.look(dog.last_look)
    assert dog.limit() == 100.0
    heartbeat.step_ended(1, 1)
    dog = watchdog(heartbeat, 10.0)
    dog.look(dog.last_look)
    assert dog.limit() == 10.0


def test_a_slow_first_step_is_told_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat()
    heartbeat.enter("train")
    dog = watchdog(heartbeat, 10.0)
    dog.look(dog.last_look)
    for silence in (12.0, 14.0):
        dog.silence = silence
        (thread := threading.Thread(target=dog.examine)).start()
        thread.join()
    assert caplog.text.count("and the run goes on: rank 0 is in user code, at ") == 1
    assert "test_watchdog.py:" in caplog.text


def test_a_pause_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, or a laptop that sleeps: a look after a long time counts as one second."""
    heartbeat, found = Heartbeat(), list[float]()
    dog = watchdog(heartbeat, 10.0)
    monkeypatch.setattr(dog, "examine", lambda: found.append(dog.silence))
    heartbeat.enter("train")
    for now in (0.0, 1.0, 2.0, 1000.0, 1001.0, 1002.0):
        dog.look(dog.last_look + 1 if now < 3 else dog.last_look + 300)
    assert not found


def test_an_own_fact_has_the_line_and_no_cpu(tmp_path: Path) -> None:
    heartbeat = Heartbeat()
    heartbeat.enter("train")
    dog = watchdog(heartbeat, 10.0)
    dog.look(0.0)
    own = dog._own_facts()
    assert own.stack[0].file.startswith(str(PROJECT))
    assert __file__ in [frame.file for frame in own.stack]
    assert sys.platform != "linux" or not own.mute
