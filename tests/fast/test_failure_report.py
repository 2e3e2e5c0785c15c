"""The failure report: which rank it names, what its file holds, how long its screen is."""

import json
import os
import shlex
import signal
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.failures.causes import explain_exception
from lockstep.failures.channel import SIZE, ProgressPage, Reader, create_unnamed_file
from lockstep.failures.monitored_rank import MonitoredRank
from lockstep.failures.record import exception_record
from lockstep.failures.report import (
    MonitorOptions,
    Report,
    read_report,
    remove_report,
    resume_command,
    screen,
    will_fail_again,
    write_report,
)
from lockstep.source_code import PROJECT
from lockstep.tasks.tasks import CrossEntropy
from lockstep.training.rng import SampleDraws

LOST = "rank 1 is gone: closed by peer"
TORCH = Path(torch.__file__).parent


def raised(error: Exception, file: Path = Path(__file__), function: str = "f") -> Exception:
    """`error` as if a function of `file` had raised it."""
    code = f"def {function}(error):\n    raise error\n"
    values: dict[str, Any] = {}
    exec(compile(code, str(file), "exec"), values)
    with pytest.raises(type(error)) as caught:
        values[function](error)
    return caught.value


def raised_below(file: Path, error: Exception, inner: Path) -> Exception:
    """`error` as if a function of `inner` had raised it, which a function of `file` has called."""
    values: dict[str, Any] = {}
    exec(compile("def g(error):\n    raise error\n", str(inner), "exec"), values)
    exec(compile("def f(g, error):\n    g(error)\n", str(file), "exec"), values)
    with pytest.raises(type(error)) as caught:
        values["f"](values["g"], error)
    return caught.value


def lost(message: str = LOST) -> Exception:
    return raised(ConnectionError(message), PROJECT / "distributed/shared_memory.py")


@pytest.fixture
def make_rank() -> Iterator[Any]:
    """make_rank(number, error=None, at=0.0, **what is known of its end) -> a MonitoredRank that has ended."""
    with ExitStack() as stack:

        def make(number: int, error: Exception | None = None, at: float = 0.0, **known: Any) -> MonitoredRank:
            here, there = socket.socketpair()
            page = create_unnamed_file("page", SIZE)
            hello = {"rank": number, "world_size": 3, "pid": 100 + number, "host": "h"}
            rank = MonitoredRank(hello, here, Reader(here), ProgressPage(page), create_unnamed_file("stacks"))
            os.close(page)
            there.close()
            stack.callback(here.close)
            stack.callback(os.close, rank.stacks)
            rank.page.step_ended(2, 17)
            rank.died_at = at
            if error is not None:
                rank.failure = exception_record(error) | {"time": at, "samples": [3, 4]}
            for name, value in known.items():
                setattr(rank, name, value)
            return rank

        yield make


def report_of(*ranks: MonitoredRank, folder: Path | None = None) -> Report:
    found = write_report(ranks, None if folder is None else str(folder), MonitorOptions(), None)
    assert found is not None
    return found


def first_rank(*ranks: MonitoredRank) -> tuple[int, str]:
    first = report_of(*ranks)["first"]
    return first["rank"], first["kind"]


def test_a_model_for_colour_images_that_gets_grey_ones_is_told_so(make_rank):
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Conv2d(3, 8, 3)(torch.zeros(2, 1, 8, 8))
    first = report_of(make_rank(0, caught.value, 1.0))["first"]
    assert first["meaning"] == "the images have another number of channels than the model was made for"
    assert "in loader.transforms" in first["advice"]


