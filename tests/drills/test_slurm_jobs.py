"""Jobs of a real Slurm of two nodes on this machine: requeued, preempted, cancelled, killed."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.failures.report import screen
from support.commands import PYTHON_TRAIN, TRAIN, wait_for
from support.faults import PARTS, is_at
from support.ports import free_port
from support.run_folders import newest_snapshot, read_log, stopped_at
from support.sweep_tables import states

MISSING = [name for name in ("munged", "slurmctld", "slurmd") if not shutil.which(name)]
CGROUPS = Path("/sys/fs/cgroup/memory")
LIMITS_MEMORY = os.access(CGROUPS, os.W_OK)  # Slurm ends a task that takes more memory than its job has
REASON = "needs root and Slurm: apt-get install slurmctld slurmd slurm-client munge"
pytestmark = [pytest.mark.drill, pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=REASON)]

SUBMIT = [*PYTHON_TRAIN, "launch=slurm", "launch.nodes=2", "launch.ntasks_per_node=1", "model=mlp"]
OWN_SCRIPT = f"""#!/bin/bash
srun --kill-on-bad-exit=1 {sys.executable} {TRAIN} model=mlp trainer.epochs=40
code=$?; case $code in 75 | 76) scontrol requeue $SLURM_JOB_ID ;; esac; exit $code
"""

# cred_expire is above KillWait, and low: a requeued job waits until its predecessor's credential has expired.
CONF = """
ClusterName=lockstep
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={here}/munge.socket,cred_expire=8
SlurmUser=root
SlurmdUser=root
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool.%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{task_plugin}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=2
SlurmdParameters=config_overrides
NodeName=node0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=low Nodes=node[0-1] Default=YES PriorityTier=1 GraceTime=10
PartitionName=high Nodes=node[0-1] PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    def __init__(self, here):
        self.here, self.conf = here, here / "slurm.conf"
        # Node names resolve nowhere here, so the ranks are told where to meet. On a real cluster they do.
        self.env = {"SLURM_CONF": str(self.conf), "MASTER_ADDR": "127.0.0.1"}
        ports, plugin = [free_port() for _ in range(3)], "cgroup" if LIMITS_MEMORY else "none"
        self.conf.write_text(CONF.format(here=here, ports=ports, task_plugin=plugin))
        (here / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nAllowedSwapSpace=0\n")
        (here / "munge.key").write_bytes(secrets.token_bytes(128))
        (here / "munge.key").chmod(0o600)
        for folder in ("state", "spool.node0", "spool.node1"):
            (here / folder).mkdir()

    def start(self):
        options = ("socket", "key-file", "pid-file", "seed-file", "log-file")
        self.run("munged", "--force", *(f"--{option}={self.here}/munge.{option.split('-')[0]}" for option in options))
        self.run("slurmctld", "-c", "-f", self.conf)
        cores = sorted(os.sched_getaffinity(0))
        for node in (0, 1):  # the ranks of a node count the cores that they may use as their own
            core = str(cores[node % len(cores)])
            self.run("taskset", "--cpu-list", core, "slurmd", "-f", self.conf, "-N", f"node{node}")
        states = ["sinfo", "--Node", "--partition=low", "--noheader", "--format=%t"]
        wait_for(lambda: self.run(*states).split() == ["idle", "idle"], "idle nodes", 60)

    def stop(self):
        for job in self.run("squeue", "--noheader", "--format=%i", check=False).split():
            self.run("scancel", job, check=False)
        wait_for(lambda: not self.run("squeue", "--noheader", check=False), "end of all jobs", 20)
        for file in sorted(self.here.glob("*.pid"), reverse=True):
            with suppress(ValueError, ProcessLookupError):
                os.kill(pid := int(file.read_text()), signal.SIGTERM)
                wait_for(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), f"end of {file.stem}", 10)
        for folder in sorted(CGROUPS.glob("slurm_node[01]/**/"), reverse=True):
            with suppress(OSError):  # another Slurm on this machine uses it
                folder.rmdir()

    def run(self, *command, check=True):
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MASTER_"))}
        run = subprocess.run([*map(str, command)], env=clean | self.env, capture_output=True, text=True)
        assert not check or run.returncode == 0, f"{command}: {run.stderr}"
        return run.stdout

    def wait_for_job(self, job, state, limit=90):
        """Wait until `job` is in `state`, or has failed. Returns its JobState, Restarts and ExitCode."""

        def show():
            return dict(re.findall(r"(JobState|Restarts|ExitCode)=(\S+)", self.run("scontrol", "show", "job", job)))

        wait_for(lambda: show()["JobState"] in (state, "FAILED"), f"{state} job", limit)
        return show()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def submit(start, slurm):
    def submitted(*overrides, **env):
        run = start(*SUBMIT, *overrides, **slurm.env, **env).finish()
        return re.search(r"submitted Slurm job (\d+)", run.output)[1]

    return submitted


def wait_until_logged(cwd, words):
    found = lambda: [log for log in cwd.glob("outputs/*/*/train.log") if words in log.read_text()]  # noqa: E731
    wait_for(found, f"{words!r} in train.log", 90)
    (log,) = found()
    return log.parent


