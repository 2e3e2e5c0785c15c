"""Who am I, and where do we meet: environment -> rank, world size, local rank; the shared store; the shared clock.

torch is imported inside the functions that need a store, never at the top: `--help` and `--cfg job` need none.
"""

import json
import os
import re
import socket
import time
import uuid
import zlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from urllib.parse import quote

from lockstep.refusal import Refusal

STORE_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Ranks:
    """One process's place in its world, as its starter described it.

    `starter` names who described it ("nobody" for a plain `python src/train.py`); `agent_store` is true where the
    starter already listens at master_addr:master_port, so that rank 0 must not.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    starter: str = "nobody"
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False

    @property
    def leads(self):
        return self.rank == 0


def read(env=None):
    """Read a process's place from environment variables: torchrun's, else Slurm's, else MPI's, else alone.

    A launcher of ours inside an outer one is caught by `starter`. Raises Refusal where the variables contradict
    each other or leave out where to meet.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        return _standard(env)
    if "SLURM_STEP_NUM_TASKS" in env:  # set by srun for a step's tasks, and not in the batch script around it
        return _slurm(env)
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _mpi(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                    "OMPI_COMM_WORLD_LOCAL_SIZE", job="OMPI_MCA_ess_base_jobid")  # fmt: skip
    if "PMI_SIZE" in env:  # MPICH and Intel MPI
        return _mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job="HYDI_CONTROL_FD")
    return Ranks()


def _standard(env):
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        present = "RANK" if "RANK" in env else "WORLD_SIZE"
        raise Refusal(
            f"{present} is set in the environment but {missing[0]} is not, so this rank cannot know its world; "
            f"type `unset {present}` to train alone, or start with torchrun"
        )
    agents = max(_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1")))
    if agents > 1 and "TORCHELASTIC_RUN_ID" in env:
        raise Refusal(
            f"srun started {agents} torchruns on each node, and each starts ranks of its own; "
            f"type srun --ntasks-per-node=1 torchrun ..., or srun python src/train.py without torchrun"
        )
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if not 0 <= rank < size:
        raise Refusal(f"RANK={rank} does not fit WORLD_SIZE={size}; ranks count from 0 to {size - 1}")
    return Ranks(
        rank=rank,
        size=size,
        local_rank=int(env.get("LOCAL_RANK", 0 if "LOCAL_WORLD_SIZE" in env else rank)),
        local_size=int(env.get("LOCAL_WORLD_SIZE", size)),
        starter=env.get("LOCKSTEP_STARTER") or ("torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", 29500)),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm(env):
    step = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', 0)}"
    return Ranks(
        rank=int(env["SLURM_PROCID"]),
        size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(env["SLURM_LOCALID"]),
        local_size=_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))[int(env["SLURM_NODEID"])],
        starter="srun",
        master_addr=env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))),
        master_port=int(env.get("MASTER_PORT") or _port_of(step)),
    )


def _per_node(counts):
    """Slurm's "2(x2),1" -> [2, 2, 1]."""
    nodes = []
    for part in counts.split(","):
        count, repeat = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part).groups()
        nodes += [int(count)] * int(repeat or 1)
    return nodes


def first_host(nodelist):
    """The first name of a Slurm node list: "gpu[07-09,12],cpu1" -> "gpu07"."""
    name, numbers = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?", nodelist).groups()
    return name + re.split(r"[-,]", numbers)[0] if numbers else name or "127.0.0.1"


def _mpi(env, rank, size, local_rank, local_size, job):
    ranks = int(env[size])
    alone_here = int(env.get(local_size, ranks))
    if alone_here < ranks and not env.get("MASTER_ADDR"):
        raise Refusal(
            "mpirun started ranks on several hosts and MPI does not say where to meet; "
            "type mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
        )
    return Ranks(
        rank=int(env[rank]),
        size=ranks,
        local_rank=int(env.get(local_rank, env[rank])),
        local_size=alone_here,
        starter="mpirun",
        master_addr=env.get("MASTER_ADDR") or "127.0.0.1",
        master_port=int(env.get("MASTER_PORT") or _port_of(env.get(job) or str(os.getppid()))),
    )


def _port_of(job):
    """A port that all ranks of one job compute alike and two jobs on one machine rarely share."""
    return 15000 + zlib.crc32(job.encode()) % 15000


