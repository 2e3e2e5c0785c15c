"""Hangs on purpose: the ranks name the cause within seconds and end the run. Slow runs are no hangs.

LOCKSTEP_HANGS=all runs the whole matrix; LOCKSTEP_HEALTHY_MINUTES=20 lengthens the runs that must not be ended.
"""

import itertools
import json
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.failures.record import read_place
from support.commands import LAUNCHERS, children, own_data, ranks_under, skip_without_mpirun, wait_for
from support.run_folders import has_logged

pytestmark = pytest.mark.drill

TIMEOUT = 3.0  # watch.timeout
ANSWER = 10.0  # seconds from the timeout until the ranks have ended, on a busy machine
WHOLE = os.environ.get("LOCKSTEP_HANGS") == "all"
MINUTES = float(os.environ.get("LOCKSTEP_HEALTHY_MINUTES", "0.3"))
SMALL = ["model=mlp", "backend=gloo", "trainer.epochs=2", "evaluation.batch_size=32", "hydra.run.dir=run"]
SMALL += [f"watch.timeout={TIMEOUT}", "model._target_=support.faults.SummingModel"]
DATA = own_data("support.faults.FaultyDigits")

USER_CODE = "a rank is in user code"
VERDICTS = dict.fromkeys(("loader", "worker", "hang", "gil", "kernel"), USER_CODE)
VERDICTS |= dict.fromkeys(("extra", "operation"), "another operation")
VERDICTS |= {"skip": "a call is missing", "other_shape": "another shape", "stopped": "a rank is stopped"}
ROWS = [("launch=fork", kind, "train", "auto", 2) for kind in VERDICTS if kind not in ("hang", "stopped", "operation")]
ROWS += [("launch=fork", kind, "evaluation", "all_reduce", 4) for kind in ("loader", "skip", "stopped")]
ROWS += [("launch=torchrun", "stopped", "train", "auto", 2), ("launch=spawn", "hang", "train", "auto", 2)]
if WHOLE:
    matrix = itertools.product(["launch=fork"], VERDICTS, ("train", "evaluation"), ("auto", "all_reduce"), (2, 4))
    ROWS = [*matrix]
ROWS += [("torchrun", "stopped", "train", "auto", 2), ("mpirun", "skip", "train", "auto", 2)]


def fault_of(kind, place):
    """On rank 1, in the twelfth pass or a sample of the training, or in an early pass of an evaluation."""
    trains = place == "train"
    if kind in ("loader", "worker"):
        return "data/hang:1:150" if trains else "tested/hang:1:30"
    if kind in ("skip", "extra", "operation", "other_shape"):
        return f"sum/{kind}:1:12" if trains else f"tested_sum/{kind}:1:3"
    return f"forward/{kind}:1:12" if trains else f"evaluation/{kind}:1:2"


@pytest.mark.parametrize(("launcher", "kind", "place", "sync", "size"), ROWS)
def test_a_hang_has_a_verdict_and_ends_the_run(start_faulty, tmp_path, launcher, kind, place, sync, size):
    skip_without_mpirun(launcher)
    words = [*LAUNCHERS[launcher], *SMALL, f"gradient_sync={sync}", f"loader.num_workers={2 * (kind == 'worker')}"]
    words += DATA * (kind in ("loader", "worker"))
    words += [f"launch.nproc_per_node={size}"] * launcher.startswith("launch")
    run = start_faulty(*words, FAULT=fault_of(kind, place)).finish(None)
    report, code = json.loads((tmp_path / "run/failure.json").read_text()), run.process.returncode
    first, verdict = report["first"], VERDICTS[kind]
    assert first["phase"] == place
    # gloo ends a rank that receives more than it expects: a gradient is more than the sum that is left out, and that
    # is more than what an evaluation asks after each pass.
    may_abort = kind == "other_shape" or (kind == "skip" and f"{sync} {place}" != "auto train")
    if may_abort and first["kind"] == "killed":
        assert (code, first["signal"]) == (1, "SIGABRT")
        assert "as gloo does when ranks give other shapes to one collective" in first["meaning"]
        return
    assert report["exit_code"] == 4
    assert code == (1 if launcher == "torchrun" else 4), run.output  # torchrun has codes of its own
    assert (first["kind"], first["verdict"], first["rank"], first["ranks"]) == ("hang", verdict, 1, [1])
    assert first["silent_seconds"] < TIMEOUT + ANSWER
    assert len(first["table"]) == size + 1
    waiting = "0" if kind == "skip" else "1"  # the rank that skips its call has gone on
    assert kind in ("stopped", "worker") or "support/faults.py:" in "\n".join(first["stacks"][waiting])
    assert verdict != USER_CODE or "support/faults.py:" in first["meaning"]
    assert first["stacks"]["0"]
    assert run.output.count(f"verdict: {verdict}") == 1
    assert "rank 1 of" in run.output


