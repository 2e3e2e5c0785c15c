"""Faults under every launcher: the report names the rank that failed first, and says what that means.

FAULTS=all runs each fault under each launcher; without it launch=fork gets all and each other launcher one of a kind:
an exception, a kill and an exit; ours also one in a process that loads data, and one before the training.
"""

import json
import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.failures.report import screen
from support.commands import LAUNCHERS, MPIRUN, Command, skip_without_mpirun
from support.faults import MODEL, PARTS
from support.ports import free_port
from support.traces import Traces

pytestmark = pytest.mark.drill

OURS = ("launch=fork", "launch=torchrun", "launch=spawn")  # torchrun and mpirun have exit codes of their own
OWN = [*PARTS, "snapshot.every=3steps", "trainer.epochs=2", "logger=[tensorboard,console]"]
KILLED = "killed, cause not known"
RAISED = "the code at this line raised this exception"
LEFT = "its program left with exit code {} before the end of the run"
HEAP = "its memory is damaged if glibc's words"
WORKER = ("loader.num_workers=1",)
# place/kind and step: see support.faults. Then the kind and words of the report, and options.
FAULTS = [
    ("forward/raise", 5, "exception", RAISED, ()),
    ("forward/unicode", 5, "exception", "größer als erlaubt", ()),
    ("forward/long", 5, "exception", "RuntimeError: xxx", ()),
    ("forward/no_text", 5, "exception", "WithoutText: (no message)", ()),
    ("forward/escapes", 5, "exception", r"RuntimeError: red \x1b[31m, half a character \ud800", ()),
    ("forward/own_connection", 5, "exception", RAISED, ()),
    ("forward/shape", 5, "exception", "the shapes of the data and of the model do not fit together", ()),
    ("forward/memory", 5, "exception", "this rank has no memory left", ()),
    ("forward/memory_limit", 5, "exception", "this rank has no memory left", ()),
    ("forward/target", 5, "exception", "an index is larger than the table", ()),
    ("forward/disk", 5, "exception", "the disk is full", ()),
    ("forward/files", 5, "exception", "may open no more files", ()),
    ("forward/recursion", 1, "exception", "maximum recursion depth", ()),
    ("forward/kill", 5, "killed", KILLED, ()),
    ("forward/kill", 1, "killed", KILLED, ()),
    ("forward/kill_beside_child", 5, "killed", KILLED, ()),
    ("forward/cpu_limit", 5, "killed", "ended by SIGXCPU", ()),
    ("forward/bus", 5, "killed", "bus error", ()),
    ("forward/segfault", 5, "killed", "segmentation fault", ()),
    ("forward/abort", 5, "killed", "abort", ()),
    ("backward/heap", 5, "killed", HEAP, ()),
    ("forward/exit3", 5, "left", LEFT.format(3), ()),
    ("forward/sysexit", 5, "exception", "this rank left before the end of the training: exit code 0", ()),
    ("forward/native_exit", 5, "left", LEFT.format(0), ()),
    ("backward/raise", 5, "exception", RAISED, ()),
    ("backward/kill", 5, "killed", KILLED, ()),
    ("evaluation/raise", 1, "exception", RAISED, ()),
    ("data/raise", 20, "exception", RAISED, ()),
    ("data/raise", 20, "exception", RAISED, WORKER),
    ("data/kill", 20, "exception", "a process that loads data has ended", WORKER),
    ("optimizer/raise", 5, "exception", RAISED, ()),
    ("build/raise", 1, "exception", RAISED, ()),
    ("build/kill", 1, "killed", KILLED, ()),
]
if not torch.cuda.is_available():
    FAULTS.append(("forward/gpu", 5, "exception", "the code uses a GPU", ()))
ONE_OF_A_KIND = ["forward/raise", "backward/kill", "forward/exit3"]


