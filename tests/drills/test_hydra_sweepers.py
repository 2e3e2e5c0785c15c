"""Sweeps with a sweeper of Hydra's own, hydra-optuna-sweeper: jobs, table and end as with ours."""

import os

import pytest
import yaml

from support.commands import PYTHON_TRAIN
from support.sweep_tables import objectives

pytestmark = pytest.mark.drill

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
