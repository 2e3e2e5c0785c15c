"""Jobs of a real Slurm of two nodes on this machine: requeued, preempted, cancelled, killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.failures.report import screen
from support import slurm_cluster
from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN, Command, wait_for
from support.phases import PARTS, in_phase
from support.ports import free_port
from support.run_folders import newest_snapshot, read_log, stopped_at
from support.slurm_cluster import SlurmCluster
from support.sweep_tables import states

TESTS = str(Path(__file__).parents[1])
SUBMIT = [*PYTHON_TRAIN, "launch=slurm", "launch.nodes=2", "launch.ntasks_per_node=1", "model=mlp"]
OWN_SCRIPT = f"""#!/bin/bash
srun --kill-on-bad-exit=1 {sys.executable} {TRAIN} model=mlp trainer.epochs=60
code=$?; case $code in 75 | 76) scontrol requeue $SLURM_JOB_ID ;; esac; exit $code
"""

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(bool(slurm_cluster.MISSING) or os.geteuid() != 0, reason=slurm_cluster.REASON),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def submit(start: Callable[..., Command], slurm: SlurmCluster, *overrides: str, **env: str) -> tuple[str, Path]:
    """(job, the folder in which it was submitted): outputs/ fills there."""
    run = start(*SUBMIT, *overrides, **slurm.env, **env).finish()
    job = re.search(r"submitted Slurm job (\d+)", run.output)
    assert job
    return job[1], run.cwd


def wait_until_logged(cwd: Path, words: str) -> Path:
    """Wait until the one run under `cwd` has logged `words`. Returns its folder."""

    def logged() -> bool:
        return any(words in log.read_text() for log in cwd.glob("outputs/*/*/train.log"))

    wait_for(logged, f"{words!r} in train.log", 90)
    (log,) = cwd.glob("outputs/*/*/train.log")
    return log.parent


def test_a_warning_before_the_limit_saves_and_requeues_the_job(start, slurm):
    job, cwd = submit(start, slurm, "trainer.epochs=60")
    wait_until_logged(cwd, "epoch 2/")
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@60 does before a time limit
    folder = wait_until_logged(cwd, "stopped early")
    assert slurm.wait_for_job(job, "COMPLETED") == {"JobState": "COMPLETED", "Restarts": "1", "ExitCode": "0:0"}
    log = read_log(folder)
    assert f"resumed from {folder}/snapshots/step_{stopped_at(folder):08d}" in log
    unbroken = start(*PYTHON_TRAIN, "launch=fork", "model=mlp", "trainer.epochs=60", "hydra.run.dir=unbroken").finish()
    assert unbroken.epochs[-1].split("samples")[0].strip() in log
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


def test_srun_in_a_script_of_ones_own_survives_preemption(start, slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(OWN_SCRIPT)
    options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    options += [f"--chdir={tmp_path}", f"--output={tmp_path}/out"]
    job = slurm.run("sbatch", "--parsable", *options, script).strip()
    wait_until_logged(tmp_path, "epoch 2/")
    slurm.run("srun", "--partition=high", "--nodes=2", "--ntasks-per-node=4", "true")
    folder = wait_until_logged(tmp_path, "stopped early")
    assert slurm.wait_for_job(job, "COMPLETED")["Restarts"] == "1", (tmp_path / "out").read_text()
    assert f"stopped early at step {stopped_at(folder)}; " in read_log(folder)
    assert f"resumed from {folder}/snapshots/step_{stopped_at(folder):08d}" in read_log(folder)
    assert "epoch 60/60" in read_log(folder)


def test_a_cancelled_job_saves_and_is_not_requeued(start, slurm):
    job, cwd = submit(start, slurm, "trainer.epochs=300")
    wait_until_logged(cwd, "epoch 1/")
    slurm.run("scancel", job)
    folder = wait_until_logged(cwd, "stopped early")
    time.sleep(3)
    assert slurm.show(job)["JobState"] == "CANCELLED"
    assert list((folder / "snapshots").glob(f"step_*{stopped_at(folder)}"))


def start_srun(start_faulty, slurm: SlurmCluster, tmp_path: Path, phase: str, seconds: float) -> Command:
    """A typed srun of two tasks that have come to `phase`."""
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", *PYTHON_TRAIN, *PARTS, "trainer.epochs=100"]
    words += ["evaluation.batch_size=2", "snapshot.every=1steps"]
    run = start_faulty(*words, **slurm.env, LINGER=f"{phase}:{seconds}", PYTHONPATH=TESTS)
    wait_for(lambda: in_phase(tmp_path, phase), phase)
    return run


@pytest.mark.parametrize(("phase", "number"), [("meeting", signal.SIGINT), ("evaluation", signal.SIGHUP)])
def test_a_signal_to_a_typed_srun_loses_no_finished_snapshot(start_faulty, slurm, tmp_path, phase, number):
    """srun asks for a second Ctrl-C, and then kills its tasks at once, as it does when the terminal closes."""
    trains = phase in ("step", "evaluation")
    run = start_srun(start_faulty, slurm, tmp_path, phase, 0.2 if trains else 60)
    wait_for(lambda: not trains or list((tmp_path / "run").glob("snapshots/step_*[0-9]")), "first snapshot")
    run.send(number)
    if number == signal.SIGINT:
        time.sleep(0.3)
        run.send(number)
    run.finish(137)
    wait_for(lambda: not slurm.run("squeue", "--noheader"), "end of the job", 10)
    run.remove_folders()
    if trains:
        words = ["hydra.run.dir=run", f"trainer.max_steps={newest_snapshot(tmp_path / 'run')['progress']['step'] + 1}"]
        start_faulty(
            *PYTHON_TRAIN, *PARTS, "trainer.epochs=100", "evaluation.batch_size=2", *words, PYTHONPATH=TESTS
        ).finish()


@pytest.mark.parametrize(("phase", "name"), [("step", "TERM"), ("evaluation", "INT")])
def test_a_signal_by_scancel_saves_the_last_step(start_faulty, slurm, tmp_path, phase, name):
    run = start_srun(start_faulty, slurm, tmp_path, phase, 0.2)
    slurm.run("scancel", f"--signal={name}", slurm.run("squeue", "--noheader", "--format=%i").strip())
    run.finish(75)
    assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")


def test_a_killed_task_ends_the_job_as_failed_and_leaves_no_other(start, slurm):
    job, cwd = submit(start, slurm, "trainer.epochs=300")
    folder = wait_until_logged(cwd, "epoch 1/")
    os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)
    assert slurm.wait_for_job(job, "FAILED", 60) == {"JobState": "FAILED", "Restarts": "0", "ExitCode": "137:0"}
    pgrep = ["pgrep", "-f", str(folder)]
    wait_for(lambda: subprocess.run(pgrep, capture_output=True).returncode, "end of the other task", 20)


@pytest.mark.skipif(not slurm_cluster.LIMITS_MEMORY, reason="needs a machine whose memory cgroup (v1) can be written")
def test_a_task_killed_for_want_of_memory_is_told_with_its_cause(start, slurm):
    words = ["launch.nodes=1", "launch.ntasks_per_node=2", 'launch.options=["--mem=1800"]']
    words += ["model._target_=support.faults.FaultyModel", "trainer.deterministic=true"]
    job, cwd = submit(start, slurm, *words, FAULT="forward/more_memory:1:3", PYTHONPATH=TESTS)
    slurm.wait_for_job(job, "FAILED")
    (report,) = [json.loads(path.read_text()) for path in cwd.glob("outputs/*/*/failure.json")]
    text = screen(report)
    assert text.startswith("lockstep: rank 1 of 2 failed first ")
    assert "the system killed it: the machine, container or job has no memory left" in text
    assert "(for Slurm: --mem)" in text


def test_a_sweep_waits_for_its_jobs_and_goes_on_after_a_stop(start, slurm, tmp_path):
    words = ["-m", "optimizer.lr=0.1,1e10,0.05", "trainer.epochs=20", 'launch.options=["--exclusive"]']
    words += ["hydra.launcher.n_jobs=2", "hydra.launcher.retries=0", "hydra.sweep.dir=s"]
    run = start(*SUBMIT, *words, **slurm.env)
    wait_for(lambda: list((tmp_path / "s").glob("*/snapshots/step_*[0-9]")), "first snapshot", 150)
    run.send(signal.SIGINT, to="group")
    run.finish(75)
    assert not slurm.run("squeue", "--noheader", "--states=running,pending")
    assert set(states(tmp_path / "s").values()) <= {"finished", "stopped", "diverged"}
    start(*SUBMIT, *words, **slurm.env).finish(1)
    assert sorted(states(tmp_path / "s").values()) == ["diverged", "finished", "finished"]
    logs = [read_log(folder) for folder in (tmp_path / "s").glob("*") if (folder / "train.log").exists()]
    assert any("resumed from" in log for log in logs)


def test_srun_starts_one_torchrun_a_node(start, slurm):
    where = f"--nnodes=2 --node_rank=$SLURM_NODEID --master_addr=127.0.0.1 --master_port={free_port()}"
    agent = f"{' '.join(TORCHRUN)} {where} --nproc_per_node=2 {TRAIN} model=mlp trainer.epochs=1"
    run = start("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", agent, **slurm.env).finish()
    assert "rank 0 of 4" in run.output
    assert len(run.epochs) == 1
    assert run.folder
