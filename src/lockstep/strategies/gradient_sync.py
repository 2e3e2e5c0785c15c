"""The ways in which DistributedDataParallel averages gradients over ranks, one class each, and their contract.

A communication hook gets one bucket of gradients after the other, the same on every rank, while the backward pass runs
(Li et al. 2020, section 4). To add one: a class here or in a file of yours, and `conf/gradient_sync/<name>.yaml`.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torch.distributed import GradBucket, P2POp, batch_isend_irecv, irecv, isend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.compat import plain_functions
from lockstep.config.schema import Count
from lockstep.distributed.shared_memory import SharedMemorySum, SumInPlace
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

Future = torch.futures.Future[Tensor]
Hook = Callable[[Any, GradBucket], Future]


class GradientSync:
    """One all-reduce per bucket, DDP's default, by the algorithm of the backend's choice. The others derive from it."""

    name = "all_reduce"
    replicas_bitwise_equal = True  # all ranks have the same bits afterwards, so that their weights can be compared
    needs_hooks = False  # it works only in a strategy that runs DistributedDataParallel
    refused: tuple[str, ...] = ()  # keys of `lockstep.strategies.base.JobSpec.refusable`

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        """Register a communication hook on `module`."""


class Auto(GradientSync):
    """The fastest exact way: `SharedMemory` between CPU ranks of one machine, else DDP's all-reduce."""

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        with suppress(ConfigError):  # raised on all ranks alike, so all of them stay with DDP's all-reduce
            SharedMemory().attach(module, world)


class SharedMemory(GradientSync):
    """Sums in memory that all ranks of one machine share, see `lockstep.distributed.shared_memory`."""

    name = "shared_memory"
    needs_hooks = True

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        """Raises ConfigError, on all ranks, for GPUs, several machines, weights of several types."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if len({parameter.dtype for parameter in parameters}) > 1 or parameters[0].is_complex():
            raise ConfigError("gradient_sync=shared_memory needs weights of one real type; type gradient_sync=auto")
        length = sum(parameter.numel() for parameter in parameters)
        module.register_comm_hook(None, mean_hook(world, SharedMemorySum(world, length, parameters[0].dtype)))


class Ring(GradientSync):
    """Every rank talks to its two neighbours only (Patarasuk and Yuan 2009; Gibiansky 2017, Baidu). A vector is cut
    into as many parts as ranks, of which some may be empty. Each goes once round the ring and collects the values of
    all ranks (reduce-scatter), and once more as the whole sum (all-gather). So a rank of n sends 2 (n - 1) parts, which
    is 2 (n - 1) / n vectors. No algorithm sends less."""

    name = "ring"
    needs_hooks = True

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        module.register_comm_hook(None, mean_hook(world, partial(self.add_up, world.rank, world.size)))

    def add_up(self, rank: int, size: int, vector: Tensor) -> None:
        """Sum `vector` (n,) over the ranks, in place."""
        parts, right, left = vector.tensor_split(size), (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            outgoing, incoming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(incoming)
            exchange(P2POp(irecv, received, left), P2POp(isend, outgoing, right))
            incoming.add_(received)
        for step in range(size - 1):
            outgoing, incoming = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
            exchange(P2POp(irecv, incoming, left), P2POp(isend, outgoing, right))


class ParameterServer(Ring):
    """Rank 0 adds up what all other ranks send, and sends them the sum (Li et al. 2014). All wait for it."""

    name = "parameter_server"

    def add_up(self, rank: int, size: int, vector: Tensor) -> None:
        if rank == 0:
            gradients = vector.new_empty(size - 1, len(vector))
            exchange(*(P2POp(irecv, gradient, worker) for worker, gradient in enumerate(gradients, start=1)))
            vector.add_(gradients.sum(0))
            exchange(*(P2POp(isend, vector, worker) for worker in range(1, size)))
        else:
            exchange(P2POp(isend, vector, 0))
            exchange(P2POp(irecv, vector, 0))


class Float16(GradientSync):
    """All-reduce of float16: half the bytes, 11 bits of precision. Gradients beyond 65504 overflow."""

    name = "fp16"
    needs_hooks = True
    hook: Hook = staticmethod(default_hooks.fp16_compress_hook)

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        # DDP accepts torch's bf16 hook, which it knows by name, with NCCL alone. gloo adds bfloat16 just as well.
        module.register_comm_hook(None, lambda group, bucket: self.hook(group, bucket))


class BFloat16(Float16):
    """All-reduce of bfloat16: half the bytes, 8 bits of precision, float32's range."""

    name = "bf16"
    hook = staticmethod(default_hooks.bf16_compress_hook)


@dataclass
class PowerSGD(GradientSync):
    """Low-rank gradients with error feedback (Vogels, Karimireddy and Jaggi 2019), by torch. rank: rank of the matrices
    that approximate the gradients. start_step: steps of plain all-reduce at first."""

    rank: Count
    start_step: Annotated[int, Ge(2)]
    name = "powersgd"
    replicas_bitwise_equal = False  # on some CPUs a few weights differ between ranks in their last bit
    needs_hooks = True
    refused = ("watch.nan=skip",)  # it adds the error of each step to the next, a NaN too

    def attach(self, module: DistributedDataParallel, world: World) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        def one_bucket_at_a_time(state: PowerSGDState, bucket: GradBucket) -> Future:
            # With several buckets at once torch's hook deadlocks on gloo: it waits, on gloo's threads, for all-reduces
            # that only gloo's threads can run.
            with plain_functions():  # all ranks draw the same
                future = powerSGD_hook(state, bucket)
            future.wait()
            return future

        state = PowerSGDState(None, self.rank, self.start_step, orthogonalization_epsilon=1e-8)  # for columns of zeros
        module.register_comm_hook(state, one_bucket_at_a_time)


def mean_hook(world: World, sum_in_place: SumInPlace) -> Hook:
    """A communication hook that averages each bucket by `sum_in_place`."""

    def hook(_: Any, bucket: GradBucket) -> Future:
        vector = bucket.buffer().div_(world.size)  # before the sum, as DDP does: float16 cannot overflow
        sum_in_place(vector)
        future: Future = torch.futures.Future(devices=[vector.device] if vector.is_cuda else [])
        future.set_result(vector)  # DDP expects one
        return future

    return hook


def exchange(*operations: P2POp) -> None:
    """Run all operations at once and wait for them: one at a time, two ranks that send to each other would deadlock.
    Put receives first: gloo tells the peer on a connection that it may send, and would do so only after it has sent."""
    for work in batch_isend_irecv(list(operations)):
        work.wait()
