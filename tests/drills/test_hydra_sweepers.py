"""Sweeps with a sweeper of Hydra's own, hydra-optuna-sweeper: jobs, table and end as with ours."""

import os
from pathlib import Path

import pytest
import yaml

from support.commands import PYTHON_TRAIN
from support.sweep_tables import objectives, states

pytestmark = pytest.mark.drill

SWEEPER = os.environ.get("LOCKSTEP_OPTUNA_SWEEPER")  # its folder: it wants an Optuna before 3, which the others do not
needs_sweeper = pytest.mark.skipif(
    SWEEPER is None, reason="LOCKSTEP_OPTUNA_SWEEPER names no folder with hydra-optuna-sweeper"
)
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


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Ours has the name optuna, so the plugin gets another one."""
    (tmp_path / "conf" / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "conf" / "hydra" / "sweeper" / "plugin.yaml").write_text(PLUGIN)
    return [*PYTHON_TRAIN, "-m", "--config-dir=conf", "hydra/sweeper=plugin"]


@needs_sweeper
def test_it_looks_for_the_best_accuracy(start, words):
    words += ["hydra.sweep.dir=s", "optimizer.lr=interval(0.0001,0.1)", "model=linear", "trainer.max_steps=20"]
    run = start(*words, PYTHONPATH=SWEEPER).finish()
    accuracies = list(objectives(run.cwd / "s").values())
    assert len(set(accuracies)) > 1
    best = yaml.safe_load((run.cwd / "s" / "optimization_results.yaml").read_text())["best_value"]
    assert best == pytest.approx(max(accuracies), abs=1e-4)
    assert "sweep: 3 finished" in run.output


@needs_sweeper
def test_jobs_that_fail_end_it_with_the_end_of_the_sweep(start, words):
    """At the first one, or with max_failure_rate=1 at the number that max_failures allows, or when all have failed."""
    words += ["hydra.sweep.dir=s", "model=mlp", "trainer.epochs=1", "optimizer.lr=interval(1e10,2e10)"]
    run = start(*words, PYTHONPATH=SWEEPER).finish(1)
    assert "sweep: 1 failed" in run.output
    assert "Traceback" not in run.output
    words += ["hydra.sweeper.max_failure_rate=1", "hydra.launcher.max_failures=2", "hydra.sweep.dir=t"]
    run = start(*words, PYTHONPATH=SWEEPER).finish(1)
    assert list(states(run.cwd / "t").values()) == ["diverged"] * 2
    words += ["hydra.sweeper.n_trials=1", "hydra.sweep.dir=u"]
    run = start(*words, PYTHONPATH=SWEEPER).finish(1)
    assert "sweep: 1 failed" in run.output
    assert "No trials are completed yet" in run.output
    assert "Traceback" not in run.output
