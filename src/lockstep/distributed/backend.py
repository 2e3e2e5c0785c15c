"""The backend: which one, its environment variables, and the device of this rank."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lockstep.distributed.environment import RankInfo
from lockstep.distributed.host import cpu_count, keep_freed_memory
from lockstep.distributed.rendezvous import loopback_interface
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)


def float64_device(device: torch.device) -> torch.device:
    """Where a computation in float64 is that belongs to one on `device`: Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device


def choose_backend(name: str, local_size: int = 1) -> str:
    """Replace `auto` by nccl if there is a GPU for each of the `local_size` ranks of this machine, else by gloo.

    Raises ConfigError for nccl without a GPU, for more ranks than GPUs, and for mpi if this torch lacks it.
    """
    gpus = torch.cuda.device_count()  # asks NVML; is_available() would start CUDA, and a process with CUDA cannot fork
    if has_gpus_of_its_own(local_size):
        gpus = local_size
    if name == "auto":
        return "nccl" if gpus >= local_size and dist.is_nccl_available() else "gloo"
    if name == "mpi" and not dist.is_mpi_available():
        raise ConfigError(
            "backend=mpi needs a torch built with MPI and this one is not; mpirun can start gloo ranks, too: "
            "type backend=gloo"
        )
    if name == "nccl" and not gpus:
        raise ConfigError("backend=nccl needs a GPU and this machine shows none; type backend=gloo")
    if name == "nccl" and local_size > gpus:
        raise ConfigError(
            f"backend=nccl needs one GPU per rank: {local_size} ranks on this machine but {gpus} GPUs; "
            f"type --nproc_per_node={gpus}, launch.nproc_per_node={gpus} or srun --gpus-per-node={local_size}, "
            f"or backend=gloo"
        )
    return name


def has_gpus_of_its_own(local_size: int) -> bool:
    """Whether Slurm shows this rank its own GPUs and no others, as `srun --gpus-per-task=1` does."""
    return "SLURM_GPUS_PER_TASK" in os.environ and 0 < torch.cuda.device_count() < local_size


def agreed_backend(backend: str, store: dist.Store, world_size: int) -> str:
    """What `auto` stands for on all ranks: nccl if each of them has found a GPU. A collective.

    backend: what this rank has found. Ranks of other backends would wait for each other.
    """
    if backend == "gloo":
        store.set("backend/machine", socket.gethostname())
    store.add("backend/without", int(backend == "gloo"))
    if store.add("backend/known", 1) == world_size:  # the last one knows what all have found
        store.set("backend/all_without", str(store.add("backend/without", 0)))
    without_gpu = int(store.get("backend/all_without"))
    if without_gpu and backend != "gloo":
        log.warning(
            "backend=auto trains on the CPU: %d of %d ranks have no GPU of their own, on %s among others; to hide this "
            "warning type backend=gloo",
            *(without_gpu, world_size, store.get("backend/machine").decode()),
        )
    return "gloo" if without_gpu else backend


def validate_backend(name: str, local_size: int, socket_ifname: str | None) -> str:
    """Check the options of `backend` before anything starts. Returns the backend that `auto` stands for.

    socket_ifname: one network interface, or several with commas between them. Raises ConfigError for an interface that
    this machine does not have, and as `choose_backend` does.
    """
    chosen = choose_backend(name, local_size)
    if socket_ifname is not None:
        present = [interface for _, interface in socket.if_nameindex()]
        missing = [asked for asked in str(socket_ifname).split(",") if asked not in present]
        if missing:
            raise ConfigError(
                f"backend.socket_ifname={socket_ifname} is no network interface of this machine, which has "
                f"{', '.join(present)}; type backend.socket_ifname={present[-1]}"
            )
    return chosen


def warn_of_unused_gpus(name: str, backend: str, local_size: int) -> None:
    gpus = torch.cuda.device_count()
    if name == "auto" and backend == "gloo" and 0 < gpus < local_size and not has_gpus_of_its_own(local_size):
        log.warning(
            "backend=auto trains on the CPU: %d ranks on this machine but %d GPUs; to train on GPUs type "
            "--nproc_per_node=%d or launch.nproc_per_node=%d, to hide this warning type backend=gloo",
            *(local_size, gpus, gpus, gpus),
        )


def usual_interface(is_one_machine: bool) -> str | None:
    """The loopback interface if all ranks are on this machine. Without it gloo takes the address of the host's name."""
    chosen_already = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(os.environ)
    return loopback_interface() if is_one_machine and not chosen_already else None


@contextmanager
def backend_environment(
    socket_ifname: str | None,
    debug: str | None = None,
    p2p_disable: bool | int | None = None,
    ib_disable: bool | int | None = None,
) -> Iterator[None]:
    """Inside the block gloo and NCCL find these options in the environment. The next job of a sweep does not."""
    options: dict[str, str | int | None] = {
        "GLOO_SOCKET_IFNAME": socket_ifname,
        "NCCL_SOCKET_IFNAME": socket_ifname,
        "NCCL_DEBUG": debug,
        "NCCL_P2P_DISABLE": None if p2p_disable is None else int(p2p_disable),
        "NCCL_IB_DISABLE": None if ib_disable is None else int(ib_disable),
    }
    # A rank of gloo asks the store for all addresses at once. By itself it asks twice for each other rank, which for
    # 1000 ranks are two million requests.
    options["GLOO_ENABLE_STORE_V2_API"] = os.environ.get("GLOO_ENABLE_STORE_V2_API", "1")
    options["TORCH_FR_BUFFER_SIZE"] = os.environ.get("TORCH_FR_BUFFER_SIZE", "256")  # of collectives; 2000 take 30 ms
    variables = {key: str(value) for key, value in options.items() if value is not None}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def uses_mps(name: str, world_size: int) -> bool:
    """Whether one process of backend=auto computes on Apple's GPU, which gloo ranks cannot share."""
    return name == "auto" and world_size == 1 and torch.backends.mps.is_available()


def set_up_device(backend: str, info: RankInfo, name: str = "gloo") -> torch.device:
    """This rank's device. Also sets the number of threads: one per core of this rank's share of the machine.

    name: what was typed, such as auto.
    """
    # Twice as many threads as cores halve the speed, and no launcher sets the right number for every number of ranks.
    torch.set_num_threads(max(1, cpu_count() // info.local_world_size))
    keep_freed_memory()
    if uses_mps(name, info.world_size):
        return torch.device("mps", 0)  # as its tensors call it
    if backend != "nccl":
        if uses_mps(name, 1) and info.rank == 0:
            log.info("backend=auto trains on the CPU: Apple's GPU is for one process; to train on it type launch=env")
        return torch.device("cpu")
    device = torch.device("cuda", 0 if has_gpus_of_its_own(info.local_world_size) else info.local_rank)
    torch.cuda.set_device(device)
    return device
