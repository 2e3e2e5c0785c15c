"""A world of any size in one process: one rank of it takes part, and counts what it would send and receive."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

from lockstep.distributed.world import World

BACKEND = "dry"
_Group: Any = dist.ProcessGroup  # the signatures of its methods differ between versions of torch


@dataclass
class Traffic:
    """What this rank has sent and received, in bytes; calls and payload: of each kind of collective.

    A collective counts as its ring does (Patarasuk and Yuan 2009), of n ranks and payload bytes: all_reduce
    2(n-1)/n payload each way, all_gather and reduce_scatter (n-1)/n of the whole tensor, broadcast the whole tensor.
    """

    sent: float = 0.0
    received: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    payload: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, tensors: Iterable[Tensor], sent: float, received: float) -> None:
        """sent, received: as shares of the bytes of `tensors`."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self.calls[kind] += 1
        self.payload[kind] += nbytes
        self.sent += sent * nbytes
        self.received += received * nbytes

    def clear(self) -> None:
        """Forget what was counted."""
        self.sent = self.received = 0.0
        self.calls.clear()
        self.payload.clear()


class DryGroup(_Group):  # type: ignore[misc]
    """Ends every collective at once. What other ranks would send is what this rank has; a message is zeros.

    torch's own `fake` backend gives futures without a value, which DistributedDataParallel cannot read.
    """

    def __init__(self, rank: int, size: int, traffic: Traffic) -> None:
        super().__init__(rank, size)
        self.traffic, self.others = traffic, (size - 1) / size

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        self.traffic.add("all_reduce", tensors, 2 * self.others, 2 * self.others)
        return _finished(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        self.traffic.add("broadcast", tensors, 1, 1)
        return _finished(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:
        self.traffic.add("all_gather", outputs[0], self.others, self.others)
        for output in outputs[0]:
            output.detach().copy_(inputs[0])
        return _finished(outputs)

    def all_gather_single(self, output: Tensor, mine: Tensor, options: Any = None) -> dist.Work:
        return self.allgather([list(output.detach().chunk(self.size()))], [mine])

    _allgather_base = all_gather_single  # its name before torch 2.14

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> dist.Work:
        self.traffic.add("reduce_scatter", [whole], self.others, self.others)
        output.detach().copy_(whole.chunk(self.size())[self.rank()])
        return _finished([output])

    _reduce_scatter_base = reduce_scatter_single

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        self.traffic.add("send", tensors, 1, 0)
        return _finished(tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        self.traffic.add("recv", tensors, 0, 1)
        for tensor in tensors:
            tensor.zero_()
        return _finished(tensors)

    def barrier(self, options: Any = None) -> dist.Work:
        return _finished([])


def _finished(tensors: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


@dataclass(frozen=True)
class DryWorld(World):
    """All other ranks have the values that this rank has."""

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        return value

    def gather_state(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        return [state] * self.size if self.is_rank_zero else []

    def broadcast_state(self, state: dict[str, Any], source: int) -> dict[str, Any]:
        return state


@contextmanager
def dry_world(rank: int, size: int, traffic: Traffic) -> Iterator[World]:
    """Inside the block this process is rank `rank` of `size`, each on a CPU of a machine of its own."""
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: DryGroup(rank, size, traffic), devices=["cpu"]
    )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        control: Any = dist.group.WORLD
        world = DryWorld(rank, size, 0, 1, torch.device("cpu"), control, timeout=1.0)
        with world.resources:
            yield world
    finally:
        dist.destroy_process_group()
