"""Sweeps that are killed, stopped or run several jobs at once end with the objectives of an undisturbed sweep."""

import os
import random
import re
import shlex
import signal
import time
from contextlib import suppress

import pytest

from support.commands import PYTHON_TRAIN, wait_for
from support.sweep_tables import objectives, runs_of, states

pytestmark = pytest.mark.drill

RATES = "optimizer.lr=0.1,0.05,0.02"
JOBS = ["-m", "model=mlp", "trainer.epochs=4", "snapshot.every=5steps", "hydra.sweep.dir=s"]


def test_a_sweep_killed_at_any_moment_ends_with_the_same_objectives(start, tmp_path):
    """kill -9 of the parent alone, three times at random moments, and the same command after each."""
    start(*PYTHON_TRAIN, *JOBS, RATES, "hydra.sweep.dir=undisturbed").finish()
    moments, folder, undisturbed = random.Random(7), tmp_path / "s", objectives(tmp_path / "undisturbed")
    for _ in range(3):
        run = start(*PYTHON_TRAIN, *JOBS, RATES)
        wait_for(lambda: [*folder.glob("*/.lock")], "job")
        time.sleep(moments.uniform(0, 0.8))
        with suppress(ProcessLookupError):  # on a fast machine the sweep may have ended
            run.send(signal.SIGKILL)
        run.process.wait()
    start(*PYTHON_TRAIN, *JOBS, RATES).finish()
    assert objectives(folder) == undisturbed
    assert set(states(folder).values()) == {"finished"}
    assert {path.name for path in folder.iterdir()} == {*undisturbed, ".lock", "multirun.yaml"}


def test_ctrl_c_stops_a_sweep_which_then_goes_on(start):
    command = [*PYTHON_TRAIN, *JOBS, RATES, "launch=fork", "trainer.epochs=40"]
    whole = start(*command, "hydra.sweep.dir=whole").finish()
    run = start(*command)
    wait_for(lambda: list((run.cwd / "s").glob("*/snapshots/step_*[0-9]")), "snapshot")
    run.send(signal.SIGINT, to="group")
    run.finish(75)
    assert states(run.cwd / "s") == {"optimizer.lr=0.1": "stopped"}
    (again,) = re.findall(r"^go on with: \S+ \S+train.py (-m .* hydra.sweep.dir=s)$", run.output, re.MULTILINE)
    assert "resumed from" in start(*PYTHON_TRAIN, *shlex.split(again)).finish().output
    assert objectives(run.cwd / "s") == objectives(whole.cwd / "whole")


def test_a_job_that_raises_is_killed_or_hangs_harms_no_other_and_is_tried_again(start):
    """One process a job, without ranks of their own."""
    swept = ["model._target_=support.faults.SweptModel", "+model.kind=raise,kill,hang,none", "watch.timeout=5"]
    command = [*PYTHON_TRAIN, "-m", "model=mlp", *swept, "+model.rank=0", "trainer.epochs=1"]
    run = start(*command, "hydra.sweep.dir=s").finish(1)
    assert "sweep: 3 failed, 1 finished" in run.output
    causes = dict(re.findall(r"^failed: +model.kind=(\w+): (.*)$", run.output, re.MULTILINE))
    for kind, words in {"raise": "rank 0 of 1: RuntimeError:", "kill": "SIGKILL", "hang": "user code"}.items():
        assert words in causes[kind]
    assert run.output.count(" failed, and starts again: ") == 3
    limited = start(*command, "hydra.launcher.max_failures=2", "hydra.launcher.retries=0", "hydra.sweep.dir=t").finish(
        1
    )
    assert "starts again" not in limited.output
    assert {path.name for path in (limited.cwd / "t").glob("model*")} == {"model.kind=raise", "model.kind=kill"}


def test_a_job_that_fails_once_goes_on_from_its_snapshot(start, tmp_path):
    (tmp_path / "once.py").write_text(ONCE)
    words = ["model=linear", "+callbacks=[{_target_: once.Fails}]", "trainer.epochs=3", "hydra.sweep.dir=s"]
    run = start(*PYTHON_TRAIN, "-m", "seed=1,2", *words, PYTHONPATH=tmp_path).finish()
    assert "sweep: 2 finished" in run.output
    assert run.output.count("starts again: rank 0 of 1: RuntimeError: once") == 1
    assert run.output.count("resumed from") == 1


ONCE = """
from pathlib import Path

from lockstep.training.callbacks import Callback


class Fails(Callback):
    def on_epoch_end(self, run):
        if run.progress.epoch == 2 and not Path("failed").exists():
            Path("failed").touch()
            raise RuntimeError("once")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_two_jobs_at_once_have_the_same_numbers(start):
    jobs = [*PYTHON_TRAIN, *JOBS, "optimizer.lr=0.1,0.05,0.02,0.01", "trainer.epochs=30"]
    one = start(*jobs, "hydra.sweep.dir=one").finish()
    two = start(*jobs, "hydra.launcher.n_jobs=2", "hydra.sweep.dir=two").finish()
    found, folder = objectives(one.cwd / "one"), two.cwd / "two"
    assert "sweep: 4 jobs, 2 at once; 0 have finished before; in two\n" in two.output
    assert objectives(folder) == found
    starts = sorted((one["started"], one["ended"]) for run in runs_of(folder).values() for one in run["starts"])
    assert any(begin < end for (_, end), (begin, _) in zip(starts, starts[1:], strict=False))
    assert "epoch 1/30" not in two.output
    for name in found:
        assert "epoch 30/30" in (folder / name / "console.log").read_text()
        assert f"sweep: {name} finished\n" in two.output
