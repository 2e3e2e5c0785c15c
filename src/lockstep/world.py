"""The world of ranks: join it, speak in it, leave it. A world of one is still a world."""

import ctypes
import logging
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep import rendezvous
from lockstep.refusal import Refusal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """This rank's place among the ranks that train together, and the few things ranks say to each other.

    `control` is a gloo group beside the backend's own: small words between CPUs (votes, comparisons), which never
    make an accelerator wait.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup
    timeout: float  # seconds to wait for a rank

    @property
    def leads(self):
        return self.rank == 0

    def total(self, tensor):
        """Sum `tensor` over all ranks, in place; returns it."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, value):
        """Every rank's `value` (picklable), by rank, on every rank."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_leader(self, value):
        """Rank 0's `value` (picklable) on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self):
        dist.barrier(group=self.control)

    @contextmanager
    def leader_first(self):
        """The first rank of each node goes through the block before the others of its node: one download a machine."""
        if self.local_rank != 0:
            self.barrier()
        try:
            yield
        finally:
            if self.local_rank == 0:
                self.barrier()

    def same_on_all(self, config, hint):
        """Refuse a run whose ranks hold different `config` (a flat dict), naming the first key that differs."""
        configs = self.gather(config)
        for rank, other in enumerate(configs):
            for key in sorted({*configs[0], *other}):
                ours, theirs = configs[0].get(key, "missing"), other.get(key, "missing")
                if ours != theirs:
                    raise Refusal(f"{key} differs between ranks: {ours!r} on rank 0 and {theirs!r} on rank {rank}; {hint}")


class Vote:
    """All ranks agree on a few flags a few times a second, one vote late, so that nobody waits for the answer.

    Every rank calls `cast` after every step. Between two votes lie as many steps as take `pause` seconds; how many, the
    ranks agree on by the same vote, so that all of them vote, and hear, at the same steps.
    """

    def __init__(self, world, flags, pause):
        self.group, self.pause, self.pending = world.control, pause, None
        self.wishes = [False] * flags
        self.stride = self.left = 1
        self.last = time.monotonic()

    def cast(self, *wishes):
        """Wish for flags; returns those that some rank had wished for at the last vote, if one is now counted."""
        self.wishes = [wish or old for wish, old in zip(wishes, self.wishes, strict=True)]
        self.left -= 1
        if self.left:
            return (False,) * len(wishes)
        outcome, now = self.close(), time.monotonic()
        fitting = int(self.pause * self.stride / max(now - self.last, 1e-9))
        votes = torch.tensor([-max(1, min(fitting, 2 * self.stride)), *self.wishes], dtype=torch.int32)
        with unrecorded():
            self.pending = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group, async_op=True), votes
        self.left, self.last = self.stride, now
        self.wishes = [False] * len(wishes)
        return outcome

    def close(self):
        """Count the votes still under way."""
        if self.pending is None:
            return (False,) * len(self.wishes)
        work, votes = self.pending
        work.wait()
        self.pending = None
        stride, *outcome = votes.tolist()
        self.stride = -stride
        return tuple(map(bool, outcome))


@contextmanager
def unrecorded():
    """Around the start of a collective that torch's profiler may not live to see the end of.

    A recorded collective notes its end in the profiler's own memory, from a thread of gloo's; where the profiler has been
    stopped by then, that memory is freed, and the note ends the process with a corrupted heap (torch 2.14).
    """
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


def choose_backend(name, local_size=1):
    """`auto` -> nccl where there are GPUs, else gloo; and refuse what this machine or this torch cannot do.

    Raises Refusal for nccl without a GPU, for more ranks on a node than GPUs, and for mpi where torch lacks it.
    """
    gpus = torch.cuda.device_count()  # asks NVML: is_available() would start CUDA, which no fork survives
    if name == "auto":  # more ranks than GPUs can still train together, on the CPU
        name = "nccl" if gpus >= local_size and dist.is_nccl_available() else "gloo"
    if name == "mpi" and not dist.is_mpi_available():
        raise Refusal("backend=mpi wants a torch built with MPI and this one is not; mpirun also starts gloo ranks: try backend=gloo")
    if name == "nccl" and not gpus:
        raise Refusal("backend=nccl wants a GPU and this machine shows none; try backend=gloo")
    if name == "nccl" and local_size > gpus:
        raise Refusal(
            f"backend=nccl wants one GPU a rank: {local_size} ranks on this machine but {gpus} GPUs; "
            f"try {gpus} ranks (--nproc_per_node={gpus} or launch.nproc_per_node={gpus}), or backend=gloo"
        )
    return name


@contextmanager
def join(name, timeout, socket_ifname=None, debug=None, p2p_disable=None, ib_disable=None):
    """Meet the other ranks, and part from them however the block ends.

    name: auto, gloo, nccl or mpi; timeout: seconds a collective may wait for a rank; the rest becomes gloo's and
    NCCL's environment variables, only where set. Yields a World. Raises Refusal as `choose_backend` does.
    """
    ranks = rendezvous.read()
    name = choose_backend(name, ranks.local_size)
    knobs = {"GLOO_SOCKET_IFNAME": socket_ifname, "NCCL_SOCKET_IFNAME": socket_ifname, "NCCL_DEBUG": debug,
             "NCCL_P2P_DISABLE": p2p_disable, "NCCL_IB_DISABLE": ib_disable}  # fmt: skip
    os.environ.update({key: str(int(value) if isinstance(value, bool) else value) for key, value in knobs.items() if value is not None})
    if ranks.size > 1:
        rendezvous.export(ranks)

    device = torch.device("cpu")
    if name == "nccl":
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    # Twice as many threads as cores halve the speed, and no launcher counts them right for every number of ranks.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_size))
    keep_freed_memory()

    wait = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            name, store=rendezvous.meet(ranks, wait), rank=ranks.rank, world_size=ranks.size, timeout=wait,
            device_id=device if name == "nccl" else None,
        )  # fmt: skip
        control = dist.new_group(backend="gloo", timeout=wait) if name != "gloo" else dist.group.WORLD
        log.info("rank %d of %d: %s on %s, started by %s", ranks.rank, ranks.size, name, device, ranks.starter)
        yield World(ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, device, control, timeout)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # a peer still waiting for this rank learns of its end at once


def keep_freed_memory():
    """Have glibc keep what a step frees for the next step, from the first one on.

    Left alone it hands memory back, 3000 page faults a step until it learns better; and blocks beyond 32 MB always, so that
    a sample of the convolution net cost 1.8 times as much in a batch of 1024 as in one of 512.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
