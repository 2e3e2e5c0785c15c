"""Sweeps with launchers and a sweeper of Hydra's own: the same table, and a job that fails harms no other."""

import importlib.util
import os
import re
import signal

import pytest

from support.commands import PYTHON_TRAIN, ROOT, command_line, processes_of, wait_for
from support.sweep_tables import column, states

pytestmark = pytest.mark.drill


def needs(plugin: str) -> pytest.MarkDecorator:
    package = f"hydra-{plugin.replace('_', '-')}"
    missing = not (
        importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.hydra_{plugin}")
    )
    return pytest.mark.skipif(missing, reason=f"no plugin of Hydra: pip install {package}")


JOBLIB = pytest.param(["hydra/launcher=joblib"], marks=needs("joblib_launcher"), id="joblib")
IN_PROCESS = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]  # without a worker of joblib's
ONE = pytest.param(IN_PROCESS, marks=needs("joblib_launcher"), id="joblib-1")
SUBMITIT = pytest.param(["hydra/launcher=submitit_local"], marks=needs("submitit_launcher"), id="submitit")


@pytest.mark.parametrize("launch", ["env", "torchrun", "spawn", "fork"])
@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT])
def test_launchers_of_hydra_fill_the_table(start, launcher, launch):
    jobs = ["-m", "optimizer.lr=0.1,1e10", "model=mlp", "trainer.epochs=1", f"launch={launch}"]
    run = start(*PYTHON_TRAIN, *jobs, "hydra.sweep.dir=s", *launcher).finish(6)
    assert states(run.cwd / "s") == ["finished", "failed"]
    alone = start(*PYTHON_TRAIN, *jobs, "hydra.sweep.dir=t").finish(6)
    assert column(run.cwd / "s", "objective")[0] == column(alone.cwd / "t", "objective")[0]
    assert "the loss is" in column(run.cwd / "s", "cause")[1]
    assert (run.cwd / "s" / "0_optimizer.lr=0.1" / "model.pt").exists()
    assert "leaked" not in run.output


@pytest.mark.parametrize("launcher", [JOBLIB, ONE, SUBMITIT])
def test_a_job_of_a_launcher_of_hydra_harms_no_other(start, launcher):
    swept = ["model._target_=support.faults.SweptModel", "+model.kind=none,raise,kill,none", "+model.rank=0"]
    command = [*PYTHON_TRAIN, "-m", "model=mlp", *swept, "trainer.epochs=1", "hydra.sweep.dir=s", *launcher]
    run = start(*command, PYTHONPATH=ROOT / "tests").finish(6)
    assert states(run.cwd / "s") == ["finished", "failed", "failed", "finished"]
    assert "RuntimeError: a mistake" in column(run.cwd / "s", "cause")[1]
    assert "SIGKILL" in column(run.cwd / "s", "cause")[2]


@pytest.mark.parametrize("launcher", [JOBLIB, ONE, SUBMITIT])
def test_a_signal_stops_the_jobs_of_a_launcher_of_hydra(start, launcher):
    """Those that run save, those that wait do not start, and no process is left."""
    jobs = ["-m", "seed=1,2,3", "model=mlp", "trainer.epochs=400", "hydra.sweep.dir=s"]
    run = start(*PYTHON_TRAIN, *jobs, *launcher)
    wait_for(lambda: list((run.cwd / "s").glob("0_*/snapshots/*.json")), "snapshot")
    run.send(signal.SIGTERM)
    run.finish(75)
    assert set(states(run.cwd / "s")) == {"stopped"}
    assert "stopped early" in (run.cwd / "s" / "0_seed=1" / "train.log").read_text()
    wait_for(lambda: not processes_of(run.process.pid), "end of joblib's helper process", 20)


