"""From what is known of the ranks that hang to one verdict."""

import json
from dataclasses import replace

import pytest
import torch

from lockstep.compat import flight_records
from lockstep.failures.verdict import (
    Diagnosis,
    FlightRecord,
    Frame,
    Kind,
    RankFacts,
    find_verdict,
    parse_records,
    parse_stack,
)
from lockstep.source_code import PROJECT

TORCH = "/x/site-packages/torch"
USER = (Frame("/home/me/net.py", 7, "forward"),)
IN_TORCH = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 3913, "all_reduce"), *USER)
IN_BACKWARD = (Frame(f"{TORCH}/autograd/graph.py", 850, "_engine_run_backward"),)
IN_FSDP = (Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 300, "post_backward"),)
IN_PROJECT = (Frame(f"{PROJECT}/snapshots/files.py", 30, "write"),)
COMPILES = (Frame(f"{TORCH}/_inductor/codecache.py", 3, "compile"),)
MAKES_GROUP = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 669, "_create_gloo_process_group"), *USER)
AT_STORE = (Frame(f"{TORCH}/distributed/rendezvous.py", 60, "_create_c10d_store"),)
IN_SWEEP = (*IN_PROJECT, Frame(f"{PROJECT.parent}/hydra_plugins/lockstep_sweeper/_jobs.py", 80, "run"))
STEP = [("all_reduce", [3]), ("all_reduce", [100])]


def record(*calls, finished=None):
    """A flight record as torch writes it, whose last call has not ended unless `finished` says otherwise."""
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "is_p2p": False,
            "collective_seq_id": number,
            "profiling_name": f"gloo:{operation}",
            "input_sizes": [sizes],
            "input_dtypes": ["Float"],
            "output_sizes": [sizes],
            "output_dtypes": ["Float"],
            "retired": number < len(calls) or bool(finished),
            "state": "scheduled",
            "time_created_ns": 10**18,
        }
        for number, (operation, sizes) in enumerate(calls, start=1)
    ]
    status = {"0": {"last_enqueued_collective": str(len(calls)), "last_completed_collective": str(len(calls) - 1)}}
    return json.dumps([{"entries": entries, "pg_status": status}])


def stacks(*frames):
    """As faulthandler writes them."""
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]
    return "\n".join(["Current thread 0x01 (most recent call first):", *lines, ""])


def facts(rank, stack=IN_TORCH, state="S", **more):
    return RankFacts(rank, 100 + rank, state, "train", 5, 60.0, stacks=stacks(*stack), **more)


def waits(rank, *calls, **more):
    return facts(rank, records=record(*calls), **more)


def verdict(*ranks, world_size=None):
    found = find_verdict(ranks, world_size or len(ranks))
    return found.kind, found.ranks