def test_a_lost_peer_is_a_consequence_whatever_the_clock_says(make_rank):
    assert first_rank(make_rank(0, lost(), 1.0), make_rank(1, at=1.1, exit_code=-9)) == (1, "killed")
    assert first_rank(make_rank(0, lost(), 1.0), make_rank(1, ValueError("x"), 1.1)) == (1, "exception")
    assert first_rank(make_rank(0, ValueError("x"), 1.0), make_rank(1, ValueError("x"), 0.9)) == (1, "exception")
    assert first_rank(make_rank(0, ends_well=True), make_rank(1, at=5.0, exit_code=0)) == (1, "left")
    assert first_rank(make_rank(0, lost(), 1.0), make_rank(1, lost(), 0.9)) == (1, "exception")


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_communication"),
    [
        (lost("any words"), True),
        (raised(TimeoutError("any words"), PROJECT / "distributed/store.py"), True),
        (raised(RuntimeError("any words"), TORCH / "distributed/distributed_c10d.py"), True),
        (raised(torch.distributed.DistBackendError("NCCL error")), True),
        (raised(RuntimeError("any words"), TORCH / "autograd/graph.py", "_engine_run_backward"), True),
        (raised(RuntimeError("a gradient is missing"), TORCH / "nn/parallel/distributed.py"), True),
        (chained(raised(ValueError("handled badly")), lost()), True),
        (chained(one := ValueError("from itself"), one), False),
        (raised_below(TORCH / "distributed/x.py", RuntimeError("of an operator"), TORCH / "_ops.py"), True),
        (raised_below(TORCH / "nn/functional.py", RuntimeError("of an operator"), TORCH / "_ops.py"), False),
        (raised_below(PROJECT / "distributed/store.py", TimeoutError("a socket"), Path(socket.__file__)), True),
        (raised_below(Path(__file__), TimeoutError("a socket"), Path(socket.__file__)), False),
        (raised(RuntimeError("in compiled code"), Path("/tmp/torchinductor_me/ab/cab.py")), True),
        (raised(RuntimeError("Connection closed by peer")), False),  # the user's own, whatever it says
        (raised(ConnectionError("Connection closed by peer: a server of the user's")), False),
        (raised(RuntimeError("a shape"), TORCH / "nn/functional.py"), False),
        (raised(ValueError("a bad argument"), TORCH / "distributed/distributed_c10d.py"), False),
        (raised(RuntimeError("a shape"), PROJECT / "models/mlp.py"), False),
        (raised(ConnectionError("a download"), PROJECT / "data/download.py"), False),
    ],
    ids=lambda value: "" if isinstance(value, bool) else f"{type(value).__name__} {value}",
)
def test_an_error_of_communication_is_known_by_its_type_and_place(error, is_communication):
    assert exception_record(error)["is_communication"] == is_communication