def wrong(launcher, fault, folder):
    """What is wrong, or ""."""
    (name, step, kind, words, options), traces = fault, Traces()
    folder.mkdir()
    rank = 0 if launcher == "python" else 1
    typed = [*LAUNCHERS[launcher], *OWN, *options]
    command = Command(typed, folder, FAULT=f"{name}:{rank}:{step}", **traces.environment).finish(None)
    left, file = traces.left(command), folder / "run" / "failure.json"
    if not file.exists():
        return f"{name}: no report:\n{command.output}"
    report = json.loads(file.read_text())
    shown, first = screen(report), report["first"]
    last = "\n".join(shown.splitlines()[-2:])  # other lines have paths that are relative to the folder of the command
    found = (first["rank"], first["kind"], report["exit_code"])
    # mpirun and torchrun may take the exit code of a rank before another rank can read it.
    is_foreign = launcher in ("mpirun", "torchrun")
    own_line = kind == "exception" and name != "data/kill"
    if is_foreign and first.get("exit_code", 0) is None and not first["stack"]:  # of a crash Python has left its stack
        kind, words = "killed", KILLED
    named = re.findall(r"Root Cause .*\n(?:.*\n)*?.*rank *: (\d)", command.output)
    names_it = named == ["1"] or name == "forward/native_exit"  # for torchrun one that ends with 0 has not failed
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
        "torchrun names another rank": launcher != "torchrun" or names_it,
        # The user's own child of a rank is the user's to end.
        f"alive, or in TMPDIR or /dev/shm: {left}": not left or name == "forward/kill_beside_child",
    }
    found_wrong = [what for what, is_right in checks.items() if not is_right]
    return f"{name}: {'; '.join(found_wrong)}\n{command.output}" if found_wrong else ""


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_rank_and_the_sentence_are_right(launcher, tmp_path):
    skip_without_mpirun(launcher)
    is_whole = os.environ.get("FAULTS") == "all" or launcher == "launch=fork"
    some = [*ONE_OF_A_KIND, *["data/kill", "build/raise"] * (launcher in OURS)]
    chosen = [fault for fault in FAULTS if is_whole or fault[0] in some]
    if launcher == "python":  # nobody is left who could tell of a process that is alone
        chosen = [fault for fault in chosen if fault[2] == "exception"]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(wrong, launcher, fault, tmp_path / f"{number}") for number, fault in enumerate(chosen)]
    assert not [job.result() for job in jobs if job.result()]


@pytest.mark.parametrize(("snapshots", "restarts"), [("1epochs", 1), ("3steps", 2)])
def test_restarts_end_early_only_if_the_same_failure_comes_at_the_same_step(start, tmp_path, snapshots, restarts):
    """And a run that has finished keeps no report of an earlier failure."""
    command = [*LAUNCHERS["launch=torchrun"], *OWN, f"snapshot.every={snapshots}", "launch.max_restarts=2"]
    run = start(*command, "trainer.epochs=9", FAULT="forward/raise:1:4").finish(1)
    assert run.output.count("lockstep: restart ") == restarts
    assert ("it will fail again" in run.output) == (restarts == 1)
    assert ("\nresume: " in run.output) == (restarts == 2)
    assert (tmp_path / "run/failure.json").exists()
    if restarts == 1:
        start(*command, "trainer.epochs=9").finish()
        assert not list(tmp_path.glob("run/failure.*"))


def test_each_machine_shows_the_report_of_the_one_that_failed_first(start):
    nodes = ["launch.nnodes=2", "launch.nproc_per_node=1", f"launch.master_port={free_port()}"]
    commands = [[*LAUNCHERS["launch=spawn"], *OWN, *nodes, f"launch.node_rank={node}"] for node in (0, 1)]
    for number, run in enumerate([start(*command, FAULT="forward/kill:1:5") for command in commands]):
        run.finish(1)
        assert "lockstep: rank 1 of 2 failed first" in run.output
        assert "it ended: SIGKILL" in run.output
        assert f"launch.node_rank={number}" in run.output.splitlines()[-1]


def test_the_command_that_resumes_starts_with_mpirun(start):
    """And a failure in the first step of an epoch names that epoch."""
    skip_without_mpirun("mpirun")
    words = [*MODEL, "loader.validation=null", "trainer.batch_size=1437", "snapshot.every=1steps"]
    run = start(*MPIRUN, *words, FAULT="forward/raise:1:3").finish(1)
    assert "in epoch 3, after step 2, in the phase train" in run.output
    (resume,) = re.findall(r"^resume: (mpirun --allow-run-as-root --oversubscribe -n 2 .*)$", run.output, re.MULTILINE)
    assert start(*shlex.split(resume)).finish().output.count("resumed from") == 1
