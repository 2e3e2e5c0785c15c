"""Sweeps with a sweeper of Hydra's own, Optuna's: the same table and summary."""

import os

import pytest
import yaml

from support.commands import PYTHON_TRAIN
from support.sweep_tables import column, states

pytestmark = pytest.mark.drill

SWEEPER = os.environ.get("LOCKSTEP_OPTUNA_SWEEPER")  # its folder: it wants an Optuna before 3, which the others do not


needs_sweeper = pytest.mark.skipif(
    SWEEPER is None, reason="LOCKSTEP_OPTUNA_SWEEPER names no folder with hydra-optuna-sweeper"
)


@needs_sweeper
def test_optuna_looks_for_the_best_accuracy(start):
    trials = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=s"]
    trials += ["hydra.sweeper.sampler.seed=1", "hydra.sweeper.direction=maximize"]
    words = ["optimizer.lr=interval(0.0001,0.1)", "model=linear", "trainer.max_steps=20"]
    run = start(*PYTHON_TRAIN, "-m", *trials, *words, PYTHONPATH=SWEEPER).finish()
    accuracies = [float(value) for value in column(run.cwd / "s", "objective")]
    assert len(set(accuracies)) > 1
    best = yaml.safe_load((run.cwd / "s" / "optimization_results.yaml").read_text())["best_value"]
    assert best == pytest.approx(max(accuracies), abs=1e-4)
    assert "sweep: 3 finished" in run.output


@needs_sweeper
def test_jobs_that_fail_end_a_sweep_of_optuna_with_its_summary(start):
    """At the first one, or with hydra.sweeper.max_failure_rate=1 at the number that sweep.max_failures allows, or when
    all trials have failed.
    """
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=s"]
    words += ["model=mlp", "trainer.epochs=1", "optimizer.lr=interval(1e10,2e10)"]
    run = start(*PYTHON_TRAIN, "-m", *words, PYTHONPATH=SWEEPER).finish(1)
    assert "sweep: 1 failed" in run.output
    assert "Traceback" not in run.output
    words += ["hydra.sweeper.max_failure_rate=1", "sweep.max_failures=2", "hydra.sweep.dir=t"]
    run = start(*PYTHON_TRAIN, "-m", *words, PYTHONPATH=SWEEPER).finish(1)
    assert states(run.cwd / "t") == ["failed"] * 2
    words += ["hydra.sweeper.n_trials=1", "hydra.sweep.dir=u"]
    run = start(*PYTHON_TRAIN, "-m", *words, PYTHONPATH=SWEEPER).finish(1)
    assert "sweep: 1 failed" in run.output
    assert "No trials are completed yet" in run.output
    assert "Traceback" not in run.output
