"""The world of ranks: its backend and devices, join it, communicate in it, compare what ranks must have alike.

A world of one is a world, too. Values go between ranks as JSON and tensors: nothing that a rank receives can run code.
"""

import hashlib
import io
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.compat import hidden_from_profiler
from lockstep.distributed import signals
from lockstep.distributed.environment import RankInfo, read_rank_info
from lockstep.distributed.host import keep_freed_memory, usable_cores
from lockstep.distributed.rendezvous import client_of_store, form_group
from lockstep.errors import ConfigError, differing, print_line
from lockstep.failures.record import Record, heartbeat
from lockstep.failures.report import FILE, identity, read_report, screen, tell
from lockstep.failures.watchdog import Watchdog

log = logging.getLogger(__name__)

SCHEDULERS = ("srun", "mpirun", "environment")  # they may show each rank GPUs of its own
PREPARE_TIMEOUT = timedelta(days=2)  # for a download or a conversion of data, which may take longer than any collective
CONNECT_TIME = timedelta(seconds=10)  # to a store, which may be in the process that hangs


@dataclass(frozen=True)
class World:
    """This rank's place among the ranks that train together, and the collectives they use. device: of its tensors.
    store: keys and values that all ranks share. timeout: seconds that a collective waits for a rank. control: gloo's
    group of tensors of the CPU, which never makes a GPU wait. here: {rank: its process} of this machine. machines: the
    lowest rank of each machine."""

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
        return work.wait  # type: ignore[no-any-return]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some rank."""
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return found.bool().tolist()

    def all_gather_samples(self, tensor: Tensor) -> tuple[Tensor, int]:
        """(the rows of every rank's `tensor` of numbers (n, ...), as (N, ...) in the order of ranks, and where among
        them this rank's begin). n may differ, and be 0. It is for a loss that compares samples of a batch. A row's
        gradient is the sum of its gradients on all ranks. So a rank's loss must be its share of the whole one: the
        losses of its own n samples alone. Raises ValueError, on all ranks, for rows of several shapes or types."""
        mine = [len(tensor), f"{tuple(tensor.shape[1:])} of {tensor.dtype}"]
        counts, kinds = zip(*self.all_gather_json(mine), strict=True)
        if len(set(kinds)) > 1:
            raise ValueError(f"the ranks gather rows of several shapes or types: {', '.join(kinds)}")
        begin = sum(counts[: self.rank])
        rows = tensor.new_zeros(sum(counts), *tensor.shape[1:])
        rows[begin : begin + len(tensor)] = tensor
        return _Sum.apply(rows, self), begin  # gloo gathers no shares of several lengths

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, which JSON can store, in the order of ranks, on every rank. Tuples become lists."""
        text = json.dumps(value).encode()
        longest = torch.tensor([len(text)])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        padded = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # JSON may end in spaces
        texts = padded.new_empty(self.size, len(padded))
        dist.all_gather(list(texts), padded, group=self.control)
        return [json.loads(text.numpy().tobytes()) for text in texts]

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

    @contextmanager
    def refusals_on_all(self, timeout: timedelta | None = None, cannot: str = "") -> Iterator[None]:
        """A ConfigError that one rank raises in the block is raised on all ranks at its end, where they wait for each
        other. cannot: what an OSError means there, with REASON for what the system says, if it is one."""
        problem = ""
        try:
            yield
        except (ConfigError, OSError) as error:
            problem = str(error) if isinstance(error, ConfigError) else cannot.replace("REASON", str(error.strerror))
            if not problem:
                raise
        self.barrier(timeout)
        for sentence in filter(None, self.all_gather_json(problem)):
            raise ConfigError(sentence)

    def once_per_machine(self, work: Callable[[], object]) -> None:
        """Run `work` in the first rank of each machine, such as a download. The others wait as long as it takes."""
        with self.refusals_on_all(PREPARE_TIMEOUT):
            if self.local_rank == 0:
                work()


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
        what = f"backend=nccl needs one GPU per rank: {info.local_world_size} ranks on this machine but {gpus} GPUs"
        raise ConfigError(f"{what}; start as many ranks as GPUs, or type backend=gloo")
    if name == "mpi" and not dist.is_mpi_available():
        raise ConfigError("backend=mpi needs a torch that was built with MPI; type backend=gloo, under mpirun, too")
    return name


def may_have_own_gpu(info: RankInfo) -> bool:
    """Whether this rank may see its own GPUs and no others, as with `srun --gpus-per-task=1`, a wrapper of mpirun's
    that sets CUDA_VISIBLE_DEVICES, or `torchrun --virtual-local-rank`."""
    is_hidden = info.started_by in SCHEDULERS or "TORCHELASTIC_VIRTUAL_LOCAL_RANK" in os.environ
    return is_hidden and 0 < torch.cuda.device_count() < info.local_world_size


def set_variables(is_one_machine: bool, socket_ifname: str | None, **nccl: str | bool | None) -> None:
    """Say these options of the backend where gloo and NCCL look: in the environment."""
    chosen = socket_ifname or os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if is_one_machine and not chosen:  # without the loopback interface gloo takes the address of the host's name
        socket_ifname = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    options = {f"NCCL_{name.upper()}": value for name, value in nccl.items()}
    options |= {"GLOO_SOCKET_IFNAME": socket_ifname, "NCCL_SOCKET_IFNAME": socket_ifname}
    for name, value in options.items():
        if value is not None:
            os.environ[name] = str(int(value) if isinstance(value, bool) else value)
    # A rank of gloo asks the store for all addresses at once. By itself it asks twice for each other rank, which for
    # 1000 ranks are two million requests.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # of collectives; 2000 take 30 ms


def choose_device(backend: str, info: RankInfo, name: str) -> torch.device:
    """This rank's device. name: what was typed, such as auto."""
    if name == "auto" and info.world_size == 1 and torch.backends.mps.is_available():
        return torch.device("mps", 0)  # as its tensors call it. Ranks of gloo cannot share it
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
    return typed or max(1, len(usable_cores()) // ranks_on_cores)


@contextmanager
def join_world(
    name: str = "auto",
    timeout: float = 300,
    threads: int | None = None,
    socket_ifname: str | None = None,
    bind_device: bool = True,
    **nccl: Any,
) -> Iterator[World]:
    """Form a process group with the other ranks, and destroy it however the block ends. The keys are those of the
    config's `backend`. Raises ConfigError. bind_device: False if this rank computes on several GPUs."""
    info, wait = read_rank_info(), timedelta(seconds=timeout)
    if heartbeat.folder is None:
        heartbeat.begin(info.rank, info.world_size, info.started_by)
    heartbeat.enter("meeting")
    backend = choose_backend(name, info)
    keep_freed_memory()
    set_variables(info.on_one_machine, socket_ifname, **nccl)
    try:
        store = form_group(info, wait)
        device = choose_device(backend, info, name)
        # NCCL that is bound to a device starts at once. A rank by itself may never call it.
        bound = device if backend == "nccl" and bind_device and info.world_size > 1 else None
        place: dict[str, Any] = {"rank": info.rank, "world_size": info.world_size, "store": store}
        dist.init_process_group(backend, timeout=wait, device_id=bound, **place)
        control: Any = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=wait)
        world = World(info.rank, info.world_size, device, store, timeout, control)
        # The same for processes that see each other's. Containers of one machine do not.
        spaces = [os.readlink(path) for path in ("/proc/self/ns/pid", "/proc/self/ns/net") if os.path.exists(path)]
        machine = " ".join([socket.gethostname(), *spaces])
        everyone = world.all_gather_json([machine, usable_cores(), os.getpid()])
        firsts = {of: rank for rank, (of, *_) in reversed([*enumerate(everyone)])}
        here = {rank: pid for rank, (of, _, pid) in enumerate(everyone) if of == machine}
        sharing = [where for *where, _ in everyone].count([machine, usable_cores()])
        torch.set_num_threads(number_of_threads(threads, sharing, info.started_by))
        yield replace(world, here=here, machines=sorted(firsts.values()))
    finally:
        if dist.is_initialized():  # a rank that still waits for this one gets an error at once
            dist.destroy_process_group()


