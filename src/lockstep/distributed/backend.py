"""The backend: which one, its environment variables, and the device and the threads of this rank."""

import logging
import os
import socket

import torch
import torch.distributed as dist

from lockstep.distributed.environment import RankInfo
from lockstep.distributed.host import cpu_count
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

SCHEDULERS = ("srun", "mpirun", "environment")  # they may show each rank GPUs of its own


def float64_device(device: torch.device) -> torch.device:
    """Where a computation in float64 is that belongs to one on `device`: Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device


def choose_backend(name: str, info: RankInfo) -> str:
    """Replace `auto` by nccl if each rank of this machine can have a GPU, else by gloo. Raises ConfigError."""
    gpus = torch.cuda.device_count()  # asks NVML; is_available() would start CUDA, and a process with CUDA cannot fork
    enough = gpus > 0 and (gpus >= info.local_world_size or may_have_own_gpu(info))
    if name == "auto":
        return "nccl" if enough and dist.is_nccl_available() else "gloo"
    if name == "nccl" and not enough:
        raise ConfigError(
            f"backend=nccl needs one GPU per rank: {info.local_world_size} ranks on this machine but {gpus} GPUs; "
            f"start as many ranks as GPUs, or type backend=gloo"
        )
    return name


def may_have_own_gpu(info: RankInfo) -> bool:
    """Whether this rank may see its own GPUs and no others, as with `srun --gpus-per-task=1`, a wrapper of mpirun's
    that sets CUDA_VISIBLE_DEVICES, or `torchrun --virtual-local-rank`."""
    is_hidden = info.started_by in SCHEDULERS or "TORCHELASTIC_VIRTUAL_LOCAL_RANK" in os.environ
    return is_hidden and 0 < torch.cuda.device_count() < info.local_world_size


def set_variables(
    is_one_machine: bool,
    socket_ifname: str | None,
    debug: str | None = None,
    p2p_disable: bool | int | None = None,
    ib_disable: bool | int | None = None,
) -> None:
    """Say these options of the backend where gloo and NCCL look: in the environment."""
    chosen = socket_ifname or os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if is_one_machine and not chosen:  # without the loopback interface gloo takes the address of the host's name
        socket_ifname = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    options: dict[str, str | int | None] = {
        "GLOO_SOCKET_IFNAME": socket_ifname,
        "NCCL_SOCKET_IFNAME": socket_ifname,
        "NCCL_DEBUG": debug,
        "NCCL_P2P_DISABLE": None if p2p_disable is None else int(p2p_disable),
        "NCCL_IB_DISABLE": None if ib_disable is None else int(ib_disable),
    }
    os.environ |= {key: str(value) for key, value in options.items() if value is not None}
    # A rank of gloo asks the store for all addresses at once. By itself it asks twice for each other rank, which for
    # 1000 ranks are two million requests.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # of collectives; 2000 take 30 ms


def uses_mps(name: str, world_size: int) -> bool:
    """Whether one process of backend=auto computes on Apple's GPU, which gloo ranks cannot share."""
    return name == "auto" and world_size == 1 and torch.backends.mps.is_available()


def choose_device(backend: str, info: RankInfo, name: str = "gloo") -> torch.device:
    """This rank's device. name: what was typed, such as auto."""
    if uses_mps(name, info.world_size):
        return torch.device("mps", 0)  # as its tensors call it
    if backend != "nccl":
        if name == "auto" and info.local_rank == 0 and (torch.cuda.device_count() or torch.backends.mps.is_available()):
            log.warning("backend=auto trains on the CPU, as not every rank has a GPU of its own: start fewer ranks")
        return torch.device("cpu")
    device = torch.device("cuda", 0 if may_have_own_gpu(info) else info.local_rank)
    torch.cuda.set_device(device)
    return device


def number_of_threads(typed: int | None, ranks_on_cores: int, started_by: str) -> int:
    """Threads of this rank: backend.threads; then OMP_NUM_THREADS, where a person has typed the one process (torchrun
    sets it to 1); then its share of the cores that `ranks_on_cores` ranks use. Twice as many halve the speed."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if typed is None and started_by == "python" and said.isdigit():
        typed = int(said)
    return typed or max(1, cpu_count() // ranks_on_cores)
