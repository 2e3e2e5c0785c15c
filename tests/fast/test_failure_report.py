"""Failures and hangs: which rank is named, what it means, what a report holds, and how long a silence is a hang."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.data.loader import Batch, LoadedPart, Progress
from lockstep.failures import report as reports
from lockstep.failures import verdict as verdicts
from lockstep.failures.explain import explain_exception
from lockstep.failures.record import PHASES, Frame, Heartbeat, exception_record, heartbeat
from lockstep.failures.report import failures_in, make_report, resume_command, screen, tell
from lockstep.failures.verdict import Facts, find_verdict, parse_calls, table
from lockstep.failures.watchdog import SILENCE, Watchdog
from lockstep.files import PROJECT
from lockstep.training.rng import Draws
from support.commands import ROOT

TORCH = Path(torch.__file__).parent
ENGINE = TORCH / "autograd/graph.py", "_engine_run_backward"


def raised(error, file=Path(__file__), function="f", inner=None):
    """`error` as if a function of `file` had raised it, or one of `inner` which that has called."""
    values = {}
    exec(compile("def g(error):\n    raise error\n", str(inner), "exec"), values)
    body = "raise error" if inner is None else "g(error)"
    exec(compile(f"def {function}(error):\n    {body}\n", str(file), "exec"), values)
    return error_of(lambda: values[function](error))


def error_of(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def lost():
    return raised(ConnectionError("rank 1 is gone"), PROJECT / "distributed/shared_memory.py")


@pytest.fixture
def fail(tmp_path):
    """fail(rank, error, time) -> its record; without an error, of a rank that ended without a word, with this code."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()

    def record(rank, error=None, at=0.0, code=-9, **known):
        beats = Heartbeat()
        beats.begin(rank, 3)
        beats.record |= {"run_dir": str(tmp_path)} | known
        beats.enter("train", lambda: [3, 4], 2)
        beats.step_ended(2, 17)
        (ranks / f"rank{rank}.at").write_bytes(beats.memory)
        beats.folder = ranks
        beats.note()
        if error is not None:
            beats.fails(error)
            return beats.record | {"time": at}
        found = failures_in(ranks, {rank: {"exit_code": code, "time": at, "is_echo": False}})
        return next(one for one in found if one["rank"] == rank)

    return record


def report_of(*failures):
    report = make_report(failures)
    assert report is not None
    return report


def test_an_echo_is_known_by_its_type_and_place():
    handled, itself = raised(ValueError("handled badly")), ValueError("from itself")
    handled.__cause__, itself.__cause__ = lost(), itself
    changed = deque([1])
    work = SimpleNamespace(wait=iter(changed).__next__)  # its RuntimeError comes from C++, as that of a collective
    changed.append(2)
    with pytest.raises(RuntimeError) as waited:
        work.wait()
    echoes = [
        lost(),
        handled,
        waited.value,
        raised(TimeoutError("any words"), PROJECT / "distributed/store.py"),
        raised(RuntimeError("any words"), TORCH / "distributed/distributed_c10d.py"),
        raised(torch.distributed.DistBackendError("NCCL error")),
        raised(RuntimeError("any words"), *ENGINE),
        raised(RuntimeError("a gradient is missing"), TORCH / "nn/parallel/distributed.py"),
        raised(RuntimeError("of an operator"), TORCH / "distributed/x.py", inner=TORCH / "_ops.py"),
        raised(TimeoutError("a socket"), PROJECT / "distributed/store.py", inner=Path(socket.__file__)),
        raised(RuntimeError("in compiled code"), Path("/tmp/torchinductor_me/ab/cab.py")),
    ]
    causes = [
        itself,
        raised(RuntimeError("of an operator"), TORCH / "nn/functional.py", inner=TORCH / "_ops.py"),
        raised(TimeoutError("a socket"), inner=Path(socket.__file__)),
        raised(RuntimeError("Connection closed by peer")),  # the user's own, whatever it says
        raised(ConnectionError("Connection closed by peer: a server of the user's")),
        raised(ValueError("a bad argument"), TORCH / "distributed/distributed_c10d.py"),
        raised(RuntimeError("a shape"), PROJECT / "models/mlp.py"),
        raised(ConnectionError("a download"), PROJECT / "data/download.py"),
    ]
    assert [error for error in echoes if not exception_record(error)["is_echo"]] == []
    assert [error for error in causes if exception_record(error)["is_echo"]] == []


