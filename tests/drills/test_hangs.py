"""Hangs on purpose: the ranks name the cause within seconds and end the run. Slow runs are no hangs.

LOCKSTEP_HANGS=all runs the whole matrix; LOCKSTEP_HEALTHY_MINUTES=20 lengthens the runs that must not be ended.
"""

import json
import os
import re
import shutil
import signal
import time

import pytest

from support.commands import (
    LAUNCHERS,
    PYTHON_TRAIN,
    ROOT,
    children,
    own_data,
    skip_without_mpirun,
    wait_for,
)
from support.rank_pages import all_ranks, ranks_in
from support.run_folders import has_logged

pytestmark = pytest.mark.drill

TIMEOUT = 5.0  # watch.timeout
ANSWER = 5.0  # seconds from the timeout until the ranks have ended; and as many again, for a busy machine
WHOLE = os.environ.get("LOCKSTEP_HANGS") == "all"
MINUTES = float(os.environ.get("LOCKSTEP_HEALTHY_MINUTES", "1"))
MODEL = ["model._target_=support.hangs.HangingModel"]
DATA = own_data("support.hangs.HangingDigits")
SMALL = ["model=mlp", "backend=gloo", "trainer.epochs=2", "evaluation.batch_size=32"]

USER_CODE = "a rank is in user code"
VERDICTS = {
    "loader": USER_CODE,
    "worker": USER_CODE,
    "forward": USER_CODE,
    "fifo": USER_CODE,
    "skip": "a call is missing",
    "extra": "another operation",
    "operation": "another operation",
    "shape": "another shape",
    "stopped": "a rank is stopped",
    "gil": USER_CODE,
    "disk": USER_CODE,
    "dead": None,  # its death is seen at once, whatever becomes of its sockets
}
KINDS = list(VERDICTS)
CHOSEN = [(kind, "train", "auto", 2) for kind in KINDS]
CHOSEN += [(kind, "evaluation", "all_reduce", 4) for kind in ("loader", "skip", "stopped")]
MATRIX = [
    (kind, place, sync, size)
    for kind in KINDS
    for place in ("train", "evaluation")
    for sync in ("auto", "all_reduce")
    for size in (2, 4)
]


def hang_command(kind, sync, size):
    words = [*PYTHON_TRAIN, "launch=fork", f"launch.nproc_per_node={size}", *SMALL, f"watch.timeout={TIMEOUT}"]
    words += [f"gradient_sync={sync}", f"loader.num_workers={2 * (kind == 'worker')}"]
    return [*words, *(DATA if kind in ("loader", "worker") else MODEL)]


@pytest.mark.parametrize(("kind", "place", "sync", "size"), MATRIX if WHOLE else CHOSEN)
def test_a_hang_has_a_verdict_and_ends_the_run(start_faulty, kind, place, sync, size):
    run = start_faulty(*hang_command(kind, sync, size), HANG=kind, HANG_IN=place, PYTHONPATH=ROOT / "tests")
    verdict = VERDICTS[kind]
    run.finish(None)
    first = json.loads((run.folder / "failure.json").read_text())["first"]
    assert first["phase"] == place
    if kind == "dead":
        assert run.process.returncode == 1
        assert first["signal"] == "SIGKILL"
        return
    # gloo ends a rank that receives more than it expects; the gradient is more than the sum that is left out.
    may_abort = kind == "shape" or (kind == "skip" and sync == "all_reduce")
    if may_abort and first["kind"] == "killed":
        assert run.process.returncode == 1
        assert first["signal"] == "SIGABRT"
        assert "as gloo does when ranks give other shapes to one collective" in first["meaning"]
        return
    assert run.process.returncode == 4, run.output
    assert first["kind"] == "hang"
    assert first["verdict"] == verdict
    assert first["rank"] == 1
    assert first["ranks"] == [1]
    assert first["silent_seconds"] < TIMEOUT + 2 * ANSWER
    assert len(first["table"]) == size + 1
    waiting = "0" if kind == "skip" else "1"  # the rank that skips its call has gone on
    assert kind in ("stopped", "worker") or "support/hangs.py:" in "\n".join(first["stacks"][waiting])
    if verdict == USER_CODE:
        assert "support/hangs.py:" in first["meaning"]
    assert first["stacks"]["0"]
    assert f"verdict: {verdict}" in run.output
    assert "rank 1 of" in run.output


