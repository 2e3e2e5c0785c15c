"""Sweeps and searches that are killed, stopped or run several jobs at once end with the objectives of undisturbed ones;
pruning; what choosing costs; and another sweeper of Hydra's."""

import os
import random
import re
import shlex
import signal
import time
from contextlib import suppress

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from support.commands import PYTHON_TRAIN, own_data, wait_for
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


# Searches.

SEARCH = ["-m", "hydra/sweeper=optuna", "model=linear", "trainer.epochs=2", "snapshot.every=5steps"]
SPACE = ["optimizer.lr=tag(log,interval(0.001,1))", "trainer.batch_size=64,128"]
PRUNER = "hydra.sweeper.pruner={_target_: optuna.pruners.MedianPruner, n_startup_trials: 1}"


def trials_of(folder):
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    (study,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=study, storage=storage).trials


def test_a_killed_search_ends_with_the_same_runs(start):
    """Trials 0 to 9 are random, the others are drawn from results. kill -9 while there are results to draw from."""
    command = [*PYTHON_TRAIN, *SEARCH, *SPACE, "hydra.sweeper.n_trials=12", "logger=[]"]
    whole = objectives(start(*command, "hydra.sweep.dir=whole").finish().cwd / "whole")
    assert len(whole) == 12
    for count in (3, 11):
        run = start(*command, "hydra.sweep.dir=s")
        wait_for(lambda count=count, run=run: len(list((run.cwd / "s").glob("*/run.json"))) >= count, "job", limit=150)
        run.send(signal.SIGKILL)
        run.process.wait()
    run = start(*command, "hydra.sweep.dir=s").finish()
    assert objectives(run.cwd / "s") == whole
    completed = [trial for trial in trials_of(run.cwd / "s") if trial.state == TrialState.COMPLETE]
    assert sorted(trial.value for trial in completed) == sorted(whole.values())
    more = start(*command, "hydra.sweeper.n_trials=13", "hydra.sweep.dir=s").finish()
    assert re.findall("^sweep: job (.*?),", more.output, re.MULTILINE) == ["1 of 1"]
    other = start(*command, "trainer.batch_size=64,128,256", "hydra.sweep.dir=s", "hydra.sweeper.n_trials=14").finish(1)
    assert "CategoricalDistribution does not support dynamic value space" in other.output


def test_hopeless_trials_are_pruned_with_a_snapshot_and_end_no_sweep(start):
    words = ["model=mlp", "trainer.epochs=30", "optimizer.lr=tag(log,interval(1e-9,1))", PRUNER, "hydra.sweep.dir=s"]
    run = start(*PYTHON_TRAIN, *SEARCH, *words, "hydra.sweeper.n_trials=6").finish()
    found = states(run.cwd / "s")
    pruned = [name for name, state in found.items() if state == "stopped"]
    assert pruned
    assert set(found.values()) == {"finished", "stopped"}
    assert sum(trial.state == TrialState.PRUNED for trial in trials_of(run.cwd / "s")) == len(pruned)
    for name in pruned:
        assert list((run.cwd / "s" / name / "snapshots").glob("step_*[0-9]"))
        assert f"sweep: {name} pruned\n" in run.output


def test_the_test_number_of_the_best_of_16_configurations_covers_chance_where_labels_are_random(start):
    """The number that chose is above chance. In the long run one such interval of 20 does not cover it."""
    words = [*own_data("support.own_data.random_labels"), "model=linear", "trainer.epochs=1", "logger=[]"]
    lists = ["optimizer.lr=0.01,0.03,0.1,0.3", "trainer.batch_size=32,64,128,256", "hydra.sweep.dir=s"]
    run = start(*PYTHON_TRAIN, "-m", *words, *lists).finish()
    (line,) = re.findall("^choosing: +val/accuracy (.* is the best of 16, .*)$", run.output, re.MULTILINE)
    told = r"(\S+) is .*; test/accuracy (\S+) had no part in it \(95 %: (\S+) to (\S+), from "
    chosen, test, low, high = map(float, re.match(told, line).groups())
    found = objectives(run.cwd / "s")
    assert len(found) == 16
    assert chosen == pytest.approx(max(found.values()), rel=1e-5)
    assert low <= 1 / 10 < chosen
    assert max(1 / 10, test) <= high
    assert low <= test


# Another sweeper: hydra-optuna-sweeper, with jobs, table and end as with ours.

SWEEPER = os.environ.get("LOCKSTEP_OPTUNA_SWEEPER")  # its folder: it wants an Optuna before 3, which the others do not
PLUGIN = """
_target_: hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper
sampler: {_target_: optuna.samplers.TPESampler, seed: 1}
direction: maximize
storage: null
study_name: null
n_trials: 3
n_jobs: 1
max_failure_rate: 0.0
search_space: null
custom_search_space: null
params: null
"""


@pytest.mark.skipif(SWEEPER is None, reason="LOCKSTEP_OPTUNA_SWEEPER names no folder with hydra-optuna-sweeper")
def test_it_looks_for_the_best_accuracy(start, tmp_path):
    """Ours has the name optuna, so the plugin gets another one."""
    (tmp_path / "conf" / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "conf" / "hydra" / "sweeper" / "plugin.yaml").write_text(PLUGIN)
    words = ["--config-dir=conf", "hydra/sweeper=plugin", "hydra.sweep.dir=s", "optimizer.lr=interval(0.0001,0.1)"]
    run = start(*PYTHON_TRAIN, "-m", *words, "model=linear", "trainer.max_steps=20", PYTHONPATH=SWEEPER).finish()
    accuracies = list(objectives(run.cwd / "s").values())
    assert len(set(accuracies)) > 1
    best = yaml.safe_load((run.cwd / "s" / "optimization_results.yaml").read_text())["best_value"]
    assert best == pytest.approx(max(accuracies), abs=1e-4)
    assert "sweep: 3 finished" in run.output
