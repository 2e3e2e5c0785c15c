"""Faults under every launcher: the report names the rank that failed first, and says what that means.

FAULTS=all runs each fault under each launcher; without it launch=fork gets all and each other launcher one of a kind:
an exception, a kill, an exit, and one in a process that loads data; ours one before the training, too.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from lockstep.failures.report import screen
from support.commands import MPIRUN, PYTHON_TRAIN, ROOT, TORCHRUN, TRAIN, Command, own_data, skip_without_mpirun
from support.fault_table import Row, Traces, add_row, row_of
from support.ports import free_port

pytestmark = pytest.mark.drill

LAUNCHERS = {
    "fork": [*PYTHON_TRAIN, "launch=fork"],
    "torchrun inside": [*PYTHON_TRAIN, "launch=torchrun"],
    "spawn": [*PYTHON_TRAIN, "launch=spawn"],
    "torchrun outside": [*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN],
    "python": PYTHON_TRAIN,
    "mpirun": MPIRUN,
}
OURS = ("fork", "torchrun inside", "spawn")  # torchrun and mpirun have exit codes of their own
OWN = [
    *("model=mlp", "model._target_=support.faults.FaultyModel", "optimizer._target_=support.faults.FaultySGD"),
    *("optimizer.lr=0.05", "snapshot.every=3steps", "trainer.epochs=2", "logger=[tensorboard,console]"),
    *own_data("support.faults.FaultyDigits"),
]


@dataclass(frozen=True)
class Fault:
    """place, kind and step: see support.faults. expected: the kind, and words of the report."""

    name: str
    step: int
    kind: str
    words: str
    options: tuple[str, ...] = ()


KILLED = "killed, cause not known"
RAISED = "the code at this line raised this exception"
LEFT = "this rank left before the end of the training"
FAULTS = [
    Fault("forward/raise", 5, "exception", RAISED),
    Fault("forward/unicode", 5, "exception", "größer als erlaubt"),
    Fault("forward/long", 5, "exception", "RuntimeError: xxx"),
    Fault("forward/no_text", 5, "exception", "WithoutText: (no message)"),
    Fault("forward/escapes", 5, "exception", r"RuntimeError: red \x1b[31m, half a character \ud800"),
    Fault("forward/own_connection", 5, "exception", RAISED),
    *([] if torch.cuda.is_available() else [Fault("forward/gpu", 5, "exception", "the code uses a GPU")]),
    Fault("forward/shape", 5, "exception", "the shapes of the data and of the model do not fit together"),
    Fault("forward/key", 5, "exception", RAISED),
    Fault("forward/memory", 5, "exception", "this rank has no memory left"),
    Fault("forward/memory_limit", 5, "exception", "this rank has no memory left"),
    Fault("forward/file", 5, "exception", RAISED),
    Fault("forward/target", 5, "exception", "an index is larger than the table"),
    Fault("forward/disk", 5, "exception", "the disk is full"),
    Fault("forward/import", 5, "exception", RAISED),
    Fault("forward/zero", 1, "exception", RAISED),
    Fault("forward/assert", 5, "exception", RAISED),
    Fault("forward/recursion", 5, "exception", "maximum recursion depth"),
    Fault("forward/kill", 5, "killed", KILLED),
    Fault("forward/kill", 1, "killed", KILLED),
    Fault("forward/kill_beside_child", 5, "killed", KILLED),
    Fault("forward/cpu_limit", 5, "killed", "ended by SIGXCPU"),
    Fault("forward/bus", 5, "killed", "bus error"),
    Fault("forward/segfault", 5, "killed", "segmentation fault"),
    Fault("forward/abort", 5, "killed", "abort"),
    Fault("forward/heap", 5, "killed", "its memory is damaged if glibc's words"),
    Fault("backward/heap", 5, "killed", "its memory is damaged if glibc's words"),
    Fault("forward/comm", 5, "exception", RAISED),
    Fault("forward/exit0", 5, "left", "its program left with exit code 0 before the end of the run"),
    Fault("forward/exit3", 5, "left", "its program left with exit code 3 before the end of the run"),
    Fault("forward/sysexit", 5, "exception", f"{LEFT}: exit code 0"),
    Fault("forward/native_exit", 5, "left", "left with exit code 0 before the end"),
    Fault("backward/raise", 5, "exception", RAISED),
    Fault("backward/kill", 5, "killed", KILLED),
    Fault("evaluation/raise", 1, "exception", RAISED),
    Fault("evaluation/kill", 1, "killed", KILLED),
    Fault("data/raise", 70, "exception", RAISED),
    Fault("data/raise", 70, "exception", RAISED, ("loader.num_workers=1",)),
    Fault("data/kill", 70, "exception", "a process that loads data has ended", ("loader.num_workers=1",)),
    Fault("optimizer/raise", 5, "exception", RAISED),
    Fault("optimizer/kill", 5, "killed", KILLED),
    Fault("build/raise", 1, "exception", RAISED),
    Fault("build/kill", 1, "killed", KILLED),
]
ONE_OF_A_KIND = [("forward/raise", 5), ("backward/kill", 5), ("forward/exit3", 5), ("data/kill", 70)]
OF_OURS = [("build/raise", 1)]


def run(launcher: str, fault: Fault, folder: Path) -> tuple[str, Row]:
    """What is wrong, or "", and the row of the table."""
    folder.mkdir()
    traces = Traces()
    rank = 0 if launcher == "python" else 1
    env = {"FAULT": f"{fault.name}:{rank}:{fault.step}", "PYTHONPATH": ROOT / "tests"} | traces.environment
    words = [*LAUNCHERS[launcher], *OWN, *fault.options, "hydra.run.dir=run"]
    command = Command(words, folder, **env).finish(None)
    name = f"{fault.name}, step {fault.step} {' '.join(fault.options)}"
    row = replace(row_of(name, command, traces), launcher=launcher)
    traces.remove()
    file = folder / "run" / "failure.json"
    if not file.exists():
        return f"no report:\n{command.output}", row
    report = json.loads(file.read_text())
    shown = screen(report)
    last = "\n".join(shown.splitlines()[-2:])  # other lines have paths that are relative to the folder of the command
    first = report["first"]
    found = (first["rank"], first["kind"], report["exit_code"])
    # mpirun and torchrun may take the exit code of a rank before another rank can read it.
    is_foreign = launcher in ("mpirun", "torchrun outside")
    is_unread = is_foreign and first.get("exit_code", 0) is None
    kind, words = ("killed", KILLED) if is_unread else (fault.kind, fault.words)
    own_line = fault.kind == "exception" and fault.name != "data/kill"
    checks = {
        f"the report says {found}": found == (rank, kind, 1),
        f"no {words!r} in the report": words in shown,
        # torchrun and mpirun have words of their own.
        "the report is not the last thing": is_foreign or command.output.rstrip().endswith(last),
        "the report is there": command.output.count("lockstep: rank ") == 1,
        "the screen is too long": len(shown.splitlines()) <= 40,
        "Python warns of leaked objects": "leaked" not in command.output,
        f"exit code {command.process.returncode}": launcher not in OURS or command.process.returncode == 1,
        f"the line is {first.get('file')}": not own_line or first["file"].endswith("faults.py"),
        f"left in TMPDIR or /dev/shm: {row.leftovers}": not row.leftovers,
        # The user's own child of a rank is the user's to end.
        f"alive: {row.orphans}": not row.orphans or fault.name == "forward/kill_beside_child",
    }
    wrong = [what for what, is_right in checks.items() if not is_right]
    return "; ".join(wrong) + f"\n{command.output}" if wrong else "", row


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_rank_and_the_sentence_are_right(launcher, tmp_path, request):
    skip_without_mpirun(launcher)
    is_whole = os.environ.get("FAULTS") == "all" or launcher == "fork"
    some = ONE_OF_A_KIND + OF_OURS * (launcher in OURS)
    chosen = FAULTS if is_whole else [fault for fault in FAULTS if (fault.name, fault.step) in some]
    if launcher == "python":  # nobody is left who could tell of a process that is alone
        chosen = [fault for fault in chosen if fault.kind == "exception"]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, launcher, fault, tmp_path / f"{number}") for number, fault in enumerate(chosen)]
        outcomes = [job.result() for job in jobs]
    for wrong, row in outcomes:
        add_row(request.node, replace(row, is_right=not wrong))
    wrong_ones = [f"{fault.name}: {wrong}" for fault, (wrong, _) in zip(chosen, outcomes, strict=True) if wrong]
    assert not wrong_ones, "\n\n".join(wrong_ones)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raising_child", "RuntimeError: a mistake in the child"),
        ("leaving_child", "the child has ended with 7"),
    ],
)
def test_the_end_of_a_process_that_a_rank_forks_is_none_of_the_rank(start, rank, fault, words):
    environment = {"FAULT": f"forward/{fault}:{rank}:4", "PYTHONPATH": ROOT / "tests"}
    run = start(*LAUNCHERS["fork"], *OWN, "hydra.run.dir=run", **environment).finish()
    assert "finished: " in run.output
    assert words in run.output


@pytest.mark.parametrize(("snapshots", "restarts"), [("1epochs", 1), ("3steps", 2)])
def test_restarts_end_early_only_if_the_same_failure_comes_at_the_same_step(start, snapshots, restarts):
    command = [*LAUNCHERS["torchrun inside"], *OWN, f"snapshot.every={snapshots}", "launch.max_restarts=2"]
    env = {"FAULT": "forward/raise:1:4", "PYTHONPATH": ROOT / "tests"}
    run = start(*command, "trainer.epochs=9", "hydra.run.dir=run", **env).finish(1)
    assert run.output.count("lockstep: restart ") == restarts
    assert ("it will fail again" in run.output) == (restarts == 1)


def test_in_a_sweep_each_job_fails_by_itself(start_faulty):
    """Job 2 raises, job 3 is killed, job 4 hangs, job 5 has no memory: job 1 finishes."""
    kinds = ["none", "raise", "kill", "hang", "memory_limit"]
    swept = ["model._target_=support.faults.SweptModel", f"+model.kind={','.join(kinds)}", "watch.timeout=5"]
    words = ["-m", "model=mlp", *swept, "trainer.epochs=1", "hydra.launcher.retries=0", "hydra.sweep.dir=s"]
    run = start_faulty(*LAUNCHERS["spawn"], *words, PYTHONPATH=ROOT / "tests").finish(1)
    jobs = [run.cwd / "s" / f"model.kind={kind}" for kind in kinds]
    assert [(job / "model.pt").exists() for job in jobs] == [kind == "none" for kind in kinds]
    reports = [json.loads((job / "failure.json").read_text())["first"] for job in jobs[1:]]
    found = [(first["rank"], first["kind"]) for first in reports]
    assert found == [(1, "exception"), (1, "killed"), (1, "hang"), (1, "exception")]
    causes = dict(re.findall(r"^failed: +model.kind=(\w+): (.*)$", run.output, re.MULTILINE))
    said = ["rank 1 of 2: RuntimeError: a mistake", "SIGKILL", "user code", "alloc"]
    assert [kind for words, kind in zip(said, kinds[1:], strict=True) if words not in causes[kind]] == [], causes
    assert "rank 1 of 2 failed first" in run.output


def test_each_machine_shows_the_report_of_the_one_that_failed_first(start, tmp_path):
    nodes = ["launch.nnodes=2", "launch.nproc_per_node=1", f"launch.master_port={free_port()}", "hydra.run.dir=run"]
    env = {"FAULT": "forward/kill:1:5", "PYTHONPATH": ROOT / "tests"}
    commands = [[*LAUNCHERS["spawn"], *OWN, *nodes, f"launch.node_rank={node}"] for node in (0, 1)]
    runs = [start(*command, **env) for command in commands]
    for number, run in enumerate(runs):
        run.finish(1)
        assert "lockstep: rank 1 of 2 failed first" in run.output
        assert "it ended: SIGKILL" in run.output
        assert f"launch.node_rank={number}" in run.output.splitlines()[-1]


def test_a_finished_run_keeps_no_report_of_an_earlier_failure(start, tmp_path):
    command = [*LAUNCHERS["fork"], *OWN, "hydra.run.dir=run"]
    start(*command, FAULT="forward/raise:1:5", PYTHONPATH=ROOT / "tests").finish(1)
    assert (tmp_path / "run/failure.json").exists()
    start(*command, FAULT="none/none:0:0", PYTHONPATH=ROOT / "tests").finish()
    assert not list(tmp_path.glob("run/failure.*"))
