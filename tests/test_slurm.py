"""launch=slurm and srun: the script, the refusals, and, as drills, a real Slurm of two nodes on this machine."""

import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta

import pytest

from conftest import TORCHRUN, TRAIN, free_port, wait_for
from lockstep import rendezvous
from lockstep.refusal import Refusal

DAEMONS = ("munged", "slurmctld", "slurmd")
SUBMIT = [sys.executable, TRAIN, "launch=slurm", "launch.nodes=2", "launch.ntasks_per_node=1", "model=mlp"]

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
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=2
SlurmdParameters=config_overrides
NodeName=node0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=low Nodes=node[0-1] Default=YES PriorityTier=1 GraceTime=10
PartitionName=high Nodes=node[0-1] PriorityTier=10 PreemptMode=OFF
"""  # cred_expire above KillWait, and low: a requeued job waits for its predecessor's credential to expire


class Cluster:
    """A Slurm of two nodes with daemons, keys, ports and files of its own."""

    def __init__(self, here):
        self.here = here
        # Node names resolve nowhere here, so the ranks are told where to meet; on a real cluster they do.
        self.env = dict(SLURM_CONF=here / "slurm.conf", MASTER_ADDR="127.0.0.1")
        (here / "slurm.conf").write_text(CONF.format(here=here, ports=[free_port() for _ in range(3)]))
        (here / "munge.key").write_bytes(secrets.token_bytes(128))
        (here / "munge.key").chmod(0o600)
        for folder in ("state", "spool.node0", "spool.node1"):
            (here / folder).mkdir()

    def up(self):
        files = {option: self.here / f"munge.{option.split('-')[0]}" for option in ("socket", "key-file", "pid-file", "seed-file", "log-file")}
        self("munged", "--force", *(f"--{option}={path}" for option, path in files.items()))
        self("slurmctld", "-c", "-f", self.env["SLURM_CONF"])
        cores = sorted(os.sched_getaffinity(0))
        for node in (0, 1):  # a node's ranks count the cores they may use as their own
            self("taskset", "--cpu-list", cores[node % len(cores)], "slurmd", "-f", self.env["SLURM_CONF"], "-N", f"node{node}")
        wait_for(lambda: self("sinfo", "--Node", "--partition=low", "--noheader", "--format=%t").split() == ["idle", "idle"], "idle nodes", 20)

    def down(self):
        for job in self("squeue", "--noheader", "--format=%i", check=False).split():
            self("scancel", job, check=False)
        wait_for(lambda: not self("squeue", "--noheader", check=False), "end of all jobs", 20)
        for file in sorted(self.here.glob("*.pid"), reverse=True):
            try:
                pid = int(file.read_text())
                os.kill(pid, signal.SIGTERM)
                wait_for(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), f"end of {file.stem}", 10)
            except (ValueError, ProcessLookupError):
                pass

    def __call__(self, *command, check=True):
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MASTER_"))}
        run = subprocess.run([str(word) for word in command], env=clean | self.env, capture_output=True, text=True)
        assert not check or run.returncode == 0, f"{command}: {run.stderr}"
        return run.stdout

    def show(self, job):
        return dict(re.findall(r"(JobState|Restarts|ExitCode)=(\S+)", self("scontrol", "show", "job", job)))

    def wait(self, job, state, limit=90):
        wait_for(lambda: self.show(job)["JobState"] in (state, "FAILED"), f"{state} job", limit)
        return self.show(job)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    missing = [name for name in DAEMONS if not shutil.which(name)]
    if missing or os.geteuid():
        pytest.skip(f"wants root and {', '.join(DAEMONS)}: apt-get install slurmctld slurmd slurm-client munge")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def submit(start, slurm, *overrides):
    """(job, its submitter): outputs/ fills under the submitter's cwd."""
    run = start(*SUBMIT, *overrides, **slurm.env).finish()
    return re.search(r"submitted Slurm job (\d+)", run.output)[1], run


def reaches(cwd, words):
    """Wait until the one run under `cwd` has logged `words`; its folder."""
    wait_for(lambda: any(words in log.read_text() for log in cwd.glob("outputs/*/*/train.log")), f"{words!r} in train.log", 90)
    (log,) = cwd.glob("outputs/*/*/train.log")
    return log.parent


def stopped_at(folder):
    return re.search(r"stopped early at step (\d+)", (folder / "train.log").read_text())[1]


def test_a_dry_run_prints_the_script_that_would_be_submitted(start):
    asked = ["launch.time=00:30:00", "launch.partition=gpu", "launch.warning=90", "launch.cpus_per_task=4",
             'launch.options=["--gpus-per-node=2"]', 'launch.setup=["module load cuda"]', "launch.dry_run=true"]  # fmt: skip
    run = start(*SUBMIT, *asked, "trainer.epochs=3", "hydra.run.dir=a folder/run").finish()
    script = run.output
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    for line in ("--nodes=2", "--ntasks-per-node=1", "--time=00:30:00", "--partition=gpu", "--signal=B:USR1@90", "--cpus-per-task=4",
                 "--gpus-per-node=2", "--requeue", f"--chdir={run.cwd}", f"--output='{run.cwd}/a folder/run/slurm-%j.out'"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "\nmodule load cuda\n" in script
    (command,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert command.startswith(f"srun --kill-on-bad-exit=1 --cpus-per-task=4 {sys.executable} {TRAIN} model=mlp trainer.epochs=3 launch=env ")
    assert f"""'hydra.run.dir="{run.cwd}/a folder/run"'""" in command
    assert "launch.nodes" not in command


def test_the_submitit_launcher_is_asked_for_where_it_is_missing(start):
    if importlib.util.find_spec("submitit"):
        pytest.skip("hydra-submitit-launcher is installed")
    run = start(sys.executable, TRAIN, "-m", "hydra/launcher=submitit_slurm", "optimizer.lr=0.1,0.01").finish(2)
    assert "type pip install hydra-submitit-launcher, or launch=slurm without it" in run.output


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"PATH": "/nowhere"}, "this machine has none; type launch.dry_run=true"),
        ({"SLURM_JOB_ID": "7"}, "inside Slurm job 7 would submit another one; type srun python src/train.py"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, "launch=slurm inside torchrun"),
    ],
    ids=["no sbatch", "in a job", "in torchrun"],
)
def test_a_submission_that_cannot_be_is_refused(start, env, said):
    assert said in start(*SUBMIT, "hydra.run.dir=run", **env).finish(2).output


