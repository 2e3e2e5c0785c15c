"""Sweeps and searches that are killed, stopped or run several jobs at once end with the objectives of undisturbed ones;
pruning; and what choosing costs."""

import json
import os
import random
import re
import shlex
import signal
import time

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from support.commands import PYTHON_TRAIN, own_data, wait_for
from support.sweep_tables import objectives, runs_of, states

pytestmark = pytest.mark.drill

RATES = "optimizer.lr=0.1,0.05,0.02"
JOBS = ["-m", "model=mlp", "trainer.epochs=4", "snapshot.every=5steps", "hydra.sweep.dir=s"]
SEARCH = ["-m", "hydra/sweeper=optuna", "model=linear", "trainer.epochs=2", "snapshot.every=5steps"]
SEARCH += ["hydra.sweep.dir=s"]
SPACE = ["optimizer.lr=tag(log,interval(0.001,1))", "trainer.batch_size=64,128"]
PRUNER = "hydra.sweeper.pruner={_target_: optuna.pruners.MedianPruner, n_startup_trials: 1}"


@pytest.fixture
def sweep(start):
    return lambda *words, **env: start(*PYTHON_TRAIN, *words, **env)


def kill(run):
    if run.process.poll() is None:  # on a fast machine the sweep may have ended
        run.send(signal.SIGKILL)
    run.process.wait()


def test_a_sweep_killed_at_any_moment_ends_with_the_same_objectives(sweep, tmp_path):
    """Three times at random moments, and the same command after each."""
    sweep(*JOBS, RATES, "hydra.sweep.dir=undisturbed").finish()
    moments, folder, undisturbed = random.Random(7), tmp_path / "s", objectives(tmp_path / "undisturbed")
    for _ in range(3):
        run = sweep(*JOBS, RATES)
        wait_for(lambda: [*folder.glob("*/.lock")], "job")
        time.sleep(moments.uniform(0, 0.8))
        kill(run)
    sweep(*JOBS, RATES).finish()
    assert objectives(folder) == undisturbed
    assert set(states(folder).values()) == {"finished"}
    assert {path.name for path in folder.iterdir()} == {*undisturbed, ".lock", "multirun.yaml"}


def test_ctrl_c_stops_a_sweep_which_then_goes_on(sweep, tmp_path):
    words = [*JOBS, "optimizer.lr=0.1,0.05", "launch=fork", "trainer.epochs=20"]
    sweep(*words, "hydra.sweep.dir=whole").finish()
    run = sweep(*words)
    wait_for(lambda: list((tmp_path / "s").glob("*/snapshots/step_*[0-9]")), "snapshot")
    run.send(signal.SIGINT, to="group")
    run.finish(75)
    assert states(tmp_path / "s") == {"optimizer.lr=0.1": "stopped"}
    (again,) = re.findall(r"^go on with: \S+ \S+train.py (-m .* hydra.sweep.dir=s)$", run.output, re.MULTILINE)
    assert "resumed from" in sweep(*shlex.split(again)).finish().output
    assert objectives(tmp_path / "s") == objectives(tmp_path / "whole")


def test_a_job_that_raises_is_killed_or_hangs_harms_no_other_and_is_tried_again(sweep, tmp_path):
    """Of one process, and then of two ranks."""
    swept = ["model=mlp", "model._target_=support.faults.SweptModel", "trainer.epochs=1", "watch.timeout=5"]
    said = {"raise": "RuntimeError: a mistake", "kill": "SIGKILL", "hang": "user code"}
    run = sweep("-m", *swept, "+model.kind=raise,kill,hang,none", "+model.rank=0", "hydra.sweep.dir=s").finish(1)
    assert "sweep: 3 failed, 1 finished" in run.output
    assert run.output.count(" failed, and starts again: ") == 3
    causes = dict(re.findall(r"^failed: +model.kind=(\w+): (.*)$", run.output, re.MULTILINE))
    assert [kind for kind in said if said[kind] not in causes[kind]] == []
    once = ["hydra.launcher.max_failures=2", "hydra.launcher.retries=0", "hydra.sweep.dir=t", "launch=spawn"]
    run = sweep("-m", *swept, "+model.kind=none,raise,kill,hang", *once).finish(1)
    assert "starts again" not in run.output
    assert "rank 1 of 2 failed first" in run.output
    assert (tmp_path / "t" / "model.kind=none" / "model.pt").exists()
    reports = {path.parent.name: json.loads(path.read_text())["first"] for path in tmp_path.glob("t/*/failure.json")}
    found = {name: (first["rank"], first["kind"]) for name, first in reports.items()}
    assert found == {"model.kind=raise": (1, "exception"), "model.kind=kill": (1, "killed")}
    assert not (tmp_path / "t" / "model.kind=hang").exists()