def free_port():
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def export(ranks):
    """Leave the standard names in the environment, so that any library finds its rank where it looks for it."""
    os.environ.update(
        RANK=str(ranks.rank), WORLD_SIZE=str(ranks.size), LOCAL_RANK=str(ranks.local_rank),
        LOCAL_WORLD_SIZE=str(ranks.local_size), MASTER_ADDR=ranks.master_addr or "127.0.0.1",
        MASTER_PORT=str(ranks.master_port or 29500),
    )  # fmt: skip


@cache
def store(ranks):
    """The key-value store all of `ranks` share for the life of this process. A world of one needs no port.

    Raises Refusal where rank 0 should listen and somebody else already does.
    """
    import torch.distributed as dist

    if not ranks.master_port:
        return dist.HashStore()
    hosts = ranks.leads and not ranks.agent_store
    try:
        return dist.TCPStore(ranks.master_addr, ranks.master_port, is_master=hosts, timeout=STORE_TIMEOUT, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if hosts and "in use" in str(error):
            raise Refusal(
                f"port {ranks.master_port} on {ranks.master_addr} is taken by another program; "
                f"type MASTER_PORT={ranks.master_port + 1} before the command, or launch.master_port={ranks.master_port + 1}"
            ) from None
        raise


@cache
def started(ranks):
    """When this run started, by the leader's clock: every rank, and every restart by torchrun, gets the same moment.

    Asked before Hydra composes, so that all ranks compose the same run folder however far apart they start.
    """
    if not ranks.master_port:
        return datetime.now()
    shared = store(ranks)
    if ranks.leads:
        shared.compare_set("lockstep/started", "", _begun(os.environ).isoformat())
    return datetime.fromisoformat(shared.get("lockstep/started").decode())


def _begun(env):
    """Now; but in a later life of a job the moment its first began, which a file remembers."""
    (note, later), now = _note(env), datetime.now()
    if later and note.exists():
        return datetime.fromisoformat(note.read_text())
    if note is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(now.isoformat())
    return now


def _note(env):
    """(file, whether this life may be a later one), for a job whose restarts keep its name and nothing else.

    Such are an elastic world without the agent's store, which then makes a new one each time, and a job that Slurm
    requeues. (None, False) for all others.
    """
    run_id, memory = env.get("TORCHELASTIC_RUN_ID", "none"), Path("outputs", ".started")
    if run_id != "none" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # "none": torchrun was given no --rdzv-id
        return memory / f"torchrun-{quote(run_id, safe='')}", True
    if "SLURM_STEP_ID" in env:
        return memory / f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}", int(env.get("SLURM_RESTART_COUNT", 0)) > 0
    return None, False


def forget(ranks):
    """A finished job's name may be given to another."""
    note, _ = _note(os.environ)
    if ranks.leads and note is not None:
        note.unlink(missing_ok=True)


def meet(ranks, timeout):
    """A store that no earlier meeting of these processes has written to, agreed on by every rank of this world.

    torchrun keeps one store over all restarts, and a sweep keeps one over all its jobs, so a plain
    init_process_group reads the addresses of ranks that are gone. Here rank 0 draws a nonce, every rank
    acknowledges it with a name of its own, and rank 0's "go" lists those names: whoever is not on the list
    belongs to another attempt and waits for the next nonce. A restart count would not do: with two agents it
    differs between them.
    """
    import torch.distributed as dist

    shared, me = store(ranks), uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    if ranks.leads:
        nonce = uuid.uuid4().hex
        shared.set("meet/nonce", nonce)
        names = [me]
        for rank in range(1, ranks.size):
            names.append(_wait(shared, f"meet/{nonce}/ack/{rank}", deadline, f"rank {rank} did not come to the meeting"))
        shared.set(f"meet/{nonce}/go", json.dumps(names))
    else:
        acknowledged = None
        while True:
            nonce = _wait(shared, "meet/nonce", deadline, "rank 0 did not open a meeting")
            if nonce != acknowledged:
                acknowledged = nonce
                shared.set(f"meet/{nonce}/ack/{ranks.rank}", me)
            if shared.check([f"meet/{nonce}/go"]) and me in json.loads(shared.get(f"meet/{nonce}/go")):
                break
            _give_up_after(deadline, f"rank {ranks.rank} found no meeting to join")
            time.sleep(0.01)
    return dist.PrefixStore(f"meeting/{nonce}", shared)


def _wait(shared, key, deadline, complaint):
    while not shared.check([key]):
        _give_up_after(deadline, complaint)
        time.sleep(0.01)
    return shared.get(key).decode()


def _give_up_after(deadline, complaint):
    if time.monotonic() > deadline:
        raise TimeoutError(f"{complaint} within backend.timeout; did every node start with the same command and world size?")
