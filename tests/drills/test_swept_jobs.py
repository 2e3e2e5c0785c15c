"""Sweeps that are killed, stopped or run several jobs at once end with the objectives of an undisturbed sweep."""

import os
import random
import re
import shlex
import signal
import time
from contextlib import suppress

import pytest

from support.commands import PYTHON_TRAIN, ROOT, Command, wait_for
from support.sweep_tables import objectives, runs_of, states

pytestmark = pytest.mark.drill

RATES = "optimizer.lr=0.1,0.05,0.02"
JOBS = ["model=mlp", "trainer.epochs=4", "snapshot.every=5steps", "hydra.sweep.dir=s"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float | None]:
    """The objectives of a sweep of plain processes, which each take what cores there are for one job."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return objectives(Command([*PYTHON_TRAIN, "-m", RATES, *JOBS], folder).finish().cwd / "s")


def test_a_sweep_killed_at_any_moment_ends_with_the_same_objectives(start, undisturbed):
    """kill -9 of the parent alone, three times at random moments, and the same command after each."""
    moments = random.Random(7)
    for _ in range(3):
        run = start(*PYTHON_TRAIN, "-m", RATES, *JOBS)
        wait_for(lambda run=run: list((run.cwd / "s").glob("*/.lock")), "job")
        time.sleep(moments.uniform(0, 0.8))
        with suppress(ProcessLookupError):  # on a fast machine the sweep may have ended
            run.send(signal.SIGKILL)
        run.process.wait()
    cwd = start(*PYTHON_TRAIN, "-m", RATES, *JOBS).finish().cwd
    assert objectives(cwd / "s") == undisturbed
    assert set(states(cwd / "s").values()) == {"finished"}
    assert {path.name for path in (cwd / "s").iterdir()} == {*undisturbed, ".lock", "multirun.yaml"}


def test_ctrl_c_stops_a_sweep_which_then_goes_on(start):
    command = [*PYTHON_TRAIN, "-m", RATES, *JOBS, "launch=fork", "trainer.epochs=40"]
    whole = start(*command, "hydra.sweep.dir=whole").finish()
    run = start(*command)
    wait_for(lambda: list((run.cwd / "s").glob("*/snapshots/step_*[0-9]")), "snapshot")
    run.send(signal.SIGINT, to="group")
    run.finish(75)
    assert states(run.cwd / "s") == {"optimizer.lr=0.1": "stopped"}
    (again,) = re.findall(r"^go on with: \S+ \S+train.py (-m .* hydra.sweep.dir=s)$", run.output, re.MULTILINE)
    more = start(*PYTHON_TRAIN, *shlex.split(again)).finish()
    assert "resumed from" in more.output
    assert objectives(run.cwd / "s") == objectives(whole.cwd / "whole")


def test_a_job_that_raises_is_killed_or_hangs_harms_no_other_and_is_tried_again(start):
    """One process a job, without ranks of their own."""
    kinds = ["raise", "kill", "hang", "none"]
    swept = ["model._target_=support.faults.SweptModel", f"+model.kind={','.join(kinds)}", "watch.timeout=5"]
    command = [*PYTHON_TRAIN, "-m", "model=mlp", *swept, "+model.rank=0", "trainer.epochs=1"]
    run = start(*command, "hydra.sweep.dir=s", PYTHONPATH=ROOT / "tests").finish(1)
    assert "sweep: 3 failed, 1 finished" in run.output
    causes = dict(re.findall(r"^failed: +model.kind=(\w+): (.*)$", run.output, re.MULTILINE))
    assert "rank 0 of 1: RuntimeError:" in causes["raise"]
    assert "SIGKILL" in causes["kill"]
    assert "user code" in causes["hang"]
    assert run.output.count(" failed, and starts again: ") == 3
    few = ["hydra.launcher.max_failures=2", "hydra.launcher.retries=0", "hydra.sweep.dir=t"]
    limited = start(*command, *few, PYTHONPATH=ROOT / "tests").finish(1)
    assert "starts again" not in limited.output
    begun = {path.name for path in (limited.cwd / "t").glob("model*")}
    assert begun == {"model.kind=raise", "model.kind=kill"}


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
    jobs = ["-m", "optimizer.lr=0.1,0.05,0.02,0.01", "model=mlp", "trainer.epochs=30"]
    one = start(*PYTHON_TRAIN, *jobs, "hydra.sweep.dir=one").finish()
    two = start(*PYTHON_TRAIN, *jobs, "hydra.launcher.n_jobs=2", "hydra.sweep.dir=two").finish()
    assert "sweep: 4 jobs, 2 at once; 0 have finished before; in two\n" in two.output
    assert objectives(two.cwd / "two") == objectives(one.cwd / "one")
    starts = sorted(
        (one["started"], one["ended"]) for run in runs_of(two.cwd / "two").values() for one in run["starts"]
    )
    assert any(begin < end for (_, end), (begin, _) in zip(starts, starts[1:], strict=False))
    assert "epoch 1/30" not in two.output
    for name in objectives(two.cwd / "two"):
        assert "epoch 30/30" in (two.cwd / "two" / name / "console.log").read_text()
        assert f"sweep: {name} finished\n" in two.output