def test_a_job_that_fails_once_goes_on_from_its_snapshot(sweep, tmp_path):
    (tmp_path / "once.py").write_text(ONCE)
    words = ["model=linear", "+callbacks=[{_target_: once.Fails}]", "trainer.epochs=3", "hydra.sweep.dir=s"]
    run = sweep("-m", "seed=1,2", *words, PYTHONPATH=tmp_path).finish()
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
def test_two_jobs_at_once_have_the_same_numbers(sweep, tmp_path):
    jobs = [*JOBS, "optimizer.lr=0.1,0.05,0.02,0.01", "trainer.epochs=30"]
    sweep(*jobs, "hydra.sweep.dir=one").finish()
    two = sweep(*jobs, "hydra.launcher.n_jobs=2", "hydra.sweep.dir=two").finish()
    found, folder = objectives(tmp_path / "one"), tmp_path / "two"
    assert "sweep: 4 jobs, 2 at once; 0 have finished before; in two\n" in two.output
    assert objectives(folder) == found
    starts = sorted((one["started"], one["ended"]) for run in runs_of(folder).values() for one in run["starts"])
    assert any(begin < end for (_, end), (begin, _) in zip(starts, starts[1:], strict=False))
    assert "epoch 1/30" not in two.output
    for name in found:
        assert "epoch 30/30" in (folder / name / "console.log").read_text()
        assert f"sweep: {name} finished\n" in two.output


def trials_of(folder):
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    (study,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=study, storage=storage).trials


def test_a_killed_search_ends_with_the_same_runs(sweep, tmp_path):
    """Trials 0 to 9 are random, the others are drawn from results. kill -9 while there are results to draw from."""
    words = [*SEARCH, *SPACE, "hydra.sweeper.n_trials=12", "logger=[]"]
    sweep(*words, "hydra.sweep.dir=whole").finish()
    whole, folder = objectives(tmp_path / "whole"), tmp_path / "s"
    assert len(whole) == 12
    for count in (3, 11):
        run = sweep(*words)
        wait_for(lambda count=count: len(list(folder.glob("*/run.json"))) >= count, "job", limit=150)
        kill(run)
    sweep(*words).finish()
    assert objectives(folder) == whole
    completed = [trial for trial in trials_of(folder) if trial.state == TrialState.COMPLETE]
    assert sorted(trial.value for trial in completed) == sorted(whole.values())
    more = sweep(*words, "hydra.sweeper.n_trials=13").finish()
    assert re.findall("^sweep: job (.*?),", more.output, re.MULTILINE) == ["1 of 1"]
    other = sweep(*words, "trainer.batch_size=64,128,256", "hydra.sweeper.n_trials=14").finish(1)
    assert "CategoricalDistribution does not support dynamic value space" in other.output


def test_hopeless_trials_are_pruned_with_a_snapshot_and_end_no_sweep(sweep, tmp_path):
    words = ["model=mlp", "trainer.epochs=20", "optimizer.lr=tag(log,interval(1e-9,1))", PRUNER]
    run, folder = sweep(*SEARCH, *words, "hydra.sweeper.n_trials=6").finish(), tmp_path / "s"
    pruned = [name for name, state in states(folder).items() if state == "stopped"]
    assert pruned
    assert set(states(folder).values()) == {"finished", "stopped"}
    assert sum(trial.state == TrialState.PRUNED for trial in trials_of(folder)) == len(pruned)
    for name in pruned:
        assert list((folder / name / "snapshots").glob("step_*[0-9]"))
        assert f"sweep: {name} pruned\n" in run.output


def test_the_test_number_of_the_best_of_16_configurations_covers_chance_where_labels_are_random(sweep, tmp_path):
    """The number that chose is above chance. In the long run one such interval of 20 does not cover it."""
    words = [*own_data("support.own_data.random_labels"), "model=linear", "trainer.epochs=1", "logger=[]"]
    lists = ["optimizer.lr=0.01,0.03,0.1,0.3", "trainer.batch_size=32,64,128,256", "hydra.sweep.dir=s"]
    run = sweep("-m", *words, *lists).finish()
    (line,) = re.findall("^choosing: +val/accuracy (.* is the best of 16, .*)$", run.output, re.MULTILINE)
    told = r"(\S+) is .*; test/accuracy (\S+) had no part in it \(95 %: (\S+) to (\S+), from "
    chosen, test, low, high = map(float, re.match(told, line).groups())
    found = objectives(tmp_path / "s")
    assert len(found) == 16
    assert chosen == pytest.approx(max(found.values()), rel=1e-5)
    assert low <= 1 / 10 < chosen
    assert max(1 / 10, test) <= high
    assert low <= test
