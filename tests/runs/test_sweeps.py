"""Sweeps: a refused job harms no other, and a sampling sweeper optimises the objective in its direction.

Sweeps whose jobs finish, or diverge, are in test_starters.py.
"""

import importlib.util
import re

import pytest

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN, Command

SHORT = ["model=linear", "trainer.max_steps=2"]


def finished_jobs(run: Command) -> list[bool]:
    """Whether each job of the sweep has left a model."""
    jobs = sorted(run.cwd.glob("outputs/multirun/*/*/[0-9]"))
    return [(job / "model.pt").exists() for job in jobs]


@pytest.mark.parametrize("launch", ["env", "torchrun"])
def test_a_refused_job_of_a_sweep_leaves_the_others_alone(start, launch):
    run = start(*PYTHON_TRAIN, f"launch={launch}", *SHORT, "-m", "optimizer.lr=0.1,-1,0.01").finish(2)
    assert run.sentence == "lockstep: optimizer.lr=-1 wants a number above 0; type optimizer.lr=0.05"
    assert finished_jobs(run) == [True, False, True]
    assert "Traceback" not in run.output


def test_a_refused_job_of_a_sweep_under_torchrun_leaves_the_others_alone(start):
    sweep = [*SHORT, "optimizer.lr=0.1,-1,0.01", "-m", "seed=3"]
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, *sweep).finish(1)
    assert "lockstep: optimizer.lr=-1 wants a number above 0; type optimizer.lr=0.05" in run.output
    assert finished_jobs(run) == [True, False, True]


def test_a_sampling_sweeper_under_torchrun_is_refused(start):
    run = start(*PYTHON_TRAIN, "-m", "hydra/sweeper=optuna", RANK=0, WORLD_SIZE=2).finish(2)
    assert run.sentence.endswith("type python src/train.py -m launch=torchrun hydra/sweeper=optuna ...")


@pytest.mark.skipif(
    not importlib.util.find_spec("optuna"), reason="Optuna is not installed: pip install hydra-optuna-sweeper"
)
def test_optuna_looks_for_the_best_accuracy(start):
    trials = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "launch=fork"]
    run = start(*PYTHON_TRAIN, "-m", *trials, "optimizer.lr=interval(0.0001,0.1)", *SHORT).finish()
    accuracies = [float(value) for value in re.findall(r"^finished: .* accuracy ([\d.]+)$", run.output, re.MULTILINE)]
    assert "Directions: ['maximize']" in run.output
    assert len(set(accuracies)) > 1
    best = re.search(r"Best value: ([\d.]+)", run.output)
    assert best is not None
    assert float(best[1]) == pytest.approx(max(accuracies), abs=1e-4)
