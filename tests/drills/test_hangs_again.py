"""Hangs in the attempt after a restart, of a rank that is alone, beside a rank that saves."""

import os
import re
import signal
import time

import pytest

from support.commands import PYTHON_TRAIN, ROOT, wait_for
from support.rank_pages import all_ranks, ranks_in
from support.run_folders import has_logged

pytestmark = pytest.mark.drill

HANGING = ["model=mlp", "model._target_=support.hangs.HangingModel", "trainer.epochs=2", "watch.timeout=3"]
TESTS = ROOT / "tests"


def test_a_hang_that_comes_again_after_a_restart_is_found_and_ends_the_restarts(start_faulty):
    words = [*HANGING, "launch=torchrun", "launch.max_restarts=3", "hydra.run.dir=run"]
    run = start_faulty(*PYTHON_TRAIN, *words, HANG="forward", PYTHONPATH=TESTS).finish(4)
    assert re.findall(r"restart (\d) of 3", run.output) == ["1"]
    assert run.output.count("lockstep: rank 1 of 2 hangs") == 2
    assert "it will fail again" in run.output


def test_a_hang_of_the_only_rank_is_shown(start_faulty):
    words = ["model=mlp", "model._target_=support.faults.FaultyModel", "watch.timeout=2", "hydra.run.dir=run"]
    run = start_faulty(*PYTHON_TRAIN, *words, FAULT="forward/hang:0:7", PYTHONPATH=TESTS).finish(4)
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
