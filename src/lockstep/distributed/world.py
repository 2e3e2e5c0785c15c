"""The world of ranks: join it, communicate in it, leave it. A world of one is a world, too."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.distributed import object_collectives
from lockstep.distributed.backend import (
    backend_environment,
    choose_backend,
    set_up_device,
    usual_interface,
    warn_of_unused_gpus,
)
from lockstep.distributed.environment import RankInfo, export_rank_info, read_rank_info
from lockstep.distributed.listening import on_one_machine
from lockstep.distributed.rendezvous import form_group
from lockstep.distributed.time_waited import all_reduce_sum
from lockstep.errors import ConfigError
from lockstep.failures import rank as monitor

log = logging.getLogger(__name__)

PREPARE_TIMEOUT = timedelta(days=2)  # for a download or a conversion of data, which may take longer than any collective
DISK_TIMEOUT = timedelta(hours=1)  # for a slow disk


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

    @contextmanager
    def disk_access(self) -> Iterator[None]:
        """Inside the block ranks read and write files. At its end they wait for each other, however slow a disk is.

        Every rank calls this. One that raises in the block does not come to its end, and the others notice its exit.
        They would not notice the loss of a machine, so with several machines they wait for `timeout` only.
        """
        with monitor.phase("disk"):
            yield
        # In another phase: the monitor is only patient with a rank that uses its disk.
        self.barrier(DISK_TIMEOUT if self.local_size >= self.size else None)

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
    warn_of_unused_gpus(name, backend, info.local_world_size)
    if info.world_size > 1:
        export_rank_info(info)
    device = set_up_device(backend, info)
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
    resources.callback(_destroy_process_group)
    store = form_group(info, wait)
    dist.init_process_group(
        backend, store=store, rank=info.rank, world_size=info.world_size, timeout=wait, device_id=device
    )


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()  # a rank that still waits for this one gets an error at once
