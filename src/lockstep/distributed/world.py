"""The world of ranks: join it, communicate in it, compare what ranks must have alike, leave it.

A world of one is a world, too. Values go between ranks as JSON and tensors: nothing that a rank receives can run code.
"""

import hashlib
import io
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.compat import hidden_from_profiler
from lockstep.distributed import backend as backends
from lockstep.distributed.environment import export_rank_info, read_rank_info
from lockstep.distributed.host import keep_freed_memory, name_of_machine, usable_cores
from lockstep.distributed.rendezvous import form_group
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat

PREPARE_TIMEOUT = timedelta(days=2)  # for a download or a conversion of data, which may take longer than any collective


@dataclass(frozen=True)
class World:
    """This rank's place among the ranks that train together, and the collectives they use.

    device: of its tensors. store: keys and values that all ranks share. timeout: seconds that a collective waits for a
    rank. control: gloo's group of tensors of the CPU, which never makes a GPU wait. here: {rank: its process} of this
    machine. machines: the lowest rank of each machine.
    """

    rank: int
    size: int
    device: torch.device
    store: dist.Store
    timeout: float
    control: dist.ProcessGroup
    here: dict[int, int] = field(default_factory=dict)
    machines: Sequence[int] = ()

    @property
    def local_rank(self) -> int:
        """Among the ranks of this machine, whatever the starter says."""
        return list(self.here).index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.here)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place. Returns it. On a GPU the host does not wait."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], object]:
        """Begin to sum `tensor` over all ranks, in place. Returns what waits for the sum: on a GPU its stream does, and
        the host does not."""
        if self.size == 1:
            return lambda: None
        with hidden_from_profiler():
            work: Any = dist.all_reduce(tensor, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some rank."""
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return found.bool().tolist()

    def all_gather_samples(self, tensor: Tensor) -> tuple[Tensor, int]:
        """(the rows of every rank's `tensor` of numbers (n, ...), as (N, ...) in the order of ranks, and where among
        them this rank's begin). n may differ, and be 0. It is for a loss that compares samples of a batch.

        A row's gradient is the sum of its gradients on all ranks. So a rank's loss must be its share of the whole one:
        the losses of its own n samples alone. Raises ValueError, on all ranks, for rows of several shapes or types.
        """
        mine = [len(tensor), f"{tuple(tensor.shape[1:])} of {tensor.dtype}"]
        counts, kinds = zip(*self.all_gather_json(mine), strict=True)
        if len(set(kinds)) > 1:
            raise ValueError(f"the ranks gather rows of several shapes or types: {', '.join(kinds)}")
        begin = sum(counts[: self.rank])
        rows = tensor.new_zeros(sum(counts), *tensor.shape[1:])
        rows[begin : begin + len(tensor)] = tensor
        gathered: Tensor = _Sum.apply(rows, self)  # gloo gathers no shares of several lengths
        return gathered, begin

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, which JSON can store, in the order of ranks, on every rank. Tuples become lists."""
        text = json.dumps(value).encode()
        longest = torch.tensor([len(text)])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        padded = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # JSON may end in spaces
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.control)
        return [json.loads(each.numpy().tobytes()) for each in texts]

    def gather_tensors(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Every rank's `tensors` of the CPU on rank 0, in the order of ranks. Empty elsewhere."""
        file = io.BytesIO()
        torch.save(tensors, file)
        lengths, received = self.all_gather_json(len(file.getbuffer())), [tensors]
        if not self.is_rank_zero:
            dist.send(torch.frombuffer(file.getbuffer(), dtype=torch.uint8), dst=0, group=self.control)
            return []
        for rank, length in list(enumerate(lengths))[1:]:
            content = torch.empty(length, dtype=torch.uint8)
            dist.recv(content, src=rank, group=self.control)
            received.append(torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True))  # it runs no code
        return received

    def broadcast_json(self, value: Any) -> Any:
        """The `value` of rank 0, which JSON can store, on every rank. Tuples become lists."""
        text = json.dumps(value).encode() if self.is_rank_zero else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, src=0, group=self.control)
        shared = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
        dist.broadcast(shared, src=0, group=self.control)
        return json.loads(shared.numpy().tobytes())

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has called this. A rank that ends is noticed at once, whatever the timeout."""
        options = dist.BarrierOptions()
        options.timeout = timeout or timedelta(seconds=self.timeout)
        self.control.barrier(options).wait()

    def once_per_machine(self, work: Callable[[], object]) -> None:
        """Run `work` in the first rank of each machine, such as a download. The others wait as long as it takes. A
        ConfigError of `work` is raised on all ranks."""
        problem = None
        if self.local_rank == 0:
            try:
                work()
            except ConfigError as error:
                problem = str(error)
        self.barrier(PREPARE_TIMEOUT)
        for sentence in filter(None, self.all_gather_json(problem)):
            raise ConfigError(sentence)


class _Sum(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum of the ranks' gradients, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.all_reduce_sum(tensor.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return ctx.world.all_reduce_sum(grad.to(dtype, copy=True, memory_format=torch.contiguous_format)), None


@contextmanager
def join_world(
    name: str = "auto",
    timeout: float = 300,
    threads: int | None = None,
    socket_ifname: str | None = None,
    bind_device: bool = True,
    **nccl: Any,
) -> Iterator[World]:
    """Form a process group with the other ranks, and destroy it however the block ends.

    The keys are those of the config's `backend`, see `lockstep.distributed.backend`, which raises ConfigError.
    bind_device: False if this rank computes on several GPUs.
    """
    info, wait = read_rank_info(), timedelta(seconds=timeout)
    if heartbeat.folder is None:
        heartbeat.begin(info.rank, info.world_size)
    heartbeat.enter("meeting")
    backend = backends.choose_backend(name, info)
    if info.world_size > 1:
        export_rank_info(info)
    keep_freed_memory()
    backends.set_variables(info.on_one_machine, socket_ifname, **nccl)
    try:
        store = form_group(info, wait)
        device = backends.choose_device(backend, info, name)
        # NCCL that is bound to a device starts at once. A rank by itself may never call it.
        bound = device if backend == "nccl" and bind_device and info.world_size > 1 else None
        dist.init_process_group(
            backend, store=store, rank=info.rank, world_size=info.world_size, timeout=wait, device_id=bound
        )
        control: Any = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=wait)
        world, machine = World(info.rank, info.world_size, device, store, timeout, control), name_of_machine()
        everyone = world.all_gather_json([machine, usable_cores(), os.getpid()])
        firsts = {of: rank for rank, (of, *_) in reversed([*enumerate(everyone)])}
        here = {rank: pid for rank, (of, _, pid) in enumerate(everyone) if of == machine}
        sharing = [where for *where, _ in everyone].count([machine, usable_cores()])
        torch.set_num_threads(backends.number_of_threads(threads, sharing, info.started_by))
        yield replace(world, here=here, machines=sorted(firsts.values()))
    finally:
        if dist.is_initialized():  # a rank that still waits for this one gets an error at once
            dist.destroy_process_group()


def require_same_config(world: World, flat: dict[str, Any], shown: dict[str, Any], hint: str) -> None:
    """Raise ConfigError, on all ranks, if they hold different `flat` configs {key: plain value}. A collective.

    shown: `flat` as a message may show it, without values that are secret. hint: what to type instead.
    """
    salt = world.broadcast_json(secrets.token_hex())  # without it a short secret could be guessed from its digest
    digests = {key: hashlib.sha256(f"{salt} {json.dumps(value)}".encode()).hexdigest() for key, value in flat.items()}
    first, shown_first = world.broadcast_json([digests, shown])
    differing = [key for key in sorted({*first, *digests}) if first.get(key) != digests.get(key)]
    mine = [(key, shown_first.get(key, "missing"), shown.get(key, "missing")) for key in differing[:1]]
    for rank, found in enumerate(world.all_gather_json(mine)):
        for key, on_zero, here in found:
            raise ConfigError(f"{key} differs between ranks: {on_zero!r} on rank 0 and {here!r} on rank {rank}; {hint}")


def require_same_data(world: World, name: str, length: int, fingerprint: str) -> None:
    """Raise ConfigError, on all ranks, if a data set differs between ranks. A collective."""
    (count, first), *others = world.all_gather_json([length, fingerprint])
    for rank, (samples, other) in enumerate(others, start=1):
        what = f"the {name} has {samples} samples on rank {rank} and {count} on rank 0"
        if samples == count:
            what = f"the {name} of rank {rank} is not that of rank 0: as many samples, but other ones"
        if (samples, other) != (count, first):
            raise ConfigError(f"{what}; copy the same data to every machine and type the command again")