def test_the_operation_and_its_operands_are_found():
    """`Draws` sees each operation of torch, and is no communication."""
    features, head = torch.ones(3, 4), torch.nn.Linear(5, 2)
    draws = Draws(0, torch.device("cpu"), True, Progress())
    part = LoadedPart(0, 0, None, None, torch.arange(4))
    with pytest.raises(RuntimeError) as caught, draws.of_part(part, Batch(0, 8, [])):
        head(features) + 1
    record = exception_record(caught.value)
    assert (record["is_echo"], record["file"], record["code"]) == (False, __file__, "head(features) + 1")
    assert record["operands"]["features"] == "(3, 4) float32"
    assert record["operands"]["head"].startswith("Linear(in_features=5")


def test_an_error_is_explained(fail, monkeypatch):
    images, linear = torch.zeros(2, 1, 8, 8), torch.nn.Linear(8, 2)
    transformer = torchvision.models.VisionTransformer(32, 16, 1, 1, 4, 4)
    rows = [
        (error_of(lambda: transformer(images.expand(-1, 3, -1, -1))), "type +model.image_size=<pixels>"),
        (error_of(lambda: torch.nn.Conv2d(1, 2, 9)(images)), "the images are too small"),
        (error_of(lambda: torch.nn.MaxPool2d(9)(images)), "the images are too small"),
        (error_of(lambda: torch.nn.Conv2d(1, 2, 3)(images.long())), "x.astype(numpy.float32)"),
        (error_of(lambda: linear(images.long())), "x.astype(numpy.float32)"),
        (error_of(lambda: linear(images.to(torch.bool))), "whole numbers or truth values"),
        (error_of(lambda: linear(images.to(torch.uint16))), "whole numbers or truth values"),
        (error_of(lambda: torch.ones(2).sum().backward()), "depends on no weight that is trained"),
        (RuntimeError("modified by an inplace operation"), "write x = x + y"),
        (RuntimeError("Expected to mark a variable ready only once"), "use_reentrant=False"),
        (RuntimeError("Expected to have finished reduction"), "find_unused_parameters=true"),
        (RuntimeError("Expected more than 1 value per channel when training"), "leaves no single sample over"),
        (TypeError("LBFGS.step() missing 1 required positional argument: 'closure'"), "type optimizer=adamw or"),
    ]
    for error, said in rows:
        assert said in "; ".join(explain_exception(exception_record(error)))
    of_node = exception_record(ValueError("no such net")) | {"file": str(PROJECT / "config/check.py")}
    assert "the values beside that _target_" in explain_exception(of_node)[1]
    monkeypatch.setattr(reports, "oom_kills", lambda file: 10**9)
    for code in (-signal.SIGKILL, None):  # None: its starter has asked for it before
        first = fail(0, at=1.0, code=code)
        assert (first["kind"], first["signal"], "no memory left" in first["meaning"]) == ("killed", "SIGKILL", True)