@pytest.mark.parametrize(
    ("guilty", "kind"),
    [
        (facts(1, state="Z"), Kind.DEAD),
        (facts(1, (), state="T"), Kind.STOPPED),
        (facts(1, (), state="t"), Kind.SLOW),  # a debugger
        (facts(1, USER, state="D"), Kind.USER_CODE),
        (facts(1, USER), Kind.USER_CODE),
        (facts(1, IN_PROJECT, worker=(7, stacks(*USER))), Kind.USER_CODE),
        (facts(1, IN_PROJECT), Kind.MISSING_CALL),
        (facts(1, IN_SWEEP), Kind.MISSING_CALL),
        (replace(facts(1, IN_PROJECT, state="D"), phase="disk"), Kind.MISSING_CALL),
        (facts(1, IN_PROJECT, state="R"), Kind.SLOW),
        (facts(1, IN_PROJECT, children_run=True), Kind.SLOW),
        (facts(1, IN_BACKWARD, state="R", records=record(*STEP)), Kind.SLOW),
        (facts(1, IN_FSDP, state="R", records=record(*STEP[:1])), Kind.SLOW),
        (facts(1, IN_FSDP, state="R", records=record(*STEP[:1], finished=True)), Kind.SLOW),
        (facts(1, COMPILES), Kind.SLOW),
        (facts(1, COMPILES, state="D"), Kind.SLOW),
        (facts(1, (Frame("/usr/lib/python3/bdb.py", 3, "dispatch_line"), *USER)), Kind.SLOW),
        (facts(1, AT_STORE), Kind.STORE),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_one_rank_is_not_where_the_others_wait(guilty, kind):
    assert verdict(waits(0, *STEP), guilty) == (kind, (1,))


def test_ranks_in_different_collectives():
    history = STEP * 3
    in_first = waits(0, *history, STEP[0])
    assert verdict(in_first, waits(1, *history, STEP[1])) == (Kind.MISSING_CALL, (1,))
    assert verdict(in_first, waits(1, *history, ("broadcast", [3]))) == (Kind.OTHER_OPERATION, (1,))
    assert verdict(in_first, waits(1, *history, ("all_reduce", [5]))) == (Kind.OTHER_SHAPE, (1,))
    gathered, larger = (waits(rank, *history, ("all_gather", [3 + rank])) for rank in (0, 1))
    assert verdict(gathered, replace(gathered, rank=2), larger) == (Kind.OTHER_SHAPE, (1,))
    others = [replace(in_first, rank=rank) for rank in (0, 2, 3)]
    assert verdict(*others, facts(1, records=record(*STEP[:1], finished=True))) == (Kind.MISSING_CALL, (1,))


def test_a_rank_that_waits_in_a_call_of_all_ranks_has_left_out_none():
    """Its network was cut off after it sent its part: the others have ended this call, and wait in the next one."""
    history = STEP[:1] * 5
    ahead, behind = waits(0, *history), waits(1, *history[:-1])
    assert verdict(ahead, behind) == (Kind.UNKNOWN, ())
    assert verdict(ahead, replace(ahead, rank=2), behind) == (Kind.UNKNOWN, ())
    other = waits(1, *history[:-2], ("all_reduce", [9]))
    assert verdict(ahead, other) == (Kind.OTHER_SHAPE, (1,))


def test_a_rank_is_not_missed_in_a_process_group_of_others():
    everybody, group = json.loads(record(*STEP, finished=True)), json.loads(record(*STEP))
    for entry in group[0]["entries"]:
        entry["process_group"] = ["1", "model_parallel"]
    ranks = [facts(rank, records=json.dumps(everybody + group)) for rank in (0, 1)]
    outside = facts(2, USER, records=record(*STEP, finished=True))
    assert verdict(*ranks, outside) == (Kind.USER_CODE, (2,))


def test_a_sum_through_shared_memory_beside_a_collective():
    history = STEP[:1] * 3
    in_sum = facts(1, records=record(*history, finished=True), sum_values=1000)
    assert verdict(waits(0, *history, STEP[0]), in_sum) == (Kind.MISSING_CALL, (1,))
    assert verdict(waits(0, *history, ("all_reduce", [9])), in_sum) == (Kind.OTHER_OPERATION, (0,))
    larger = replace(in_sum, rank=0, sum_values=2000)
    assert verdict(larger, in_sum) == (Kind.OTHER_SHAPE, (0, 1))


def test_nobody_here_is_guilty():
    assert verdict(waits(0, *STEP), waits(1, *STEP), world_size=4) == (Kind.ELSEWHERE, ())
    assert verdict(waits(0, *STEP), waits(1, *STEP)) == (Kind.UNKNOWN, ())


def test_what_may_only_be_slow_does_not_end_the_run():
    def is_certain(*ranks, world_size=2):
        return Diagnosis(find_verdict(ranks, world_size), ranks, 60.0).is_certain

    waiting = waits(0, *STEP)
    assert is_certain(waiting, facts(1, USER))
    assert not is_certain(waiting, waits(1, *STEP))  # all wait alike: backend.timeout ends it
    assert not is_certain(waiting, replace(facts(1, USER), phase="prepare"))  # a download may take hours
    assert not is_certain(waiting, waits(1, *STEP), world_size=4)  # a rank of another machine may compile


def test_ranks_that_form_a_process_group_meet_at_the_store():
    """If they wait there: is a rank missing, or is it the store?"""
    making = [facts(rank, MAKES_GROUP) for rank in (0, 1)]
    assert verdict(*making) == (Kind.STORE, (0, 1))
    assert verdict(*making, world_size=4) == (Kind.ELSEWHERE, ())
    assert verdict(making[0], facts(1, USER)) == (Kind.USER_CODE, (1,))
    assert verdict(making[0], facts(1, IN_PROJECT)) == (Kind.MISSING_CALL, (1,))


def test_the_table_of_many_ranks_shows_the_one_whose_fault_it_is():
    ranks = [*(waits(rank, *STEP) for rank in range(40)), facts(40, USER)]
    table = Diagnosis(find_verdict(ranks, 41), tuple(ranks), 60.0).table()
    assert [line.split()[0] for line in table[1:-1]] == [*map(str, range(15)), "40"]
    assert table[-1] == "and 25 other ranks"


def test_a_flight_record_of_another_torch_is_an_empty_one():
    for text in ("", "{}", "[]", "[3]", '[{"entries": [{"new": 1}]}]', '[{"entries": 3}]'):
        assert parse_records(text) == FlightRecord()


def test_the_main_threads_stack_is_read_whichever_thread_took_the_signal():
    text = 'Current thread 0x01 (most recent call first):\n  File "/a.py", line 1 in f\n\n'
    text += 'Thread 0x02 [python] (most recent call first):\n  File "/b.py", line 2 in g\n  File "/c.py", line 3 in h\n'
    assert [frame.line for frame in parse_stack(text, "0x02").frames] == [2, 3]
    assert [frame.line for frame in parse_stack(text).frames] == [1]


def test_a_host_that_waits_for_a_gpu_waits_although_it_spins():
    """NCCL's calls are in a record of their own; `.cpu()` spins, so that the process runs."""
    gloo, nccl = json.loads(record(*STEP, finished=True)), json.loads(record(*STEP, ("all_reduce", [7])))
    in_loss = (Frame(__file__, LINE_OF_CPU, "f"),)
    waiting = facts(0, in_loss, state="R", records=json.dumps(gloo + nccl))
    assert waiting.is_waiting
    assert waiting.call() == "all_reduce of (7,) Float"
    behind = facts(1, USER, records=json.dumps(gloo + json.loads(record(*STEP, finished=True))))
    assert verdict(waiting, behind) == (Kind.USER_CODE, (1,))
    assert verdict(waiting, replace(waiting, rank=1)) == (Kind.UNKNOWN, ())


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_both_records_are_asked_for():
    assert len(flight_records()) == 2


def test_ranks_that_neither_wait_nor_compute_are_shown_with_all_stacks():
    found = Diagnosis(find_verdict([facts(0, IN_PROJECT), facts(1, IN_PROJECT)], 2), (facts(0, IN_PROJECT),), 60.0)
    assert (found.verdict.kind, found.verdict.ranks) == (Kind.UNKNOWN, (0, 1))
    assert found.stacks()["0"][0].startswith(f"{PROJECT}/snapshots/files.py:30 in write")


def the_loss_of(outputs):
    return outputs.cpu()


LINE_OF_CPU = the_loss_of.__code__.co_firstlineno + 1
