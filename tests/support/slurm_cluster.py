"""A real Slurm of two nodes on this machine, with daemons, keys, ports and files of its own."""

import os
import re
import secrets
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from support.commands import wait_for
from support.ports import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
MISSING = [name for name in DAEMONS if not shutil.which(name)]
CGROUPS = Path("/sys/fs/cgroup/memory")
LIMITS_MEMORY = os.access(CGROUPS, os.W_OK)  # Slurm ends a task that takes more memory than its job has
REASON = f"Slurm drills need root and {', '.join(DAEMONS)}: apt-get install slurmctld slurmd slurm-client munge"

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
    """Daemons in the folder `here`. `run` types a command of Slurm's."""

    def __init__(self, here: Path) -> None:
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

    def start(self) -> None:
        options = ("socket", "key-file", "pid-file", "seed-file", "log-file")
        files = [f"--{option}={self.here}/munge.{option.split('-')[0]}" for option in options]
        self.run("munged", "--force", *files)
        self.run("slurmctld", "-c", "-f", self.conf)
        cores = sorted(os.sched_getaffinity(0))
        for node in (0, 1):  # the ranks of a node count the cores that they may use as their own
            core = str(cores[node % len(cores)])
            self.run("taskset", "--cpu-list", core, "slurmd", "-f", self.conf, "-N", f"node{node}")
        wait_for(lambda: self._node_states() == ["idle", "idle"], "idle nodes", 60)

    def _node_states(self) -> list[str]:
        return self.run("sinfo", "--Node", "--partition=low", "--noheader", "--format=%t").split()

    def stop(self) -> None:
        for job in self.run("squeue", "--noheader", "--format=%i", check=False).split():
            self.run("scancel", job, check=False)
        wait_for(lambda: not self.run("squeue", "--noheader", check=False), "end of all jobs", 20)
        for file in sorted(self.here.glob("*.pid"), reverse=True):
            _end_daemon(file)
        for folder in sorted(CGROUPS.glob("slurm_node[01]/**/"), reverse=True):
            with suppress(OSError):  # another Slurm on this machine uses it
                folder.rmdir()

    def run(self, *command: object, check: bool = True) -> str:
        """What the command prints. Fails the test, with its error, if it fails."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MASTER_"))}
        words = [str(word) for word in command]
        run = subprocess.run(words, env=clean | self.env, capture_output=True, text=True)
        assert not check or run.returncode == 0, f"{words}: {run.stderr}"
        return run.stdout

    def show(self, job: str) -> dict[str, str]:
        """JobState, Restarts and ExitCode."""
        return dict(re.findall(r"(JobState|Restarts|ExitCode)=(\S+)", self.run("scontrol", "show", "job", job)))

    def wait_for_job(self, job: str, state: str, limit: float = 90) -> dict[str, str]:
        """Wait until `job` is in `state`, or has failed. Returns what `show` gives then."""
        wait_for(lambda: self.show(job)["JobState"] in (state, "FAILED"), f"{state} job", limit)
        return self.show(job)


def _end_daemon(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (ValueError, ProcessLookupError):
        return
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), f"end of {pid_file.stem}", 10)
