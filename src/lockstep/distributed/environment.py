"""What the program that started this process says: rank, world size and local rank, and Slurm of its job.

No torch here.
"""

import ipaddress
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import ConfigError

Environment = Mapping[str, str]

LOOPBACK = "127.0.0.1"
STORE_FILE = "LOCKSTEP_STORE_FILE"  # the environment variable in which our launcher names the file of the store
STARTED_BY = "LOCKSTEP_STARTED_BY"
# Values that all ranks of a job of mpirun share, and other jobs do not. Open MPI 5 has only the second.
MPI_JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "HYDI_CONTROL_FD")


@dataclass(frozen=True)
class RankInfo:
    """One process's place in its world, as the program that started it describes it.

    started_by: "python" (a plain start), "torchrun", "srun", "mpirun", "environment" (RANK and WORLD_SIZE set by
    another program), or "spawn" or "fork" (this project's own launchers).
    store_file: holds the ranks' store, where our launcher has started them on one machine.
    master_addr, master_port: where the store listens elsewhere. Port 0: a world of one, which needs none.
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
    store_file: str = ""

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def may_start_ranks(self) -> bool:
        """Whether no other program has started this process as one of several ranks. srun --pty bash has one task."""
        return self.started_by == "python" or (self.started_by == "srun" and self.world_size == 1)

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks are known to be on this machine, so that nothing needs to listen beyond it.

        A starter that need not say how many ranks a machine has shows it by a loopback address alone.
        """
        known = self.started_by not in ("environment", "mpirun") or is_loopback(self.master_addr)
        return known and self.local_world_size >= self.world_size


