"""Searches in real sweeps: what a kill changes, which is nothing; pruning; what choosing costs."""

import re
import signal

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from support.commands import PYTHON_TRAIN, own_data, wait_for
from support.sweep_tables import objectives, states

pytestmark = pytest.mark.drill

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
