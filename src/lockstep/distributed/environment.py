"""What the program that started this process says: rank, world size and local rank, and Slurm of its job.

No torch here.
"""

import os
import re
import subprocess
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lockstep.errors import ConfigError

Environment = Mapping[str, str]

ANSWER_SECONDS = 3.0  # Slurm kills the ranks 30 s after it has asked them to end, by default


@dataclass(frozen=True)
class RankInfo:
    """One process's place in its world, as the program that started it describes it.

    started_by: "python" (a plain start), "torchrun", "srun", "mpirun", "environment" (RANK and WORLD_SIZE set by
    another program), or "spawn" or "fork" (this project's own launchers).
    master_addr, master_port: where the ranks' store listens. Port 0: a world of one, which needs none.
    agent_store: the starter listens there already, so rank 0 must not.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    started_by: str = "python"
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def may_start_ranks(self) -> bool:
        """Whether no other program has started this process as one of several ranks. srun --pty bash has one task."""
        return self.started_by == "python" or (self.started_by == "srun" and self.world_size == 1)


def read_rank_info(env: Environment | None = None) -> RankInfo:
    """Read torchrun's variables, else MPI's, else Slurm's; a world of one if there are none.

    Raises ConfigError for variables that are malformed, contradict each other, or leave out where the store listens.
    """
    info = _read(os.environ if env is None else env)
    lowest = 1 if info.world_size > 1 else 0
    if not lowest <= info.master_port <= 65535:
        raise ConfigError(
            f"MASTER_PORT={info.master_port} in the environment is no port at which ranks can meet: ports are 1 to "
            f"65535; type MASTER_PORT=29500 before the command"
        )
    if info.local_world_size < 1:
        raise ConfigError(
            f"the environment says that {info.local_world_size} ranks are on this machine, which leaves out this one; "
            f"type `unset LOCAL_WORLD_SIZE` if that is set, or start with torchrun"
        )
    return info


def _read(env: Environment) -> RankInfo:
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "OMPI_COMM_WORLD_SIZE" in env:  # before Slurm's: mpirun starts its ranks inside one srun step or several
        return _from_mpi(env, OPEN_MPI)
    tasks = env.get("SLURM_STEP_NUM_TASKS")  # set for the tasks of an srun step, not in the batch script around it
    if env.get("PMI_SIZE", tasks) != tasks:  # srun sets both alike
        return _from_mpi(env, MPICH)
    if tasks is not None:
        return _from_slurm(env)
    if "RANK" in env or "WORLD_SIZE" in env:  # a script may export one of them for what srun or mpirun starts
        return _from_torchrun(env)
    return RankInfo()


def export_rank_info(info: RankInfo) -> None:
    """Set torchrun's variables in this process, so that other libraries find the rank where they look for it.

    `read_rank_info` gives the same `info` afterwards: the next job of a sweep must find this job's store again.
    """
    environ: MutableMapping[str, str] = os.environ
    environ["RANK"] = str(info.rank)
    environ["WORLD_SIZE"] = str(info.world_size)
    environ["LOCAL_RANK"] = str(info.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(info.local_world_size)
    environ["MASTER_ADDR"] = info.master_addr or "127.0.0.1"
    environ["MASTER_PORT"] = str(info.master_port or 29500)
    environ["LOCKSTEP_STARTED_BY"] = info.started_by


def node_rank_info(nnodes: int, node_rank: int, master_addr: str, master_port: int) -> RankInfo:
    """The place of a `launch=spawn` parent among the parents of all nodes. The first of them hosts the ranks' store.

    master_port 0 means a free port, which only one node can use. Raises ConfigError for several nodes.
    """
    if nnodes > 1 and not master_port:
        raise ConfigError(
            "launch=spawn on several nodes needs a port that all of them know; type launch.master_port=29500 on each"
        )
    if not 0 <= node_rank < nnodes:
        choices = "launch.node_rank=0" if nnodes <= 1 else f"launch.node_rank=0 to {nnodes - 1}"
        raise ConfigError(f"launch.node_rank={node_rank} does not fit launch.nnodes={nnodes}; type {choices}")
    return RankInfo(node_rank, nnodes, started_by="spawn", master_addr=master_addr, master_port=master_port)


def _from_torchrun(env: Environment) -> RankInfo:
    present = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    numbers = _Numbers(env, unset=" ".join(present), starter="torchrun")
    given = {name: numbers[name] for name in present}
    for missing in {"RANK", "WORLD_SIZE"} - given.keys():
        raise ConfigError(
            f"{present[0]} is set in the environment but {missing} is not, so this rank cannot know its world; "
            f"type `unset {present[0]}` to train alone, or start with torchrun"
        )
    agents = max(tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))) if "TORCHELASTIC_RUN_ID" in env else 1
    if agents > 1:
        raise ConfigError(
            f"srun started {agents} torchruns on each node, and each starts ranks of its own; "
            f"type srun --ntasks-per-node=1 torchrun ..., or srun python src/train.py without torchrun"
        )
    rank, world_size = given["RANK"], given["WORLD_SIZE"]
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} does not fit WORLD_SIZE={world_size}: ranks are 0, 1, ... up to WORLD_SIZE - 1; "
            f"type `unset RANK WORLD_SIZE` to train alone, or start with torchrun"
        )
    started_by = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get("LOCAL_RANK", 0 if "LOCAL_WORLD_SIZE" in env else rank),
        local_world_size=numbers.get("LOCAL_WORLD_SIZE", world_size),
        started_by=env.get("LOCKSTEP_STARTED_BY") or started_by,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=numbers.get("MASTER_PORT", 29500),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(env: Environment) -> RankInfo:
    numbers = _Numbers(env, unset="SLURM_STEP_NUM_TASKS", starter="srun")
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))
    node = numbers["SLURM_NODEID"]
    if not 0 <= node < len(tasks):
        raise ConfigError(
            f"SLURM_NODEID={node} does not fit SLURM_STEP_TASKS_PER_NODE, which lists {len(tasks)} nodes; "
            f"type `unset SLURM_STEP_NUM_TASKS` to train alone, or start with srun"
        )
    step = f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_STEP_ID', '0')}"
    nodelist = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    world_size = numbers["SLURM_STEP_NUM_TASKS"]
    # Several runs may be in one step of one task, so such a run takes no port.
    port = numbers.get("MASTER_PORT", _port_of_job(step)) if world_size > 1 else 0
    return RankInfo(
        rank=numbers["SLURM_PROCID"],
        world_size=world_size,
        local_rank=numbers["SLURM_LOCALID"],
        local_world_size=tasks[node],
        started_by="srun",
        master_addr=env.get("MASTER_ADDR") or first_host(nodelist),
        master_port=port,
    )


@dataclass(frozen=True)
class _MpiNames:
    """The names of one MPI's variables. jobs: of values that all ranks of a job share and other jobs do not."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    jobs: tuple[str, ...]


