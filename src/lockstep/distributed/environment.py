"""What the program that started this process says: rank, world size and local rank. No torch here."""

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import ConfigError

Environment = Mapping[str, str]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torch's
STORE_FILE = "LOCKSTEP_STORE_FILE"  # the environment variable in which our launcher names the file of the store
STARTED_BY = "LOCKSTEP_STARTED_BY"
ADVICE = "type `unset RANK WORLD_SIZE` to train alone, or start with torchrun, srun or mpirun"
# Values that all ranks of a job of mpirun share, and other jobs do not. Open MPI 5 has only the second.
MPI_JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "HYDI_CONTROL_FD")


@dataclass(frozen=True)
class RankInfo:
    """One process's place in its world, as the program that started it describes it. started_by: "python" (a plain
    start), "torchrun", "srun", "mpirun", "environment" (RANK and WORLD_SIZE set by another program), or "spawn" or
    "fork" (this project's own launchers). store_file: holds the ranks' store, where our launcher has started them on
    one machine. master_addr, master_port: where the store listens elsewhere. Port 0: a world of one, which needs none.
    agent_store: the starter listens there already, so rank 0 must not."""

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
    def may_start_ranks(self) -> bool:
        """Whether no other program has started this process as one of several ranks. srun --pty bash has one task."""
        return self.started_by == "python" or (self.started_by == "srun" and self.world_size == 1)

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks are known to be on this machine, so that nothing needs to listen beyond it. A starter that
        need not say how many ranks a machine has shows it by a loopback address alone."""
        is_known = self.started_by not in ("environment", "mpirun") or is_loopback(self.master_addr)
        return is_known and self.local_world_size >= self.world_size


def is_loopback(address: str) -> bool:
    """Whether `address` is of this machine alone. Another name may mean another address elsewhere."""
    return address in ("localhost", "::1") or re.fullmatch(r"127[.\d]+", address) is not None


def read_rank_info(env: Environment | None = None) -> RankInfo:
    """Read torchrun's variables, else MPI's, else Slurm's; a world of one if there are none. Raises ConfigError."""
    env = os.environ if env is None else env
    # Set for the tasks of an srun step, not in the batch script around it. srun sets PMI_SIZE alike.
    tasks, pmi_size = env.get("SLURM_STEP_NUM_TASKS"), env.get("PMI_SIZE")
    of_torchrun = {"RANK", "WORLD_SIZE"} & {*env}
    if len(of_torchrun) < 2:
        if "OMPI_COMM_WORLD_SIZE" in env:  # before Slurm's: mpirun starts its ranks inside one srun step or several
            return _from_mpi(env, *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
        if pmi_size not in (None, tasks):  # Intel MPI has the names of MPICH
            return _from_mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        if tasks is not None:
            return _from_slurm(env)
        if not of_torchrun:  # a script may export one of them for what srun or mpirun starts
            return RankInfo()
    # Without LOCAL_*, as in a container for each rank, another host of the store means other machines.
    if "LOCAL_WORLD_SIZE" not in env and not is_loopback(env.get("MASTER_ADDR", LOOPBACK)):
        env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | dict(env)
    started_by = env.get(STARTED_BY) or ("torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment")
    info = _read(env, started_by, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), DEFAULT_PORT)
    is_hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(info, agent_store=is_hosted, store_file=env.get(STORE_FILE, ""))


def _from_mpi(env: Environment, *names: str) -> RankInfo:
    job = next((env[name] for name in MPI_JOBS if env.get(name)), str(os.getppid()))
    info = _read(env, "mpirun", names, _port_of_job(job))
    if info.local_world_size < info.world_size and not env.get("MASTER_ADDR"):
        what = "mpirun started ranks on several hosts and MPI does not say where their store listens"
        raise ConfigError(f"{what}; type mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...")
    return info


def _from_slurm(env: Environment) -> RankInfo:
    tasks = env["SLURM_STEP_NUM_TASKS"]
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", tasks))  # "2(x2),1": 2, 2 and 1
    of_nodes = [of_node for of_node, times in pairs for _ in range(int(times or 1))]
    # Of "gpu[07-09,12],cpu1" gpu07, of "rack[0-1]b[3,5]-ib" rack0b3-ib: up to a comma that is not in brackets.
    first = re.findall(r"(?:[^,\[]|\[[^\]]*\])*", env.get("SLURM_STEP_NODELIST", ""))[0]
    known = {"MASTER_ADDR": re.sub(r"\[(\w*)[^\]]*\]", r"\1", first), "TASKS": of_nodes[_number(env, "SLURM_NODEID")]}
    port = _port_of_job(f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_STEP_ID', '0')}")
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "TASKS")
    info = _read(known | dict(env), "srun", names, port)
    # Several runs may be in one step of one task, so such a run takes no port.
    return info if info.world_size > 1 else replace(info, master_port=0)


def _read(env: Environment, started_by: str, names: Sequence[str], port: int) -> RankInfo:
    """names: of the rank, the world size, and both on this machine, which a starter of one machine need not say."""
    rank, world_size = _number(env, names[0]), _number(env, names[1])
    if not 0 <= rank < world_size:
        raise ConfigError(f"{names[0]}={rank} does not fit {names[1]}={world_size}; {ADVICE}")
    place = rank, world_size, _number(env, names[2], rank), _number(env, names[3], world_size)
    return RankInfo(*place, started_by, env.get("MASTER_ADDR") or LOOPBACK, _number(env, "MASTER_PORT", port))


def export_rank_info(info: RankInfo) -> None:
    """Set torchrun's variables, where other libraries look. `read_rank_info` gives the same `info` afterwards."""
    os.environ |= {"RANK": str(info.rank), "LOCAL_RANK": str(info.local_rank), STARTED_BY: info.started_by}
    os.environ |= {"WORLD_SIZE": str(info.world_size), "LOCAL_WORLD_SIZE": str(info.local_world_size)}
    os.environ |= {"MASTER_ADDR": info.master_addr or LOOPBACK, "MASTER_PORT": str(info.master_port or DEFAULT_PORT)}


def node_rank_info(nnodes: int, node_rank: int, master_addr: str, master_port: int) -> RankInfo:
    """The place of a `launch=spawn` parent among the parents of several nodes, of which the first hosts the store."""
    if not 0 <= node_rank < nnodes:
        what = f"launch.node_rank={node_rank} does not fit launch.nnodes={nnodes}"
        raise ConfigError(f"{what}; type launch.node_rank=0 to {nnodes - 1}")
    return RankInfo(node_rank, nnodes, started_by="spawn", master_addr=master_addr, master_port=master_port)


def _number(env: Environment, name: str, default: int | None = None) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    if not re.fullmatch(r"-?\d+", text):
        raise ConfigError(f"{name}={text} in the environment is not a whole number; {ADVICE}")
    return int(text)


def _port_of_job(job: str) -> int:
    """A port that all ranks of one job compute alike and that two jobs on one machine rarely share."""
    return 15000 + zlib.crc32(job.encode()) % 15000