def is_loopback(address: str) -> bool:
    """Whether `address` is localhost or a number such as 127.0.0.1. A name may mean another address elsewhere."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def read_rank_info(env: Environment | None = None) -> RankInfo:
    """Read torchrun's variables, else MPI's, else Slurm's; a world of one if there are none.

    Raises ConfigError for variables that are malformed, contradict each other, or leave out where the store listens.
    """
    info = _read(os.environ if env is None else env)
    if not (1 if info.world_size > 1 else 0) <= info.master_port <= 65535:
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
        return _from_mpi(env, "OMPI_COMM_WORLD_{}", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    tasks = env.get("SLURM_STEP_NUM_TASKS")  # set for the tasks of an srun step, not in the batch script around it
    if env.get("PMI_SIZE", tasks) != tasks:  # srun sets both alike. Intel MPI has the names of MPICH
        return _from_mpi(env, "PMI_{}", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if tasks is not None:
        return _from_slurm(env)
    if "RANK" in env or "WORLD_SIZE" in env:  # a script may export one of them for what srun or mpirun starts
        return _from_torchrun(env)
    return RankInfo()


def export_rank_info(info: RankInfo) -> None:
    """Set torchrun's variables in this process, so that other libraries find the rank where they look for it.

    `read_rank_info` gives the same `info` afterwards.
    """
    os.environ |= {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "MASTER_ADDR": info.master_addr or LOOPBACK,
        "MASTER_PORT": str(info.master_port or 29500),
        STARTED_BY: info.started_by,
    }


def node_rank_info(nnodes: int, node_rank: int, master_addr: str, master_port: int) -> RankInfo:
    """The place of a `launch=spawn` parent among the parents of several nodes, of which the first hosts the store.

    Raises ConfigError.
    """
    if not master_port:
        raise ConfigError(
            "launch=spawn on several nodes needs a port that all of them know; type launch.master_port=29500 on each"
        )
    if not 0 <= node_rank < nnodes:
        choices = f"launch.node_rank=0 to {nnodes - 1}"
        raise ConfigError(f"launch.node_rank={node_rank} does not fit launch.nnodes={nnodes}; type {choices}")
    return RankInfo(node_rank, nnodes, started_by="spawn", master_addr=master_addr, master_port=master_port)


def _from_torchrun(env: Environment) -> RankInfo:
    present = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    numbers = _Numbers(env, unset=" ".join(present), starter="torchrun")
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    agents = max(tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))) if "TORCHELASTIC_RUN_ID" in env else 1
    if agents > 1:
        raise ConfigError(
            f"srun started {agents} torchruns on each node, and each starts ranks of its own; "
            f"type srun --ntasks-per-node=1 torchrun ..., or srun python src/train.py without torchrun"
        )
    if not 0 <= rank < world_size:
        raise numbers.error(f"RANK={rank} does not fit WORLD_SIZE={world_size}: ranks are 0, 1, ... below WORLD_SIZE")
    started_by = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    # Without LOCAL_*, as in a container for each rank, another host of the store means other machines.
    address = env.get("MASTER_ADDR", LOOPBACK)
    is_here = "LOCAL_WORLD_SIZE" not in env and is_loopback(address)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get("LOCAL_RANK", rank if is_here else 0),
        local_world_size=numbers.get("LOCAL_WORLD_SIZE", world_size if is_here else 1),
        started_by=env.get(STARTED_BY) or started_by,
        master_addr=address,
        master_port=numbers.get("MASTER_PORT", 29500),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        store_file=env.get(STORE_FILE, ""),
    )


def _from_slurm(env: Environment) -> RankInfo:
    numbers = _Numbers(env, unset="SLURM_STEP_NUM_TASKS", starter="srun")
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))
    node, world_size = numbers["SLURM_NODEID"], numbers["SLURM_STEP_NUM_TASKS"]
    if not 0 <= node < len(tasks):
        raise numbers.error(f"SLURM_NODEID={node} does not fit SLURM_STEP_TASKS_PER_NODE of {len(tasks)} nodes")
    step = f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_STEP_ID', '0')}"
    nodelist = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    return RankInfo(
        rank=numbers["SLURM_PROCID"],
        world_size=world_size,
        local_rank=numbers["SLURM_LOCALID"],
        local_world_size=tasks[node],
        started_by="srun",
        master_addr=env.get("MASTER_ADDR") or first_host(nodelist),
        # Several runs may be in one step of one task, so such a run takes no port.
        master_port=numbers.get("MASTER_PORT", _port_of_job(step)) if world_size > 1 else 0,
    )


def _from_mpi(env: Environment, names: str, local_rank: str, local_size: str) -> RankInfo:
    """names: of the rank and the world size; local_rank, local_size: the names of those on this machine."""
    numbers = _Numbers(env, unset=names.format("SIZE"), starter="mpirun")
    rank, world_size = numbers[names.format("RANK")], numbers[names.format("SIZE")]
    local_world_size = numbers.get(local_size, world_size)
    if local_world_size < world_size and not env.get("MASTER_ADDR"):
        raise ConfigError(
            "mpirun started ranks on several hosts and MPI does not say where their store listens; "
            "type mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
        )
    job = next((env[name] for name in MPI_JOBS if env.get(name)), str(os.getppid()))
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get(local_rank, rank),
        local_world_size=local_world_size,
        started_by="mpirun",
        master_addr=env.get("MASTER_ADDR") or LOOPBACK,
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
        if name not in self.env:
            raise self.error(f"{self.unset} is set in the environment but {name} is not")
        try:
            return int(self.env[name])
        except ValueError:
            raise self.error(f"{name}={self.env[name]} in the environment is not a whole number") from None

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{what}; type `unset {self.unset}` to train alone, or start with {self.starter}")


def _port_of_job(job: str) -> int:
    """A port that all ranks of one job compute alike and that two jobs on one machine rarely share."""
    return 15000 + zlib.crc32(job.encode()) % 15000


def first_host(nodelist: str) -> str:
    """The first name in a list: "gpu[07-09,12],cpu1" -> "gpu07", "rack[0-1]b[3,5]-ib" -> "rack0b3-ib".

    An empty list is this machine.
    """
    first = re.match(r"([^,\[]|\[[^\]]*\])*", nodelist)  # up to a comma that is not in brackets
    name = first[0] if first else ""
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", name) or LOOPBACK


def tasks_per_node(counts: str) -> list[int]:
    """The tasks of each host: "2(x2),1" -> [2, 2, 1]. Raises ConfigError."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in counts.split(",")]
    if None in found:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={counts} in the environment is not a list such as 2(x2),1; "
            f"type `unset SLURM_STEP_TASKS_PER_NODE`, or start with srun"
        )
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]