OPEN_MPI = _MpiNames(
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    jobs=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),  # Open MPI 5 has only the second
)
# Intel MPI has the names of MPICH.
MPICH = _MpiNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", jobs=("HYDI_CONTROL_FD",))


def _from_mpi(env: Environment, names: _MpiNames) -> RankInfo:
    numbers = _Numbers(env, unset=names.world_size, starter="mpirun")
    rank, world_size = numbers[names.rank], numbers[names.world_size]
    local_world_size = numbers.get(names.local_world_size, world_size)
    job = next((env[name] for name in names.jobs if env.get(name)), str(os.getppid()))
    if local_world_size < world_size and not env.get("MASTER_ADDR"):
        raise ConfigError(
            "mpirun started ranks on several hosts and MPI does not say where their store listens; "
            "type mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
        )
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get(names.local_rank, rank),
        local_world_size=local_world_size,
        started_by="mpirun",
        master_addr=env.get("MASTER_ADDR") or "127.0.0.1",
        master_port=numbers.get("MASTER_PORT", _port_of_job(job)),
    )


@dataclass(frozen=True)
class _Numbers:
    """Whole numbers in the environment. `unset` and `starter` say in a ConfigError how to do without or get them."""

    env: Environment
    unset: str
    starter: str

    def get(self, name: str, default: int) -> int:
        return self[name] if self.env.get(name) else default

    def __getitem__(self, name: str) -> int:
        advice = f"type `unset {self.unset}` to train alone, or start with {self.starter}"
        if name not in self.env:
            raise ConfigError(f"{name} is missing in the environment although {self.unset} is set; {advice}")
        try:
            return int(self.env[name])
        except ValueError:
            raise ConfigError(f"{name}={self.env[name]} in the environment is not a whole number; {advice}") from None


def _port_of_job(job: str) -> int:
    """A port that all ranks of one job compute alike and that two jobs on one machine rarely share."""
    return 15000 + zlib.crc32(job.encode()) % 15000


def first_host(nodelist: str) -> str:
    """The first name in a list: "gpu[07-09,12],cpu1" -> "gpu07", "rack[0-1]b[3,5]-ib" -> "rack0b3-ib".

    An empty list is this machine.
    """
    first = re.match(r"([^,\[]|\[[^\]]*\])*", nodelist)  # up to a comma that is not in brackets
    name = first[0] if first else ""
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", name) or "127.0.0.1"


def tasks_per_node(counts: str) -> list[int]:
    """The tasks of each host: "2(x2),1" -> [2, 2, 1]. Raises ConfigError."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={counts} in the environment is not a list such as 2(x2),1; "
                f"type `unset SLURM_STEP_TASKS_PER_NODE`, or start with srun"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def slurm_reason() -> str:
    """ " as Slurm ..." if this rank is in a job that Slurm ends; empty if Slurm confirms no reason. Asks Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return ""
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if "Reason=TimeLimit" in words:
        return " as Slurm's time limit is reached"
    if any(word.startswith("PreemptTime=") for word in words) and "PreemptTime=None" not in words:
        return " as Slurm gives the nodes to another job"
    return ""