def test_the_newest_snapshot_and_the_steps_that_are_lost(fail, tmp_path):
    """Of another folder until this one has one; a copy of a snapshot is none."""
    found, elsewhere = [], ["/runs/first/snapshots/step_00000014", 14]
    for known in ({}, {"resumed": elsewhere}, {"resumed": elsewhere}):
        run = report_of(fail(0, **known))["run"]
        found.append((run["newest_snapshot"], run["steps_lost"] if known else None))
        for name in ["step_00000010", "step_00000010_copy"] * (len(found) == 2):
            (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert found == [(None, None), (elsewhere[0], 3), (str(tmp_path / "snapshots/step_00000010"), 7)]


def test_the_file_has_these_keys_and_the_screen_at_most_40_lines(fail, tmp_path):
    fail(0, lost())
    fail(1, raised(ValueError("x")))
    tell(tmp_path / "ranks", {"is_echo": False})
    contents = json.loads((tmp_path / "failure.json").read_text())
    assert set(contents) == {"schema", "first", "consequences", "world_size", "run", "will_fail_again", "exit_code"}
    known = "rank host pid phase log log_lines kind type message is_echo meaning advice time file line function code"
    assert {*known.split(), "operands"} <= contents["first"].keys()
    assert [contents["first"][key] for key in ("epoch", "step", "samples")] == [2, 17, [3, 4]]
    assert set(contents["run"]) == {"folder", "newest_snapshot", "steps_lost", "resume", "time"}
    (other,) = contents["consequences"]
    assert set(other) == {"rank", "host", "pid", "seconds_later", "what"}
    assert (other["rank"], other["what"]) == (0, "ConnectionError: rank 1 is gone")
    words = RuntimeError("\n".join(f"line {number}" for number in range(200)))
    many = [fail(number + 1, lost(), 2.0) for number in range(30)]
    failing = fail(0, words, 1.0) | {"log": "rank0.log", "log_lines": [f"log {'x' * 500}" for _ in range(20)]}
    hang = failing | {"kind": "hang", "table": ["row"] * 18, "verdict": "v", "silent_seconds": 9.0}
    for first in (failing, hang, failing | {"kind": "diverged"}):
        lines = screen(report_of(first, *many)).splitlines()
        assert (len(lines) <= 40, max(map(len, lines)) <= 160, lines[-2][:12]) == (True, True, "run folder: ")


def test_the_command_that_resumes_names_the_folder_and_no_secret(monkeypatch):
    """mpirun hands values to its ranks."""
    monkeypatch.setattr(sys, "argv", ["src/train.py", "optimizer.lr=0.1", "hydra.run.dir=b"])
    python = os.path.basename(sys.executable)
    assert resume_command("/runs/a") == f"{python} src/train.py optimizer.lr=0.1 hydra.run.dir=/runs/a"
    typed = shlex.split(resume_command("/runs/prüf/k=v"))[-1]
    assert OverridesParser.create().parse_override(typed).value() == "/runs/prüf/k=v"
    script = "from lockstep.failures.report import heartbeat, resume_command; heartbeat.begin(0, 1, 'mpirun')"
    script += "; import shlex; print(ascii(shlex.split(resume_command('a'))))"
    words = ["-x", "WANDB_API_KEY=hunter2", "-x", "MASTER_ADDR=node0", "lr=0.1", "folder-\udcff"]
    parent = ["mpirun", "-c", f'{sys.executable} -c "{script}"; true', *words]
    found = subprocess.run(parent, executable="/bin/bash", cwd=ROOT / "src", capture_output=True, text=True, check=True)
    shown = "'-x', 'WANDB_API_KEY', '-x', 'MASTER_ADDR=node0', 'lr=0.1', 'folder-\\ufffd', 'hydra.run.dir=a']\n"
    assert found.stdout.endswith(shown)


LIBRARY = "/x/site-packages/torch"
USER = (Frame("/home/me/net.py", 7, "forward"),)
IN_TORCH = (Frame(f"{LIBRARY}/distributed/distributed_c10d.py", 3913, "all_reduce"), *USER)
IN_BACKWARD = (Frame(f"{LIBRARY}/autograd/graph.py", 850, "_engine_run_backward"),)
IN_FSDP = (Frame(f"{LIBRARY}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 300, "post_backward"),)
IN_SUM = (Frame(f"{PROJECT}/distributed/shared_memory.py", 90, "_wait_for_all"), *USER)
IN_PROJECT = (Frame(f"{PROJECT}/snapshots/files.py", 30, "write"),)
COMPILES = (Frame(f"{LIBRARY}/_inductor/codecache.py", 3, "compile"),)
STEP = [("all_reduce", [3]), ("all_reduce", [100])]


def record(*calls, finished=False, group="0"):
    """A flight record as torch writes it, whose last call has not ended unless `finished` says otherwise."""
    entries = []
    for number, (operation, sizes) in enumerate(calls, start=1):
        entry = {"process_group": [group, "default_pg"], "is_p2p": False, "collective_seq_id": number}
        entry |= {"profiling_name": f"gloo:{operation}", "state": "scheduled", "time_created_ns": 10**18 + number}
        entry |= {f"{side}_sizes": [sizes] for side in ("input", "output")}
        entry |= {f"{side}_dtypes": ["Float"] for side in ("input", "output")}
        entries.append(entry | {"retired": number < len(calls) or finished})
    return json.dumps({"entries": entries})


def facts(rank, stack=USER, *records, phase="train", busy=False, mute="", worker=0):
    place = PHASES.index(phase), 0, 1, 5
    return Facts(rank, "h", 100 + rank, place, busy, mute, worker, stack, parse_calls(records))


def waits(rank, *calls):
    return facts(rank, IN_TORCH, record(*calls))


ONE_OF_TWO = [  # beside rank 0, which waits in its last call
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
]
PAST, NCCL = STEP * 3, record(*STEP, ("all_reduce", [7]))
DONE, SPUN, ONE = (record(*calls, finished=True) for calls in (PAST, STEP, STEP[:1]))
BOTH = [facts(rank, IN_TORCH, record(*STEP, finished=True), record(*STEP, group="1")) for rank in (0, 1)]


IN_CALLS = [
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
    ([waits(0, *PAST, STEP[0]), facts(1, IN_SUM, DONE)], verdicts.MISSING_CALL, (1,)),
    ([waits(0, *PAST, ("all_reduce", [9])), facts(1, IN_SUM, DONE)], verdicts.OTHER_OPERATION, (0,)),
    # A host that waits for a GPU waits although it spins. NCCL's calls are in a record of their own.
    ([facts(0, (), DONE, NCCL, busy=True), facts(1, USER, DONE, SPUN)], verdicts.USER_CODE, (1,)),
    ([facts(rank, (), DONE, NCCL, busy=True) for rank in (0, 1)], verdicts.UNKNOWN, ()),
]
IN_CALLS += [([waits(0, *STEP), guilty], kind, (1,)) for guilty, kind in ONE_OF_TWO]


@pytest.mark.parametrize(("ranks", "kind", "odd"), IN_CALLS)
def test_what_a_hang_is_and_whose(ranks, kind, odd):
    verdict = find_verdict(ranks, len(ranks))
    assert (verdict.kind, verdict.ranks) == (kind, odd)


def test_what_may_only_be_slow_or_elsewhere_does_not_end_the_run():
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


def test_the_table_of_many_ranks_shows_the_one_whose_fault_it_is():
    ranks = [*(waits(rank, *STEP) for rank in range(40)), facts(40, USER)]
    lines = table(ranks, find_verdict(ranks, 41))
    assert [line.split()[0] for line in lines[1:-1]] == [*map(str, range(15)), "40"]
    assert lines[-1] == "and 25 other ranks"


@pytest.fixture
def dog(monkeypatch):
    """A watchdog of this process with watch.timeout=10, whose `examined` counts."""
    heartbeat.begin()
    world = SimpleNamespace(here={0: os.getpid()}, rank=0, size=1, machines=[0], timeout=300.0)
    made = Watchdog(world, lambda: None, 10.0, "stop", None)
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
def test_how_long_a_rank_may_be_silent(row, dog):
    phase, steps, timeout, silent, examined = row
    dog.timeout, now = timeout and float(timeout), dog.last_look
    for step in range(int(steps)):
        heartbeat.step_ended(1, step)
        dog.look(now)
    heartbeat.enter(phase)
    for second in range(int(silent) + 1):
        dog.look(now + second)
    assert bool(dog.examined) == (examined == "yes")


def test_a_slow_first_step_is_told_once_and_a_pause_is_no_silence(dog, caplog):
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
    assert "test_failure_report.py:" in caplog.text
    heartbeat.step_ended(1, 1)
    dog.look(dog.last_look)
    assert dog.limit() == 10.0
