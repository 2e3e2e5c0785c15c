"""launch=dry: start nothing, and show what a job of many ranks would hold, compute and send.

The first, the middle and the last rank are built in this process, one after the other, on torch's fake process group,
whose collectives end at once. Each takes the first step of the run.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lockstep import compat
from lockstep.config.schema import Count
from lockstep.data.dataset import tensors_in
from lockstep.data.loader import BatchLoader
from lockstep.data.partition import shares_in_words
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, TrainingDiverged
from lockstep.launchers.base import Launcher, Worker, refuse_nesting
from lockstep.training.loop import train_epoch
from lockstep.training.state import TrainSettings, TrainState
from lockstep.training.watchers import Watcher
from lockstep.training.weight_check import local_part

if TYPE_CHECKING:
    from lockstep.build_data import DataSets

SHOWN = ("model", "dataset", "optimizer", "strategy", "gradient_sync", "sync_bn")  # groups of options

# {torch's operator: (its name here, place of its tensors, place of its group)}. DTensor calls those of the second half.
COLLECTIVES = {
    "c10d.allreduce_": ("all_reduce", 0, 1),
    "c10d.broadcast_": ("broadcast", 0, 1),
    "c10d.allgather_": ("all_gather", 0, 2),
    "c10d._allgather_base_": ("all_gather", 0, 2),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d.send": ("send", 0, 1),
    "c10d.recv_": ("recv", 0, 1),
    "_c10d_functional.all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, 2),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, 3),
}
FREE = ("c10d.barrier", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")


class Plan(compat.dispatch_mode(), Watcher):  # type: ignore[misc]
    """The bytes that one rank holds in its first step, and that it sends and receives in a block of this.

    A collective counts as its ring does (Patarasuk and Yuan 2009), of n ranks and payload bytes: all_reduce 2(n-1)/n
    payload each way, all_gather and reduce_scatter (n-1)/n of the whole tensor, broadcast the whole tensor.
    """

    def __init__(self, state: TrainState) -> None:
        super().__init__()
        self.state = state
        self.held = Counter[str]()
        self.sent = self.received = 0.0
        self.calls, self.payload = Counter[str](), Counter[str]()
        self.works: list[dist.Work] = []  # torch keeps no reference

    def hold(self, what: str, tensors: Iterable[Tensor]) -> None:
        self.held[what] += sum(local_part(tensor).nbytes for tensor in tensors)

    def take_step(self, loader: BatchLoader) -> None:
        with suppress(_StepTaken):
            train_epoch(self.state, loader, watchers=[self])

    def on_gradients_ready(self) -> None:
        parameters = list(self.state.strategy.model.parameters())
        self.hold("parameters", parameters)
        self.hold("gradients", [p.grad for p in parameters if p.grad is not None])

    def after_step(self, samples: int) -> None:
        self.hold("optimizer state", tensors_in(dict(self.state.optimizer.state)))
        self.hold("moving average", self.state.ema.averages.values() if self.state.ema is not None else ())
        raise _StepTaken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor's operator comes again as operators of its local tensors
        name = str(func.overloadpacket)
        if not name.startswith(("c10d.", "_c10d_functional.")) or name in FREE:
            return func(*args, **(kwargs or {}))
        if name not in COLLECTIVES:
            raise ConfigError(f"launch=dry cannot count torch's {name}; type launch=fork")
        kind, place, place_of_group = COLLECTIVES[name]
        tensors, group = list(tensors_in(args[place])), args[place_of_group]
        size = (compat.group_named(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)).size()
        gathered = size if name == "_c10d_functional.all_gather_into_tensor" else 1  # args have this rank's part
        nbytes, ring = gathered * sum(tensor.nbytes for tensor in tensors), (size - 1) / size
        shares = {"all_reduce": (2 * ring, 2 * ring), "broadcast": (1, 1), "send": (1, 0), "recv": (0, 1)}
        sent, received = shares.get(kind, (ring, ring))
        self.sent, self.received = self.sent + sent * nbytes, self.received + received * nbytes
        self.calls[kind] += 1
        self.payload[kind] += nbytes
        for tensor in tensors if kind == "recv" else ():
            tensor.zero_()  # the fake group leaves memory that was never written
        if name != "c10d.allreduce_":
            return func(*args, **(kwargs or {}))
        self.works.append(_Ended(args[0]))  # DistributedDataParallel reads its value, and the fake group gives none
        return args[0], self.works[-1].boxed()


class _Ended(dist.Work):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(value)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


class _StepTaken(Exception):
    """The first step is taken."""


@dataclass(frozen=True)
class DryWorld(World):
    """All other ranks have the values that this rank has."""

    def broadcast_json(self, value: Any) -> Any:
        return value

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value] * self.size


class DryLauncher(Launcher):
    """Plans a job, each rank on a machine of its own.

    ranks: ranks of the job that is planned.
    """

    runs_elsewhere = plans = True

    def __init__(self, ranks: Count) -> None:
        self.ranks = ranks

    def validate(self) -> None:
        refuse_nesting("dry")

    def num_ranks(self) -> tuple[int, int]:
        return self.ranks, 1

    def launch(self, worker: Worker, *args: Any) -> None:
        """Print the plan. `worker` would train, and is not called. args: its config and what is known of it."""
        from lockstep.build_data import datasets
        from lockstep.loggers.rank_logs import rank_logs
        from lockstep.preflight import accumulates_more, prepare_data

        typed, record = args
        # Nothing is started here, and nothing is compiled.
        changes: dict[str, dict[str, Any]] = {
            "dataset": {"workers": 0},
            "trainer": {"compile": False},
            "profiler": {"enabled": False},
        }
        if accumulates_more(typed):  # as long as the memory suffices
            changes["trainer"] |= {"gradient_accumulation_steps": 1}
        cfg: Any = OmegaConf.merge(typed, changes)
        numbers = sorted({0, self.ranks // 2, self.ranks - 1})
        with rank_logs() as logs:
            logs.leave_console()  # warnings are shown below the plan, once
            prepare_data(cfg)
            data = datasets(cfg)
            plans = [plan_rank(cfg, data, rank, self.ranks) for rank in numbers]
            warnings = [line.getMessage() for line in logs.kept if line.levelno >= logging.WARNING]
        chosen = " ".join(f"{group}={record.options[group]}" for group in SHOWN)
        took = ", ".join(map(str, numbers))
        print(f"launch=dry: {self.ranks} ranks; of these {took} took a step here, and nothing was started or written\n")
        print(f"config:     {chosen} trainer.precision={cfg.trainer.precision}\n{plans[0][1]}")
        for rank, (plan, _) in zip(numbers, plans, strict=True):
            sends = f"a step sends {bytes_shown(plan.sent)} and receives {bytes_shown(plan.received)}"
            print(f"{f'rank {rank}:':11} {held_in_words(plan.held)}; {sends}")
        first = plans[0][0]
        for kind, calls in first.calls.items():
            print(f"{kind}: {calls} in a step of rank 0, of {bytes_shown(first.payload[kind])} together")
        print("".join(f"warning:    {text}\n" for text in warnings), end="")


def plan_rank(cfg: DictConfig, data: "DataSets", rank: int, ranks: int) -> tuple[Plan, str]:
    """Build rank `rank` of `ranks`, each on a CPU of a machine of its own, and take its first step.

    Returns what it found, and two lines about the whole job.
    """
    from lockstep import build
    from lockstep.config.targets import instantiate
    from lockstep.training.setup import set_determinism

    dist.init_process_group("fake", store=compat.fake_store(), rank=rank, world_size=ranks)
    everyone: Any = dist.group.WORLD
    world = DryWorld(rank, ranks, 0, 1, torch.device("cpu"), everyone, timeout=1.0)
    strategy = instantiate(cfg.strategy)
    try:
        with world.resources:
            set_determinism(cfg.seed, cfg.trainer.deterministic, cfg.trainer.tf32)
            cfg, loaders = build.model_and_data(cfg, world, strategy, data)
            loader = loaders.train
            plan = Plan(build.train_state(cfg, strategy, loader))
            with plan:
                plan.take_step(loader)
            return plan, about_job(plan.state.settings, ranks, strategy.data_parallel_size(ranks))
    except TrainingDiverged:  # its sentence names other ranks, of which this one knows nothing
        raise TrainingDiverged(
            f"the loss or the gradient of rank {rank} is not finite in its first step; "
            f"type launch=fork trainer.max_steps=1, which names the samples that hold NaN"
        ) from None
    finally:
        dist.destroy_process_group()


def about_job(settings: TrainSettings, ranks: int, shares: int) -> str:
    """Two lines: its batch, which is cut into `shares`, and its steps."""
    left, last = settings.epoch_samples % settings.batch_size, ""
    if left:
        last = f"; the last batch of an epoch has {left}{shares_in_words(left, ranks, shares)}"
    epoch, whole = settings.steps_per_epoch, settings.total_steps
    batch = f"{settings.batch_size} samples{shares_in_words(settings.batch_size, ranks, shares)}"
    return f"a batch:    {batch}\nsteps:      {epoch} in an epoch, {whole} in the run{last}"


def held_in_words(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{bytes_shown(size)} of {what}" for what, size in nbytes.items() if size)


def bytes_shown(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
