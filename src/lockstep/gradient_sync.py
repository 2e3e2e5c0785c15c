"""How gradients are averaged while the backward pass runs: each option is (module, world) -> module.

An option gives a DistributedDataParallel module a communication hook and leaves any other module as it is. The hook
is handed one bucket of gradients after the other, the same on every rank, and promises the ranks' mean of it (Li et al.
2020, section 4). The ring and the parameter server are the two textbook topologies, written to be read and measured.
"""

import torch
from torch import nn
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.refusal import Refusal
from lockstep.shared_memory import SharedSum
from lockstep.strategy import average_drift, bare, divisor, part


def auto(module, world):
    """`shared_memory` between CPUs of one machine, else `all_reduce`."""
    try:
        return shared_memory(module, world)
    except Refusal:  # said to all ranks alike
        return all_reduce(module, world)


def all_reduce(module, world):
    """DDP's own: one all-reduce a bucket, by whatever algorithm the backend prefers."""
    return module


def ring(module, world):
    """Every rank speaks to its two neighbours only, see `ring_sum`."""
    return _hooked(module, world, _mean_by(ring_sum))


def parameter_server(module, world):
    """Rank 0 adds up what all the others send it, and sends them the sum, see `server_sum`."""
    return _hooked(module, world, _mean_by(server_sum))


def shared_memory(module, world):
    """The ranks of one machine add up in memory that all of them see, see `SharedSum`: the fastest way between CPUs."""
    if isinstance(module, DistributedDataParallel):
        parameters = list(module.parameters())
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise Refusal("gradient_sync=shared_memory is for weights of one type; type gradient_sync=all_reduce")
        _hooked(module, world, _mean_by(SharedSum(world, sum(parameter.numel() for parameter in parameters), parameters[0].dtype)))
    return module


def fp16(module, world):
    """All-reduce of float16: half the bytes, 11 bits of precision; gradients beyond 65504 overflow."""
    return _hooked(module, None, default_hooks.fp16_compress_hook)


def bf16(module, world):
    """All-reduce of bfloat16: half the bytes, 8 bits of precision, float32's range."""
    # By its own name torch takes the hook with NCCL alone, and gloo adds bfloat16 just as well.
    return _hooked(module, None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))


def powersgd(module, world, rank, after, min_compression, epsilon):
    """Low-rank gradients with error feedback (Vogels, Karimireddy and Jaggi 2019), by torch.

    rank: of the approximation; after: steps of plain all-reduce first, at least 2; min_compression: matrices that
    would shrink less than so many times are sent whole; epsilon: keeps a column of zeros from dividing by zero.
    """
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=after, min_compression_rate=min_compression, orthogonalization_epsilon=epsilon
    )
    return _hooked(module, state, _one_at_a_time(powerSGD_hook))


def local_sgd(module, world, every):
    """Each rank steps on its own gradient, and every `every` steps the ranks average their weights (Stich 2019)."""
    return LocalSGD(module, world, every) if isinstance(module, DistributedDataParallel) else module


class LocalSGD(nn.Module):
    """Counts the steps that ranks have taken apart, and brings the ranks together."""

    def __init__(self, module, world, every):
        super().__init__()
        self.module, self.world, self.every, self.steps = module, world, every, 0
        _hooked(module, None, self._after_backward)

    def _after_backward(self, _, bucket):
        """The communication hook: there is none."""
        self.steps += bucket.is_last()
        return _promise(bucket.buffer())

    def forward(self, inputs):
        if self.steps == self.every:
            self.average(self.module.parameters())
        return self.module(inputs)

    @torch.no_grad()
    def average(self, tensors):
        """The ranks' mean of each of `tensors`, in place, unless all ranks hold the same since the last time."""
        if self.steps:
            tensors = list(tensors)
            vector = self.world.total(torch.cat([tensor.reshape(-1) for tensor in tensors])).div_(self.world.size)
            for tensor, mean in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(mean.view(tensor.shape))
            self.steps = 0


@bare.register
def _(module: LocalSGD):
    return bare(module.module)


@part.register
def _(module: LocalSGD, last):
    return part(module.module, last)


@divisor.register
def _(module: LocalSGD, world):
    return divisor(module.module, world)


@average_drift.register
def _(module: LocalSGD, tensors):
    module.average(tensors)


def ring_sum(vector, rank, size):
    """Sum `vector` (n,) over `size` ranks in place, by ring all-reduce (Patarasuk and Yuan 2009; Gibiansky 2017, Baidu).

    The vector is cut into as many parts as there are ranks, some empty where it is shorter. In the reduce-scatter every
    part travels once round the ring and grows by each rank's values; it ends as the whole sum on the rank before the
    one it set out from. In the all-gather the finished parts travel round again. A rank sends 2 (size - 1) parts, so
    2 (size - 1) / size vectors, however many ranks there are: no algorithm sends less.
    """
    parts = vector.tensor_split(size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        mine, next_part = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        arrived = torch.empty_like(next_part)
        _exchange(P2POp(irecv, arrived, left), P2POp(isend, mine, right))
        next_part.add_(arrived)
    for step in range(size - 1):
        finished, next_part = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        _exchange(P2POp(irecv, next_part, left), P2POp(isend, finished, right))


def server_sum(vector, rank, size):
    """Sum `vector` (n,) over `size` ranks in place, by a synchronous parameter server (Li et al. 2014) on rank 0.

    A worker sends one vector and receives one; the server sends and receives size - 1 of them, and all wait for its wire.
    """
    if rank == 0:
        arrived = vector.new_empty(size - 1, len(vector))
        _exchange(*(P2POp(irecv, gradient, worker) for worker, gradient in enumerate(arrived, start=1)))
        vector.add_(arrived.sum(0))
        _exchange(*(P2POp(isend, vector, worker) for worker in range(1, size)))
    else:
        _exchange(P2POp(isend, vector, 0))
        _exchange(P2POp(irecv, vector, 0))


def _exchange(*receives_and_sends):
    """All of them at once, or two ranks that send to each other would both wait to be received.

    Receives first: gloo tells a peer on the same wire that it may send, and would tell it only after what this rank sends.
    """
    for work in batch_isend_irecv(list(receives_and_sends)):
        work.wait()


def _hooked(module, state, hook):
    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(state, hook)
    return module


def _mean_by(add_up):
    """The communication hook that averages by `add_up`, a sum in place over the ranks."""

    def hook(world, bucket):
        vector = bucket.buffer().div_(world.size)  # before the sum, as DDP does: halves cannot overflow
        add_up(vector, world.rank, world.size)
        return _promise(vector)

    return hook


def _promise(vector):
    """A future that already holds `vector`: what DDP expects of a hook."""
    future = torch.futures.Future(devices=[vector.device] if vector.is_cuda else [])
    future.set_result(vector)
    return future


def _one_at_a_time(hook):
    """`hook` without overlap. PowerSGD waits, on gloo's threads, for all-reduces which only gloo's threads can
    make; with a bucket on each of them that would be for ever."""

    def waiting(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return waiting