def test_a_hang_is_only_reported_if_that_is_wanted(start_faulty, tmp_path):
    run = start_faulty(*LAUNCHERS["launch=fork"], *SMALL, "watch.on_hang=report", FAULT=fault_of("stopped", "train"))
    log = tmp_path / "run/logs/rank0.log"
    wait_for(lambda: log.exists() and "what to do: " in log.read_text(), "report of the hang", 60)
    assert "verdict: a rank is stopped" in log.read_text()
    os.kill(int(log.read_text().partition("kill -CONT ")[2].split(",")[0]), signal.SIGCONT)
    assert run.finish(0).output.count("verdict:") == 1


@pytest.mark.timeout(500)
def test_a_compilation_is_only_slow(start, tmp_path):
    """A compiler that takes longer than watch.timeout ends no run."""
    compiler, slept = tmp_path / "slow-g++", tmp_path / "slept"
    compiler.write_text(f'#!/bin/sh\nmkdir {slept} 2>/dev/null && sleep 5\nexec {shutil.which("g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    own = {"CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    run = start(*LAUNCHERS["launch=fork"], *SMALL, FAULT="forward/compile:all:12", **own).finish(limit=400)
    assert slept.exists()
    assert not (tmp_path / "run/failure.json").exists()
    assert "verdict:" not in run.output


@pytest.mark.timeout(240 + 200 * MINUTES)
def test_slow_runs_are_no_hangs(start, tmp_path):
    """A slow download, a slow first step, unevenly slow samples, slow evaluations, a slow disk, a pause."""
    slow = [*LAUNCHERS["launch=fork"], *SMALL, "trainer.epochs=1000", "snapshot.every=40steps", *DATA]
    slow += ["dataset._target_=support.faults.FaultyPair", "model._target_=support.faults.FaultyModel"]
    faults = "prepare/8:0:1,forward/8:all:1,data/0.3:1:%100,evaluation/1.5:all:%1,state/6:all:1"
    run = start(*slow, FAULT=faults)
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 1/"), "first epoch", 90)
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


def test_a_hang_that_comes_again_after_a_restart_is_found_and_ends_the_restarts(start_faulty):
    run = start_faulty(
        *LAUNCHERS["launch=torchrun"], *SMALL, "launch.max_restarts=3", FAULT=fault_of("gil", "train")
    ).finish(4)
    assert re.findall(r"restart (\d) of 3", run.output) == ["1"]
    assert run.output.count("lockstep: rank 1 of 2 hangs") == 2
    assert "it will fail again" in run.output


def test_a_hang_of_the_only_rank_is_shown(start_faulty):
    words = [*SMALL, "model._target_=support.faults.FaultyModel"]
    run = start_faulty(*LAUNCHERS["python"], *words, FAULT="forward/hang:0:7").finish(4)
    assert "lockstep: rank 0 of 1 hangs" in run.output
    assert "verdict: a rank is in user code" in run.output


def phase_of(pid):
    """What a rank notes in a file that it shares with others; "" if it has ended."""
    with suppress(OSError):
        note = re.search(r" (/\S+)/rank(\d+)\.at$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
        return read_place(Path(note[1]), int(note[2])).name if note else ""
    return ""


def test_a_rank_that_is_stopped_while_another_one_saves_is_named(start_faulty):
    """A snapshot may take long, but the rank that waits in it gives up after backend.timeout, and was blamed."""
    words = [*SMALL, "trainer.epochs=900", "snapshot.every=1steps", "watch.timeout=2", "backend.timeout=20"]
    run = start_faulty(*LAUNCHERS["launch=torchrun"], *words)
    wait_for(lambda: has_logged(run.cwd / "run", "epoch 2/"), "second epoch")
    stopped, waiting = ranks_under(run.process.pid)
    os.kill(stopped, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not phase_of(waiting) == "snapshot" != phase_of(stopped):
        assert time.monotonic() < deadline, "no rank waits in a snapshot for the rank that is stopped"
        os.kill(stopped, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.3)
    run.finish(4)
    assert "verdict: a rank is stopped" in run.output
    assert f"(pid {stopped}) is stopped by SIGSTOP" in run.output