def test_a_batch_that_the_jobs_ranks_cannot_share_is_refused_at_submission(start):
    run = start(*SUBMIT, "launch.nodes=4", "trainer.batch_size=3").finish(2)
    assert "cannot be shared by 4 ranks; try trainer.batch_size=4" in run.output


def test_torchrun_started_once_per_task_is_refused(start):
    described = dict(RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="x", SLURM_STEP_TASKS_PER_NODE="1,2")
    with pytest.raises(Refusal, match="type srun --ntasks-per-node=1 torchrun"):
        rendezvous.read(described)
    assert rendezvous.read(described | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}).size == 2
    run = start(sys.executable, TRAIN, **described).finish(2)
    assert "lockstep: srun started 2 torchruns on each node" in run.output


def test_a_requeued_step_remembers_when_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0"}
    began = rendezvous._begun(step)
    assert rendezvous._begun(step | {"SLURM_RESTART_COUNT": "1"}) == began
    assert rendezvous._begun(step | {"SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "1"}) > began
    assert rendezvous._begun(step) > began  # another job of the same number, years later
    assert datetime.now() - rendezvous._begun({}) < timedelta(seconds=1)


@pytest.mark.drill
def test_a_warning_before_the_limit_saves_and_requeues_and_the_same_folder_is_finished(start, slurm):
    job, run = submit(start, slurm, "trainer.epochs=20")
    reaches(run.cwd, "epoch 2/")
    slurm("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@60 does before a time limit
    folder = reaches(run.cwd, "stopped early")
    assert slurm.wait(job, "COMPLETED") == {"JobState": "COMPLETED", "Restarts": "1", "ExitCode": "0:0"}
    log = (folder / "train.log").read_text()
    assert f"snapshots/step_{int(stopped_at(folder)):08d}.pt" in log  # resumed where it stopped
    unbroken = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "model=mlp", "trainer.epochs=20", "hydra.run.dir=unbroken").finish()
    assert unbroken.epochs[-1].split("samples")[0].strip() in log
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


@pytest.mark.drill
def test_srun_in_a_script_of_ones_own_survives_preemption(start, slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=1 {sys.executable} {TRAIN} model=mlp trainer.epochs=20\n"
                      "code=$?; [ $code = 75 ] && scontrol requeue $SLURM_JOB_ID; exit $code\n")  # fmt: skip
    options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--chdir={tmp_path}", f"--output={tmp_path}/out"]
    job = slurm("sbatch", "--parsable", *options, script).strip()
    reaches(tmp_path, "epoch 2/")
    slurm("srun", "--partition=high", "--nodes=2", "--ntasks-per-node=4", "true")
    folder = reaches(tmp_path, "stopped early")
    assert slurm.wait(job, "COMPLETED")["Restarts"] == "1", (tmp_path / "out").read_text()
    assert f"resumed from {folder}/snapshots/step_{int(stopped_at(folder)):08d}.pt" in (folder / "train.log").read_text()
    assert "epoch 20/20" in (folder / "train.log").read_text()


@pytest.mark.drill
def test_a_cancelled_job_saves_and_is_not_requeued(start, slurm):
    job, run = submit(start, slurm, "trainer.epochs=300")
    reaches(run.cwd, "epoch 1/")
    slurm("scancel", job)
    folder = reaches(run.cwd, "stopped early")
    time.sleep(3)
    assert slurm.show(job)["JobState"] == "CANCELLED"
    assert list((folder / "snapshots").glob(f"*{stopped_at(folder)}.json"))


@pytest.mark.drill
def test_a_killed_task_ends_the_job_as_failed_and_leaves_no_other(start, slurm):
    job, run = submit(start, slurm, "trainer.epochs=300")
    folder = reaches(run.cwd, "epoch 1/")
    os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)
    assert slurm.wait(job, "FAILED", 10) == {"JobState": "FAILED", "Restarts": "0", "ExitCode": "137:0"}
    wait_for(lambda: subprocess.run(["pgrep", "-f", str(folder)], capture_output=True).returncode, "end of the other task", 5)


@pytest.mark.drill
def test_srun_starts_one_torchrun_a_node(start, slurm, tmp_path):
    agent = f"{' '.join(TORCHRUN)} --nnodes=2 --node_rank=$SLURM_NODEID --nproc_per_node=2 --master_addr=127.0.0.1 --master_port={free_port()}"
    run = start("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", f"{agent} {TRAIN} model=mlp trainer.epochs=1", **slurm.env).finish()
    assert "of 4 ranks" in run.output
    assert len(run.epochs) == 1
    assert run.folder