def test_a_warning_before_the_limit_saves_and_requeues_the_job(start, slurm, submit, tmp_path):
    job = submit("trainer.epochs=40")
    wait_until_logged(tmp_path, "epoch 2/")
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@60 does before a time limit
    folder = wait_until_logged(tmp_path, "stopped early")
    assert slurm.wait_for_job(job, "COMPLETED") == {"JobState": "COMPLETED", "Restarts": "1", "ExitCode": "0:0"}
    log = read_log(folder)
    assert f"resumed from {folder}/snapshots/step_{stopped_at(folder):08d}" in log
    unbroken = start(*PYTHON_TRAIN, "launch=fork", "model=mlp", "trainer.epochs=40", "hydra.run.dir=unbroken").finish()
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
    assert "epoch 40/40" in read_log(folder)


@pytest.mark.parametrize("killed", [False, True])
def test_a_cancelled_job_saves_and_a_killed_task_fails_and_neither_is_requeued(slurm, submit, tmp_path, killed):
    """And no task stays."""
    job = submit("trainer.epochs=300")
    folder = wait_until_logged(tmp_path, "epoch 1/")
    if killed:
        os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)
        assert slurm.wait_for_job(job, "FAILED", 60) == {"JobState": "FAILED", "Restarts": "0", "ExitCode": "137:0"}
        pgrep = ["pgrep", "-f", str(folder)]
        wait_for(lambda: subprocess.run(pgrep, capture_output=True).returncode, "end of the other task", 20)
        return
    slurm.run("scancel", job)
    wait_until_logged(tmp_path, "stopped early")
    time.sleep(3)
    assert slurm.wait_for_job(job, "CANCELLED", 1)["JobState"] == "CANCELLED"
    assert list((folder / "snapshots").glob(f"step_*{stopped_at(folder)}"))


@pytest.mark.parametrize("by_scancel", [True, False])
def test_a_signal_to_a_typed_srun_loses_no_finished_snapshot(start_faulty, slurm, tmp_path, by_scancel):
    """srun asks for a second Ctrl-C, and then kills its tasks at once. scancel's signal saves the last step."""
    words = [*PARTS, "trainer.epochs=100", "evaluation.batch_size=2", "snapshot.every=1steps"]
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", *PYTHON_TRAIN, *words]
    run = start_faulty(*srun, **slurm.env, FAULT="evaluation/0.2:all:%1")
    wait_for(lambda: is_at(tmp_path, "evaluation"), "evaluation")
    if by_scancel:
        slurm.run("scancel", "--signal=INT", slurm.run("squeue", "--noheader", "--format=%i").strip())
        run.finish(75)
        assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")
        return
    wait_for(lambda: list((tmp_path / "run").glob("snapshots/step_*[0-9]")), "first snapshot")
    run.send(signal.SIGINT)
    time.sleep(0.3)
    run.send(signal.SIGINT)
    run.finish(137)
    wait_for(lambda: not slurm.run("squeue", "--noheader"), "end of the job", 10)
    run.remove_folders()
    limit = f"trainer.max_steps={newest_snapshot(tmp_path / 'run')['progress']['step'] + 1}"
    start_faulty(*PYTHON_TRAIN, *words, limit).finish()


@pytest.mark.skipif(not LIMITS_MEMORY, reason="needs a machine whose memory cgroup (v1) can be written")
def test_a_task_killed_for_want_of_memory_is_told_with_its_cause(slurm, submit, tmp_path):
    words = ["launch.nodes=1", "launch.ntasks_per_node=2", 'launch.options=["--mem=1800"]']
    words += ["model._target_=support.faults.FaultyModel", "trainer.deterministic=true"]
    slurm.wait_for_job(submit(*words, FAULT="forward/more_memory:1:3"), "FAILED")
    (report,) = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/*/*/failure.json")]
    text = screen(report)
    assert text.startswith("lockstep: rank 1 of 2 failed first ")
    assert "the system killed it: the machine, container or job has no memory left" in text
    assert "(for Slurm: --mem)" in text


def test_a_sweep_waits_for_its_jobs_and_goes_on_after_a_stop(start, slurm, tmp_path):
    words = ["-m", "optimizer.lr=0.1,1e10", "trainer.epochs=8", 'launch.options=["--exclusive"]']
    words += ["hydra.launcher.n_jobs=2", "hydra.launcher.retries=0", "hydra.sweep.dir=s"]
    run = start(*SUBMIT, *words, **slurm.env)
    wait_for(lambda: list((tmp_path / "s").glob("*/snapshots/step_*[0-9]")), "first snapshot", 150)
    run.send(signal.SIGINT, to="group")
    run.finish(75)
    assert not slurm.run("squeue", "--noheader", "--states=running,pending")
    assert set(states(tmp_path / "s").values()) <= {"finished", "stopped", "diverged"}
    start(*SUBMIT, *words, **slurm.env).finish(1)
    assert sorted(states(tmp_path / "s").values()) == ["diverged", "finished"]
    logs = [read_log(folder) for folder in (tmp_path / "s").glob("*") if (folder / "train.log").exists()]
    assert any("resumed from" in log for log in logs)