def watch(world: World, run_dir: str | Path, timeout: float | None, on_hang: str) -> None:
    """Begin to look after the ranks, see `Watchdog`. A collective, before the first step. Ranks of one machine that
    have no folder in common get one. The report of an earlier start is deleted."""
    info, before, run_dir = read_rank_info(), read_report(Path(run_dir)), os.path.abspath(run_dir)
    is_launched = heartbeat.launcher is not None
    makes = not is_launched and world.local_rank == 0 and world.local_size > 1
    of_ranks = world.all_gather_json([tempfile.mkdtemp(prefix="lockstep-") if makes else "", uuid.uuid4().hex])
    if not is_launched:
        folder = of_ranks[min(world.here)][0]
        heartbeat.share(Path(folder) if os.path.isdir(folder) else None)
    log_file = os.path.join(run_dir, "logs", f"rank{world.rank}.log")
    heartbeat.note(run_dir=run_dir, log=log_file, before=before and identity(before["first"]))
    if world.is_rank_zero:
        with suppress(OSError):
            Path(run_dir, FILE).unlink(missing_ok=True)

    def store() -> dist.Store:
        return dist.PrefixStore(f"watchdog/{of_ranks[0][1]}", client_of_store(info, CONNECT_TIME))

    def show(failure: Record) -> None:
        report, prints = tell(heartbeat.folder, failure)
        if prints:
            print_line(screen(report), sys.stderr)

    if sys.platform == "linux":  # which shows processes to each other
        signals.each_second(Watchdog(world, store, timeout, on_hang, None if is_launched else show).look)


def require_same(world: World, values: Mapping[str, Any], hint: str, shown: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError, on all ranks, if they hold different `values` {name: plain value}. A collective. hint: what to
    type instead. shown: `values` as a message may show them, without those that are secret."""
    salt = world.broadcast_json(secrets.token_hex())  # without it a short secret could be guessed from its digest
    digests = {key: hashlib.sha256(f"{salt} {json.dumps(value)}".encode()).hexdigest() for key, value in values.items()}
    shown = values if shown is None else shown
    first, shown_first = world.broadcast_json([digests, shown])
    keys = [*differing(first, digests)][:1]
    mine = [(key, shown_first.get(key, "missing"), shown.get(key, "missing")) for key in keys]
    for rank, found in enumerate(world.all_gather_json(mine)):
        for key, on_zero, here in found:
            raise ConfigError(f"{key} differs between ranks: {on_zero!r} on rank 0 and {here!r} on rank {rank}; {hint}")