def test_a_hang_is_only_reported_if_that_is_wanted(start_faulty, tmp_path):
    command = [*hang_command("stopped", "auto", 2), "watch.on_hang=report", "hydra.run.dir=run"]
    run = start_faulty(*command, HANG="stopped", PYTHONPATH=ROOT / "tests")
    log = tmp_path / "run/logs/rank0.log"
    wait_for(lambda: log.exists() and "what to do: " in log.read_text(), "report of the hang", 60)
    report = log.read_text()
    assert "verdict: a rank is stopped" in report
    pid = int(report.partition("kill -CONT ")[2].split(",")[0])
    os.kill(pid, 18)
    run.finish(0)
    assert run.output.count("verdict:") == 1


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        *[("launch=torchrun", "stopped"), ("launch=spawn", "forward")],
        *[("torchrun", "stopped"), ("torchrun", "skip"), ("mpirun", "forward"), ("mpirun", "skip")],
    ],
)
def test_a_hang_has_the_same_verdict_under_each_launcher(start_faulty, tmp_path, launcher, kind):
    skip_without_mpirun(launcher)
    command = [*LAUNCHERS[launcher], *SMALL, *MODEL, f"watch.timeout={TIMEOUT}", "hydra.run.dir=run"]
    run = start_faulty(*command, HANG=kind, PYTHONPATH=ROOT / "tests").finish(None)
    report = json.loads((tmp_path / "run/failure.json").read_text())
    assert report["exit_code"] == 4
    assert report["first"]["verdict"] == VERDICTS[kind]
    assert report["first"]["ranks"] == [1]
    assert run.process.returncode == (1 if launcher == "torchrun" else 4)  # torchrun has codes of its own
    assert run.output.count("verdict:") == 1


@pytest.mark.timeout(500)
def test_a_compilation_is_only_slow(start, tmp_path):
    """A compiler that takes longer than watch.timeout ends no run."""
    compiler = tmp_path / "slow-g++"
    once = f"mkdir {tmp_path}/slept 2>/dev/null && sleep 8"
    compiler.write_text(f'#!/bin/sh\n{once}\nexec {shutil.which("g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    own = {"CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    command = [*hang_command("compile", "auto", 2), "hydra.run.dir=run"]
    run = start(*command, HANG="compile", PYTHONPATH=ROOT / "tests", **own).finish(limit=400)
    assert not (tmp_path / "run/failure.json").exists()
    assert "verdict:" not in run.output
    assert run.ended - run.started > 8


@pytest.mark.timeout(240 + 200 * MINUTES)
def test_slow_runs_are_no_hangs(start, tmp_path):
    """A slow download, a slow first step, unevenly slow samples, slow evaluations, a slow disk, a pause."""
    slow = [*PYTHON_TRAIN, "launch=fork", *SMALL, "trainer.epochs=1000", "snapshot.every=40steps"]
    slow += [*own_data("support.hangs.UnevenDigits"), "dataset._target_=support.hangs.SlowlyPrepared"]
    slow += ["model._target_=support.hangs.UnevenModel", "watch.timeout=3"]
    environment = {"SLOW_PREPARE": 12, "SLOW_SAMPLE": 0.3, "SLOW_FIRST_STEP": 12}
    environment |= {"SLOW_EVALUATION": 1.5, "SLOW_SNAPSHOT": 6}
    run = start(*slow, "hydra.run.dir=run", PYTHONPATH=ROOT / "tests", **environment)
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        assert run.process.poll() is None, run.process.communicate()[0]
        time.sleep(10)
        run.send(signal.SIGSTOP, to="group")  # as Ctrl-Z and fg
        time.sleep(4)
        run.send(signal.SIGCONT, to="group")
    assert children(run.process.pid)
    run.process.terminate()
    run.finish(75)
    assert not (tmp_path / "run/failure.json").exists()


HANGING = ["model=mlp", "model._target_=support.hangs.HangingModel", "trainer.epochs=2", "watch.timeout=3"]


def test_a_hang_that_comes_again_after_a_restart_is_found_and_ends_the_restarts(start_faulty):
    words = [*HANGING, "launch=torchrun", "launch.max_restarts=3", "hydra.run.dir=run"]
    run = start_faulty(*PYTHON_TRAIN, *words, HANG="forward", PYTHONPATH=ROOT / "tests").finish(4)
    assert re.findall(r"restart (\d) of 3", run.output) == ["1"]
    assert run.output.count("lockstep: rank 1 of 2 hangs") == 2
    assert "it will fail again" in run.output


def test_a_hang_of_the_only_rank_is_shown(start_faulty):
    words = ["model=mlp", "model._target_=support.faults.FaultyModel", "watch.timeout=2", "hydra.run.dir=run"]
    run = start_faulty(*PYTHON_TRAIN, *words, FAULT="forward/hang:0:7", PYTHONPATH=ROOT / "tests").finish(4)
    assert "lockstep: rank 0 of 1 hangs" in run.output
    assert "verdict: a rank is in user code" in run.output


def test_a_rank_that_is_stopped_while_another_one_saves_is_named(start_faulty):
    """A snapshot may take long, but the rank that waits in it gives up after backend.timeout, and was blamed."""
    words = ["model=mlp", "trainer.epochs=900", "snapshot.every=1steps", "watch.timeout=3", "backend.timeout=30"]
    run = start_faulty(*PYTHON_TRAIN, *words, "launch=torchrun", "hydra.run.dir=run")
    wait_for(lambda: has_logged(run.cwd / "run", "epoch 2/"), "second epoch")
    stopped, waiting = all_ranks(run.process.pid)
    os.kill(stopped, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while ranks_in(run.process.pid, "snapshot") != [waiting]:
        assert time.monotonic() < deadline, "no rank waits in a snapshot for the rank that is stopped"
        os.kill(stopped, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.3)
    run.finish(4)
    assert "verdict: a rank is stopped" in run.output
    assert f"(pid {stopped}) is stopped by SIGSTOP" in run.output