def test_the_place_of_a_mistake_in_a_watched_forward_pass_is_the_line_that_calls_the_operation():
    """`SampleDraws` sees each operation of torch, and is no communication."""
    features, weight = torch.ones(4, 2), torch.ones(3, 3)
    with pytest.raises(RuntimeError) as caught, SampleDraws().of(0, 4, 8):
        features @ weight
    record = exception_record(caught.value)
    assert (record["is_communication"], record["file"]) == (False, __file__)
    assert record["operands"] == {"features": "(4, 2) float32", "weight": "(3, 3) float32"}

    loss = torch.nn.CrossEntropyLoss(weight=torch.ones(3), reduction="none")
    task = CrossEntropy(loss=loss)
    with pytest.raises(RuntimeError) as caught, SampleDraws().of(0, 4, 8):
        task.sums(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    assert caught.tb is not None
    record = exception_record(caught.value.with_traceback(caught.tb.tb_next))  # without the line of this file
    assert not record["is_communication"]
    assert record["file"].startswith(str(PROJECT / "tasks"))


def test_the_users_own_wait_for_a_collective_is_communication():
    """Its RuntimeError comes from C++, so that the innermost frame is the user's."""
    changed = deque([1])
    work = SimpleNamespace(wait=iter(changed).__next__)
    changed.append(2)
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    assert exception_record(caught.value)["is_communication"]


def test_a_mistake_in_a_backward_pass_is_first_by_its_time(make_rank):
    """Torch waits for other ranks there, too, so its place tells nothing."""
    wrong = raised(RuntimeError("no grad_fn"), TORCH / "autograd/graph.py", "_engine_run_backward")
    assert first_rank(make_rank(0, lost(), 1.1), make_rank(1, wrong, 1.0)) == (1, "exception")
    assert first_rank(make_rank(0, wrong, 1.0), make_rank(1, at=1.1, exit_code=-9)) == (1, "killed")


def test_a_rank_that_failed_by_itself_is_first_even_if_its_end_took_too_long(make_rank):
    slow = make_rank(1, ZeroDivisionError(), 1.0, exit_code=-9, killed_by_monitor=True)
    assert first_rank(make_rank(0, at=2.0, exit_code=-6), slow) == (1, "exception")


def test_a_copy_of_a_snapshot_is_not_the_newest(make_rank, tmp_path):
    (tmp_path / "snapshots").mkdir()
    for name in ("step_00000010", "step_00000010_copy"):
        (tmp_path / "snapshots" / name).mkdir()
    run = report_of(make_rank(0, at=1.0, exit_code=-9), folder=tmp_path)["run"]
    assert run["newest_snapshot"].endswith("step_00000010")
    assert run["steps_lost"] == 7


def test_a_snapshot_of_another_folder_counts_until_this_folder_has_one(make_rank, tmp_path):
    rank = make_rank(0, at=1.0, exit_code=-9)  # after step 17
    rank.note({"resumed": ["/runs/first/snapshots/step_00000014", 14]})
    run = report_of(rank, folder=tmp_path)["run"]
    assert (run["newest_snapshot"], run["steps_lost"]) == ("/runs/first/snapshots/step_00000014", 3)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots/step_00000016").touch()
    run = report_of(rank, folder=tmp_path)["run"]
    assert (Path(run["newest_snapshot"]).name, run["steps_lost"]) == ("step_00000016", 1)


def test_a_report_about_a_lost_rank_gives_way_to_that_of_the_other_machine(make_rank, tmp_path):
    own, there = make_rank(0, lost(), 1.0), make_rank(1, ValueError("the cause"), 1.5)
    report_of(there, folder=tmp_path)
    assert first_rank(own) == (0, "exception")
    assert report_of(own, folder=tmp_path)["first"]["message"] == "the cause"
    assert json.loads((tmp_path / "failure.json").read_text())["first"]["message"] == "the cause"


def test_an_error_of_the_users_own_is_reported_beside_that_of_another_machine(make_rank, tmp_path):
    report_of(make_rank(1, lost(), 0.5), folder=tmp_path)
    own = raised(ConnectionError("Connection closed by peer: a server of the user's"))
    report_of(make_rank(0, own, 1.0), folder=tmp_path)
    assert json.loads((tmp_path / "failure.json").read_text())["first"]["message"] == str(own)


def test_the_phase_is_the_one_in_which_the_rank_failed(make_rank):
    rank = make_rank(0, ZeroDivisionError(), 1.0)
    rank.failure["phase"] = "train"
    rank.page.enter("disk")  # it closes its files
    assert report_of(rank)["first"]["phase"] == "train"


@pytest.mark.parametrize("code", [-signal.SIGKILL, None])  # None: Slurm has asked for the exit code before the monitor
def test_a_kill_that_the_kernel_has_counted_is_told_as_its_cause(make_rank, code):
    first = report_of(make_rank(0, at=1.0, exit_code=code, out_of_memory=True))["first"]
    assert (first["kind"], first["signal"]) == ("killed", "SIGKILL")
    assert "no memory left" in first["meaning"]


def test_no_report_without_a_failure(make_rank):
    ranks = [make_rank(0, ends_well=True), make_rank(1, ends_well=True)]
    assert write_report(ranks, None, MonitorOptions(), None) is None


@pytest.mark.parametrize("file", [PROJECT / "models/mlp.py", PROJECT.parent / "hydra_plugins/x.py", Path(__file__)])
def test_an_exception_is_the_users_only_where_the_line_is(make_rank, file):
    error = raised(KeyError("x"), file)
    assert error.__traceback__ is not None
    own = error.with_traceback(error.__traceback__.tb_next)  # without the line of this file
    first = report_of(make_rank(0, own, 1.0))["first"]
    assert (first["meaning"] == "the code at this line raised this exception") == (file == Path(__file__))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Expected to mark a variable ready only once. This", "use_reentrant=False"),
        ("Expected more than 1 value per channel when training, as one process does", "leaves no single sample over"),
        ("The NVIDIA driver on your system is too old (found version 12040). Please update", "580 or newer"),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG", "backend.debug=WARN"),
    ],
)
def test_an_error_of_torch_is_explained(make_rank, words, said):
    assert said in report_of(make_rank(0, raised(RuntimeError(words), Path(__file__)), 1.0))["first"]["advice"]


def test_the_file_has_these_keys(make_rank, tmp_path):
    contents = report_of(make_rank(0, lost(), 2.0), make_rank(1, ValueError("x"), 1.5), folder=tmp_path)
    assert set(contents) == {"schema", "first", "consequences", "world_size", "run", "will_fail_again", "exit_code"}
    position = {"rank", "host", "pid", "epoch", "step", "phase", "log", "log_lines"}
    assert position | {"kind", "type", "message", "is_communication"} <= set(contents["first"])
    assert {"meaning", "advice", "samples", "time"} <= set(contents["first"])
    assert set(contents["run"]) == {"folder", "newest_snapshot", "steps_lost", "resume", "time"}
    assert contents["consequences"] == [
        {"rank": 0, "host": "h", "pid": 100, "seconds_later": 0.5, "what": f"ConnectionError: {LOST}"}
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"failure.json", "failure.txt"}


