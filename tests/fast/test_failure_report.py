"""The failure report: which rank it names, what it means, what its file holds, how long its screen is."""

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.failures import report as reports
from lockstep.failures.explain import explain_exception
from lockstep.failures.record import Heartbeat, exception_record
from lockstep.failures.report import failures_in, make_report, read_report, resume_command, screen, tell
from lockstep.source_code import PROJECT
from lockstep.tasks.tasks import CrossEntropy
from lockstep.training.rng import SampleDraws
from support.commands import ROOT

TORCH = Path(torch.__file__).parent
ENGINE = TORCH / "autograd/graph.py", "_engine_run_backward"
COMMAND = ["python", "src/train.py"]


def raised(error: Exception, file: Path = Path(__file__), function: str = "f", inner: Path | None = None) -> Exception:
    """`error` as if a function of `file` had raised it, or one of `inner` which that has called."""
    values: dict[str, Any] = {}
    exec(compile("def g(error):\n    raise error\n", str(inner), "exec"), values)
    body = "raise error" if inner is None else "g(error)"
    exec(compile(f"def {function}(error):\n    {body}\n", str(file), "exec"), values)
    return error_of(lambda: values[function](error))


def error_of(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def lost() -> Exception:
    return raised(ConnectionError("rank 1 is gone"), PROJECT / "distributed/shared_memory.py")


Fail = Callable[..., dict[str, Any]]


@pytest.fixture
def fail(tmp_path: Path) -> Fail:
    """fail(rank, error, time) -> its record; without an error, of a rank that ended without a word, with this code."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()

    def record(rank: int, error: Exception | None = None, at: float = 0.0, code: int | None = -9, **known: Any) -> Any:
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


def report_of(*failures: dict[str, Any]) -> dict[str, Any]:
    report = make_report(failures, COMMAND)
    assert report is not None
    return report


def test_a_lost_peer_is_an_echo_whatever_the_clock_says(fail: Fail) -> None:
    wrong = raised(RuntimeError("no grad_fn"), *ENGINE)
    rows = [
        ([fail(0, lost(), 1.0), fail(1, at=1.1)], (1, "killed")),
        ([fail(0, lost(), 1.0), fail(1, ValueError("x"), 1.1)], (1, "exception")),
        ([fail(0, ValueError("x"), 1.0), fail(1, ValueError("x"), 0.9)], (1, "exception")),
        ([fail(0, lost(), 1.0), fail(2, at=5.0, code=0)], (2, "left")),
        ([fail(0, lost(), 1.0), fail(1, lost(), 0.9)], (1, "exception")),
        ([fail(0, lost(), 1.1), fail(1, wrong, 1.0)], (1, "exception")),  # torch waits for ranks there, too
        ([fail(0, at=2.0, code=-6), fail(1, ZeroDivisionError(), 1.0)], (1, "exception")),
    ]
    for failures, found in rows:
        first = report_of(*failures)["first"]
        assert (first["rank"], first["kind"]) == found


def test_an_echo_is_known_by_its_type_and_place() -> None:
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


def test_the_operation_and_its_operands_are_found() -> None:
    """`SampleDraws` sees each operation of torch, and is no communication."""
    features, head = torch.ones(3, 4), torch.nn.Linear(5, 2)
    with pytest.raises(RuntimeError) as caught, SampleDraws().of(0, 4, 8):
        head(features) + 1
    record = exception_record(caught.value)
    assert (record["is_echo"], record["file"], record["code"]) == (False, __file__, "head(features) + 1")
    assert record["operands"]["features"] == "(3, 4) float32"
    assert record["operands"]["head"].startswith("Linear(in_features=5")
    task = CrossEntropy(loss=torch.nn.CrossEntropyLoss(weight=torch.ones(3), reduction="none"))
    with pytest.raises(RuntimeError) as caught, SampleDraws().of(0, 4, 8):
        task.sums(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    assert caught.tb is not None
    record = exception_record(caught.value.with_traceback(caught.tb.tb_next))  # without the line of this file
    assert not record["is_echo"]
    assert record["file"].startswith(str(PROJECT / "tasks"))


def test_an_error_is_explained(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    images, linear = torch.zeros(2, 1, 8, 8), torch.nn.Linear(8, 2)
    rows = [
        (error_of(lambda: torch.nn.Conv2d(1, 2, 3)(images.long())), "x.astype(numpy.float32)"),
        (error_of(lambda: linear(images.long())), "x.astype(numpy.float32)"),
        (error_of(lambda: linear(images.to(torch.bool))), "whole numbers or truth values"),
        (error_of(lambda: linear(images.to(torch.uint16))), "whole numbers or truth values"),
        (error_of(lambda: torch.ones(2).sum().backward()), "depends on no weight that is trained"),
        (RuntimeError("modified by an inplace operation"), "write x = x + y"),
        (RuntimeError("Expected to mark a variable ready only once"), "use_reentrant=False"),
        (RuntimeError("Expected to have finished reduction"), "find_unused_parameters=true"),
        (RuntimeError("Expected more than 1 value per channel when training"), "leaves no single sample over"),
    ]
    for error, said in rows:
        assert said in "; ".join(explain_exception(exception_record(error)))
    monkeypatch.setattr(reports, "oom_kills", lambda file: 10**9)
    for code in (-signal.SIGKILL, None):  # None: its starter has asked for it before
        first = fail(0, at=1.0, code=code)
        assert (first["kind"], first["signal"], "no memory left" in first["meaning"]) == ("killed", "SIGKILL", True)


def test_the_newest_snapshot_and_the_steps_that_are_lost(fail: Fail, tmp_path: Path) -> None:
    """Of another folder until this one has one; a copy of a snapshot is none."""
    found, elsewhere = [], ["/runs/first/snapshots/step_00000014", 14]
    for known in ({}, {"resumed": elsewhere}, {"resumed": elsewhere}):
        run = report_of(fail(0, **known))["run"]
        found.append((run["newest_snapshot"], run["steps_lost"] if known else None))
        for name in ["step_00000010", "step_00000010_copy"] * (len(found) == 2):
            (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert found == [(None, None), (elsewhere[0], 3), (str(tmp_path / "snapshots/step_00000010"), 7)]


def test_failure_json_is_written_once_and_an_echo_gives_way_to_another_machine(fail: Fail, tmp_path: Path) -> None:
    own, there, later = fail(0, lost(), 1.0), fail(1, ValueError("the cause"), 1.5), fail(2, ValueError("later"), 1.6)
    for one in (there, own, later):
        report, prints = tell(None, COMMAND, one)
        assert ((report or {})["first"]["message"], prints) == ("the cause", True)
    (tmp_path / "failure.json").write_text(json.dumps(report_of(own)))
    tell(None, COMMAND, there)
    report = read_report(tmp_path) or {}
    assert report["first"]["message"] == "the cause"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failure.json", "ranks"]


def test_the_file_has_these_keys_and_the_screen_at_most_40_lines(fail: Fail, tmp_path: Path) -> None:
    fail(0, lost())
    fail(1, raised(ValueError("x")))
    tell(tmp_path / "ranks", COMMAND, {"is_echo": False})
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


def test_the_command_that_resumes_names_the_folder_and_no_secret() -> None:
    """mpirun hands values to its ranks."""
    plain = ["python", "src/train.py", "optimizer.lr=0.1", "hydra.run.dir=b"]
    assert resume_command(plain, "/runs/a") == "python src/train.py optimizer.lr=0.1 hydra.run.dir=/runs/a"
    typed = shlex.split(resume_command(plain, "/runs/prüf/k=v"))[-1]
    assert OverridesParser.create().parse_override(typed).value() == "/runs/prüf/k=v"
    script = "from lockstep.failures.report import typed_command; print(ascii(typed_command('mpirun')))"
    words = ["-x", "WANDB_API_KEY=hunter2", "-x", "MASTER_ADDR=node0", "lr=0.1", "folder-\udcff"]
    parent = ["mpirun", "-c", f'{sys.executable} -c "{script}"; true', *words]
    found = subprocess.run(parent, executable="/bin/bash", cwd=ROOT / "src", capture_output=True, text=True, check=True)
    shown = "'-x', 'WANDB_API_KEY', '-x', 'MASTER_ADDR=node0', 'lr=0.1', 'folder-\\ufffd']\n"
    assert found.stdout.endswith(shown)
