"""The world of ranks: join it, communicate in it, compare what ranks must have alike, leave it.

A world of one is a world, too. Values and nested state go between ranks as JSON and tensors, never as pickles: nothing
that a rank receives can run code.
"""

import hashlib
import json
import logging
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.backend import (
    agreed_backend,
    backend_environment,
    choose_backend,
    set_up_device,
    usual_interface,
    warn_of_unused_gpus,
)
from lockstep.distributed.environment import export_rank_info, read_rank_info
from lockstep.distributed.rendezvous import form_group, on_one_machine
from lockstep.errors import CannotStartNow, ConfigError
from lockstep.failures import reporter
from lockstep.failures.start import start_for_rank
from lockstep.source_code import module_hashes

log = logging.getLogger(__name__)

PREPARE_TIMEOUT = timedelta(days=2)  # for a download or a conversion of data, which may take longer than any collective
DISK_TIMEOUT = timedelta(hours=1)  # for a slow disk
PLAIN = (bool, int, float, str, type(None))


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

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place. Returns it. On a GPU the host does not wait."""
        if self.device.type == "mps":  # of one rank; gloo takes no tensor of it
            return tensor
        dist.all_reduce(tensor)
        return tensor

    def all_reduce_async(self, tensor: Tensor) -> Any:
        """As `all_reduce_sum`, but it returns what is waited for, or None if there is nothing to do."""
        return None if self.size == 1 else dist.all_reduce(tensor, async_op=True)

    def all_reduce_sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum of each over all ranks, in its shape and on its device. One collective for each of this rank's
        devices, in the type that holds all tensors there; tensors of the CPU travel with those of `device`.
        """
        devices = [self.device if tensor.device.type == "cpu" else tensor.device for tensor in tensors]
        sums: dict[int, Tensor] = {}
        for device in dict.fromkeys(devices):
            numbers = [number for number, one in enumerate(devices) if one == device]
            real = {n: torch.view_as_real(tensors[n]) if tensors[n].is_complex() else tensors[n] for n in numbers}
            summed = torch.cat([tensor.reshape(-1).to(device) for tensor in real.values()])
            self.all_reduce_sum(summed)
            parts = summed.split([tensor.numel() for tensor in real.values()])
            for n, part in zip(numbers, parts, strict=True):
                shaped = part.view_as(real[n]).to(tensors[n].device)
                sums[n] = torch.view_as_complex(shaped) if tensors[n].is_complex() else shaped
        return [sums[number] for number in range(len(tensors))]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some rank."""
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return found.bool().tolist()

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, which JSON can store, in the order of ranks, on every rank. Tuples become lists."""
        mine = _encoded(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self.control)
        longest = int(max(lengths))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        dist.all_gather(texts, padded, group=self.control)
        return [_decoded(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """The `value` of rank 0, which JSON can store, on every rank. Tuples become lists."""
        text = _encoded(value) if self.is_rank_zero else torch.zeros(0, dtype=torch.uint8)
        length = torch.tensor([len(text)])
        dist.broadcast(length, src=0, group=self.control)
        if not self.is_rank_zero:
            text = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(text, src=0, group=self.control)
        return _decoded(text)

    def gather_state(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `state` of CPU tensors and plain values, in dicts, lists, tuples and sets, on rank 0. Empty
        elsewhere.

        Numbers of other libraries become Python's, and other objects None.
        """
        tensors: list[Tensor] = []
        descriptions = self.all_gather_json(_describe(state, tensors))
        if not self.is_rank_zero:
            for tensor in filter(Tensor.numel, tensors):
                dist.send(_as_bytes(tensor.contiguous()), dst=0, group=self.control)
            return []
        states = [state]
        for rank, description in enumerate(descriptions[1:], start=1):
            received: list[Tensor] = []
            states.append(_rebuild(description, received))
            for tensor in filter(Tensor.numel, received):
                dist.recv(_as_bytes(tensor), src=rank, group=self.control)
        return states

    def for_thread(self, timeout: timedelta) -> "World":
        """This world with a control group of its own, for collectives of another thread. A collective."""
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return replace(self, control=group)

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
        with reporter.phase("disk"):
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
                problem = str(error), isinstance(error, CannotStartNow)
        self.barrier(PREPARE_TIMEOUT)
        for sentence, may_pass in filter(None, self.all_gather_json(problem)):
            raise CannotStartNow(sentence) if may_pass else ConfigError(sentence)


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
    reporter.enter("meeting")
    info = read_rank_info()
    backend = choose_backend(name, info.local_world_size)
    warn_of_unused_gpus(name, backend, info.local_world_size)
    if info.world_size > 1:
        export_rank_info(info)
    wait = timedelta(seconds=timeout)
    interface = socket_ifname or usual_interface(on_one_machine(info))
    with backend_environment(interface, debug, p2p_disable, ib_disable), ExitStack() as resources:
        # A rank that still waits for this one gets an error at once.
        resources.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        store = form_group(info, wait)
        if name == "auto":
            backend = agreed_backend(backend, store, info.world_size)
        device = set_up_device(backend, info, name)
        # NCCL that is bound to a device starts at once. A rank by itself may never call it.
        bound = device if backend == "nccl" and bind_device and info.world_size > 1 else None
        dist.init_process_group(
            backend, store=store, rank=info.rank, world_size=info.world_size, timeout=wait, device_id=bound
        )
        control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=wait)
        assert isinstance(control, dist.ProcessGroup)
        log.info("rank %d of %d: %s on %s, started by %s", info.rank, info.world_size, backend, device, info.started_by)
        ranks = (info.rank, info.world_size, info.local_rank, info.local_world_size)
        yield World(*ranks, device, control, timeout, resources)


def join_monitor(world: World, run_dir: str | Path, timeout: float | None, on_hang: str) -> None:
    """Tell the monitor where the run folder is, and what a hang is. A collective.

    If no launcher has started a monitor, this starts it. timeout, on_hang: see `lockstep.failures.hang_detector`.
    """
    if not reporter.is_connected():
        name = world.broadcast_json(uuid.uuid4().hex)
        started_by = read_rank_info().started_by
        if world.local_rank == 0:
            start_for_rank(name, started_by)
        reporter.connect(name, world.rank, world.size)
    reporter.set_run(str(run_dir), str(Path(run_dir) / "logs" / f"rank{world.rank}.log"))
    reporter.set_hang_rules(timeout, on_hang, world.timeout)


# What all ranks must have alike.


def require_same_config(world: World, flat: dict[str, Any], shown: dict[str, Any], hint: str) -> None:
    """Raise ConfigError, on all ranks, if they hold different `flat` configs {key: plain value}. A collective.

    shown: `flat` as a message may show it, without values that are secret. hint: what to type instead.
    """
    salt = world.broadcast_json(secrets.token_hex())  # without it a short secret could be guessed from its digest
    if len(set(world.all_gather_json(_digest(salt, flat)))) == 1:
        return
    configs = world.all_gather_json({key: [shown[key], _digest(salt, value)] for key, value in flat.items()})
    first, missing = configs[0], ["missing", ""]
    for rank, config in enumerate(configs):
        for key in sorted({*first, *config}):
            (on_zero, digest), (here, other) = first.get(key, missing), config.get(key, missing)
            if digest != other:
                raise ConfigError(
                    f"{key} differs between ranks: {on_zero!r} on rank 0 and {here!r} on rank {rank}; {hint}"
                )


def _digest(salt: str, value: Any) -> str:
    return hashlib.sha256(f"{salt} {json.dumps(value)}".encode()).hexdigest()[:16]


def require_same_code(world: World) -> None:
    """Raise ConfigError, on all ranks, if a loaded module of this project or of the user's differs between ranks.

    Modules that only some ranks have loaded are not compared: rank 0 alone has loggers. A collective.
    """
    loaded = world.all_gather_json(module_hashes())
    for rank, modules in enumerate(loaded):
        other = sorted(name for name in modules.keys() & loaded[0].keys() if modules[name] != loaded[0][name])
        if other:
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise ConfigError(
                f"rank {rank} has other code than rank 0: the file of {other[0]}{more} differs; "
                f"copy the same code to every machine and type the command again"
            )


class OtherData(ConfigError):
    """A data set is not alike on all ranks. name: "training data" or "test data"."""

    def __init__(self, sentence: str, name: str) -> None:
        super().__init__(sentence)
        self.name = name


def require_same_data(world: World, name: str, length: int, fingerprint: str) -> None:
    """Raise OtherData, on all ranks, if a data set differs between ranks. A collective.

    name: "training data" or "test data". fingerprint: see `lockstep.snapshots.data_fingerprint`.
    """
    everyone = world.all_gather_json((length, fingerprint))
    first_length, first_fingerprint = everyone[0]
    for rank, (other_length, other_fingerprint) in enumerate(everyone):
        if other_length != first_length:
            what = f"the {name} has {other_length} samples on rank {rank} and {first_length} on rank 0"
        elif other_fingerprint != first_fingerprint:
            what = f"the {name} of rank {rank} is not that of rank 0: as many samples, but other ones"
        else:
            continue
        raise OtherData(f"{what}; copy the same data to every machine and type the command again", name)


# Values as tensors.


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def _describe(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """`value` for JSON. Its tensors are added to `tensors`, in their order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, _describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        return {type(value).__name__: [_describe(item, tensors) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value) in PLAIN:
        return {"value": value}
    return {"value": value.item() if hasattr(value, "item") else None}


def _rebuild(description: dict[str, Any], tensors: list[Tensor]) -> Any:
    """What was described, with empty tensors. They are added to `tensors`, in the order in which `_describe` did."""
    match description:
        case {"tensor": dtype, "shape": shape}:
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            return tensors[-1]
        case {"dict": items}:
            return {key: _rebuild(item, tensors) for key, item in items}
        case {"list": items}:
            return [_rebuild(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_rebuild(item, tensors) for item in items)
        case {"set": items}:
            return {_rebuild(item, tensors) for item in items}
        case {"frozenset": items}:
            return frozenset(_rebuild(item, tensors) for item in items)
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"bytearray": text}:
            return bytearray.fromhex(text)
        case {"complex": numbers}:
            return complex(*numbers)
    return description["value"]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: gloo does not send every type of number."""
    return tensor.reshape(-1).view(torch.uint8)
