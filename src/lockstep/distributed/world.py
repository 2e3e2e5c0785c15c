"""The world of ranks: join it, communicate in it, leave it. A world of one is a world, too."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.distributed import object_collectives, regroup
from lockstep.distributed.environment import RankInfo, export_rank_info, read_rank_info
from lockstep.distributed.host import cpu_count, keep_freed_memory
from lockstep.distributed.listening import loopback_interface, on_one_machine
from lockstep.distributed.rendezvous import form_group
from lockstep.distributed.time_waited import all_reduce_sum
from lockstep.errors import ConfigError
from lockstep.monitor import rank as monitor

log = logging.getLogger(__name__)

PREPARE_TIMEOUT = timedelta(days=2)  # for a download or a conversion of data, which may take longer than any collective


@dataclass(frozen=True)
class World:
    """This rank's place among the ranks that train together, and the collectives they use.

    local_rank, local_size: among the ranks of this machine. timeout: seconds that a collective waits for a rank.
    control: a gloo group beside the backend's own, for votes and JSON values, which never makes a GPU wait.
    resources: what is closed when this rank leaves the world, such as pipes to other ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup
    timeout: float
    resources: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place. Returns it."""
        return all_reduce_sum(tensor)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, which JSON can store, in the order of ranks, on every rank. Tuples become lists."""
        return object_collectives.all_gather_json(value, self.control)

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's `value`, which JSON can store, on every rank. Tuples become lists."""
        return object_collectives.broadcast_json(value, self.control)

    def gather_state(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `state` of CPU tensors and plain values, on rank 0. Empty on the other ranks."""
        return object_collectives.gather_state(state, self.control)

    def broadcast_state(self, state: dict[str, Any], source: int) -> dict[str, Any]:
        """The `state` of CPU tensors and plain values that rank `source` has, on every rank."""
        return object_collectives.broadcast_state(state, source, self.control)

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has called this. A rank that ends is noticed at once, whatever the timeout."""
        options = dist.BarrierOptions()
        options.timeout = timeout or timedelta(seconds=self.timeout)
        self.control.barrier(options).wait()

    def once_per_machine(self, work: Callable[[], object]) -> None:
        """Run `work` in the first rank of each machine, such as a download. The others wait as long as it takes.

        Raises a ConfigError of `work` on all ranks. After another error all ranks fail at once.
        """
        problem = None
        if self.local_rank == 0:
            try:
                work()
            except ConfigError as error:
                problem = str(error)
        self.barrier(PREPARE_TIMEOUT)
        problems = [text for text in self.all_gather_json(problem) if text is not None]
        if problems:
            raise ConfigError(problems[0])


def choose_backend(name: str, local_size: int = 1) -> str:
    """Replace `auto` by nccl if there is a GPU for each of the `local_size` ranks of this machine, else by gloo.

    Raises ConfigError for nccl without a GPU, for more ranks than GPUs, and for mpi if this torch lacks it.
    """
    gpus = torch.cuda.device_count()  # asks NVML; is_available() would start CUDA, and a process with CUDA cannot fork
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


@contextmanager
def init_distributed(
    name: str = "auto",
    timeout: float = 300,
    socket_ifname: str | None = None,
    debug: str | None = None,
    p2p_disable: bool | int | None = None,
    ib_disable: bool | int | None = None,
    bind_device: bool = True,
) -> Iterator[World]:
    """Form a process group with the other ranks, and destroy it however the block ends.

    name: auto, gloo, nccl or mpi. timeout: seconds that a collective waits for a rank. The next four become gloo's and
    NCCL's environment variables where they are set. bind_device: False if this rank computes on several GPUs, so that
    NCCL is not bound to one. Raises ConfigError as `choose_backend` does.
    """
    monitor.enter("meeting")
    info = read_rank_info()
    backend = choose_backend(name, info.local_world_size)
    _warn_of_unused_gpus(name, backend, info.local_world_size)
    if info.world_size > 1:
        export_rank_info(info)
    device = _set_up_device(backend, info)
    wait = timedelta(seconds=timeout)
    interface = socket_ifname or usual_interface(on_one_machine(info))
    with backend_environment(interface, debug, p2p_disable, ib_disable), ExitStack() as resources:
        _init_process_group(backend, info, wait, device if backend == "nccl" and bind_device else None, resources)
        control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=wait)
        assert isinstance(control, dist.ProcessGroup)
        log.info("rank %d of %d: %s on %s, started by %s", info.rank, info.world_size, backend, device, info.started_by)
        ranks = (info.rank, info.world_size, info.local_rank, info.local_world_size)
        yield World(*ranks, device, control, timeout, resources)


def _init_process_group(
    backend: str, info: RankInfo, wait: timedelta, device: torch.device | None, resources: ExitStack
) -> None:
    """device: what NCCL is bound to, if anything. resources: takes what is done when the rank leaves its world."""
    member = regroup.member()
    if member is not None:
        resources.callback(member.leave)
        member.join(wait)
        return
    resources.callback(_destroy_process_group)
    store = form_group(info, wait)
    dist.init_process_group(
        backend, store=store, rank=info.rank, world_size=info.world_size, timeout=wait, device_id=device
    )


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()  # a rank that still waits for this one gets an error at once


def _warn_of_unused_gpus(name: str, backend: str, local_size: int) -> None:
    gpus = torch.cuda.device_count()
    if name == "auto" and backend == "gloo" and 0 < gpus < local_size:
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


def _set_up_device(backend: str, info: RankInfo) -> torch.device:
    """This rank's device. Also sets the number of threads: one per core of this rank's share of the machine."""
    # Twice as many threads as cores halve the speed, and no launcher sets the right number for every number of ranks.
    torch.set_num_threads(max(1, cpu_count() // info.local_world_size))
    keep_freed_memory()
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(device)
    return device