@pytest.mark.parametrize("launcher", [JOBLIB, ONE, SUBMITIT])
def test_a_killed_sweep_with_a_launcher_of_hydra_ends_its_jobs_which_then_go_on(start, launcher):
    jobs = ["-m", "seed=1,2", "model=mlp", "trainer.epochs=80", "snapshot.every=5steps", "hydra.sweep.dir=s"]
    run = start(*PYTHON_TRAIN, *jobs, *launcher)
    wait_for(lambda: list((run.cwd / "s").glob("0_*/snapshots/step_*.json")), "snapshot")
    run.send(signal.SIGKILL)
    run.process.wait()
    start(*PYTHON_TRAIN, "-m", "sweep.resume=s", *launcher).finish()
    wait_for(lambda: not processes_of(run.process.pid), "end of the killed sweep's workers", 20)
    assert states(run.cwd / "s") == ["finished"] * 2
    assert "resumed from" in (run.cwd / "s" / "0_seed=1" / "train.log").read_text()


def test_a_launcher_whose_worker_is_killed_leaves_the_rows_as_their_runs_are(start):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install hydra-joblib-launcher")
    jobs = ["-m", "trainer.epochs=1,400,401", "model=mlp", "hydra.sweep.dir=s", "hydra/launcher=joblib"]
    run = start(*PYTHON_TRAIN, *jobs, "hydra.launcher.n_jobs=2")
    wait_for(lambda: list((run.cwd / "s").glob("2_*/snapshots/*.json")), "snapshot of the last job")
    workers = [pid for pid in processes_of(run.process.pid) if b"LokyProcess" in command_line(pid)]
    os.kill(min(workers), signal.SIGKILL)
    run.finish(1)
    assert "TerminatedWorkerError" in run.output
    assert states(run.cwd / "s")[0] == "finished"
    assert column(run.cwd / "s", "objective")[0]
    assert not set(states(run.cwd / "s")[1:]) & {"finished", "running"}


SWEEPER = os.environ.get("LOCKSTEP_OPTUNA_SWEEPER")  # its folder: it wants an Optuna before 3, which the others do not


needs_sweeper = pytest.mark.skipif(
    SWEEPER is None, reason="LOCKSTEP_OPTUNA_SWEEPER names no folder with hydra-optuna-sweeper"
)


@needs_sweeper
def test_optuna_looks_for_the_best_accuracy(start):
    trials = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=s"]
    trials += ["hydra.sweeper.sampler.seed=1"]
    words = ["optimizer.lr=interval(0.0001,0.1)", "model=linear", "trainer.max_steps=20"]
    run = start(*PYTHON_TRAIN, "-m", *trials, *words, PYTHONPATH=SWEEPER).finish()
    accuracies = [float(value) for value in column(run.cwd / "s", "objective")]
    assert "Directions: ['maximize']" in run.output
    assert len(set(accuracies)) > 1
    best = re.search(r"Best value: ([\d.]+)", run.output)
    assert best is not None
    assert float(best[1]) == pytest.approx(max(accuracies), abs=1e-4)
    assert "sweep: 3 finished" in run.output


@needs_sweeper
def test_jobs_that_fail_end_a_sweep_of_optuna_with_its_summary(start):
    """At the first one, or with hydra.sweeper.max_failure_rate=1 at the number that sweep.max_failures allows, or when
    all trials have failed.
    """
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=s"]
    words += ["model=mlp", "trainer.epochs=1", "optimizer.lr=interval(1e10,2e10)"]
    run = start(*PYTHON_TRAIN, "-m", *words, PYTHONPATH=SWEEPER).finish(6)
    assert "sweep: 1 failed" in run.output
    assert "Traceback" not in run.output
    words += ["hydra.sweeper.max_failure_rate=1", "sweep.max_failures=2", "hydra.sweep.dir=t"]
    run = start(*PYTHON_TRAIN, "-m", *words, PYTHONPATH=SWEEPER).finish(6)
    assert states(run.cwd / "t") == ["failed"] * 2
    words += ["hydra.sweeper.n_trials=1", "hydra.sweep.dir=u"]
    run = start(*PYTHON_TRAIN, "-m", *words, PYTHONPATH=SWEEPER).finish(6)
    assert "sweep: 1 failed" in run.output
    assert "No trials are completed yet" in run.output
    assert "Traceback" not in run.output