def test_the_screen_has_at_most_40_lines(make_rank):
    words = RuntimeError("\n".join(f"line {number}" for number in range(200)))
    many = [make_rank(number + 1, lost(), 2.0) for number in range(30)]
    failing = make_rank(0, words, 1.0)
    assert failing.failure is not None
    failing.failure["log_lines"] = [f"log {number} {'x' * 500}" for number in range(20)]
    failing.log = "rank0.log"
    lines = screen(report_of(failing, *many)).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 160
    failing.failure |= {"kind": "diverged", "message": "\n".join(f"line {number}" for number in range(200))}
    lines = screen(report_of(failing, *many)).splitlines()
    assert len(lines) <= 40
    assert lines[-2].startswith("run folder: ")


def test_the_operation_and_its_operands_are_found():
    import torch

    features, head = torch.ones(3, 4), torch.nn.Linear(5, 2)
    with pytest.raises(RuntimeError) as failed:
        head(features) + 1
    record = exception_record(failed.value)
    assert record["file"] == __file__
    assert record["operation"] == "head(features)"
    assert record["operands"]["features"] == "(3, 4) float32"
    assert record["operands"]["head"].startswith("Linear(in_features=5")


def test_the_same_failure_at_the_same_step_will_come_again():
    def report(step: int, kind: str = "exception", line: int = 3) -> dict[str, Any]:
        return {"first": {"kind": kind, "type": "ValueError", "file": "a.py", "line": line, "step": step}}

    assert not will_fail_again(None, report(3))
    assert will_fail_again(report(3), report(3))
    assert not will_fail_again(report(3), report(9))
    assert not will_fail_again(report(3), report(3, line=4))
    assert not will_fail_again(report(3, "killed"), report(3, "killed"))


def test_a_run_that_ends_well_takes_the_report_of_an_earlier_start_away(make_rank, tmp_path):
    report_of(make_rank(0, ValueError("x"), 1.0), folder=tmp_path)
    (tmp_path / "hang.txt").touch()
    before = read_report(tmp_path)
    assert before is not None
    assert before["first"]["message"] == "x"
    remove_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert read_report(tmp_path) is None


def test_the_command_that_resumes_names_the_folder():
    folder = Path("/runs/a")
    plain = ["python", "src/train.py", "optimizer.lr=0.1", "hydra.run.dir=b"]
    assert resume_command(plain, folder) == "python src/train.py optimizer.lr=0.1 hydra.run.dir=/runs/a"
    torchrun = ["python", "-m", "torch.distributed.run", "src/train.py"]
    assert resume_command(torchrun, folder).endswith("src/train.py hydra.run.dir=/runs/a")
    typed = shlex.split(resume_command(plain, Path("/runs/prüf/k=v")))[-1]
    assert OverridesParser.create().parse_override(typed).value() == "/runs/prüf/k=v"


@pytest.mark.parametrize("kind", [torch.uint16, torch.bool, torch.int64])
@pytest.mark.parametrize("layer", [torch.nn.Linear(8, 2), torch.nn.Conv2d(1, 2, 3)], ids=type)
def test_samples_that_are_no_fractions_are_explained(layer, kind):
    with pytest.raises(RuntimeError) as found:
        layer(torch.zeros(2, 1, 8, 8).to(kind))
    meaning, advice = explain_exception(exception_record(found.value))
    assert "the model got whole numbers or truth values" in meaning
    assert "x.astype(numpy.float32)" in advice


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_signal_has_a_name_and_a_meaning(make_rank, number):
    first = report_of(make_rank(0, at=1.0, exit_code=-number))["first"]
    assert first["signal"] == number.name
    assert first["meaning"]
    assert first["advice"]


@pytest.mark.parametrize("thread", ["Current thread", "Thread"])
def test_the_stack_of_an_abort_is_shown_whichever_thread_called_it(make_rank, thread):
    """glibc ends a process with damaged memory where it is used; gloo and NCCL in threads that run no Python."""
    rank = make_rank(0, at=1.0, exit_code=-signal.SIGABRT)
    text = f'Fatal Python error: Aborted\n\n{thread} 0x01 (most recent call first):\n  File "/net.py", line 7 in f\n'
    os.write(rank.stacks, text.encode())
    rank.hello["main_thread"] = "0x01"
    first = report_of(rank)["first"]
    assert "glibc's words" in first["meaning"]
    assert "as gloo does" in first["meaning"]
    assert 'File "/net.py", line 7 in f' in first["stack"]
