"""Slots: how a machine is divided between jobs that run at once, so that no core and no GPU has two of them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lockstep.distributed.host import cpu_count
from lockstep.errors import ConfigError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Slot:
    """What one job at a time may use. cores: empty for all. environment: such as CUDA_VISIBLE_DEVICES."""

    cores: frozenset[int] = frozenset()
    environment: dict[str, str] = field(default_factory=dict)


def divide_machine(slots: int | str, ranks: int | str) -> list[Slot]:
    """The slots of this machine. slots: how many, or auto: as many as have a core, or a GPU, for each rank of a job.

    ranks: of the largest job, or a word: gpu, cpu and auto take what a slot has. Raises ConfigError if the slots need
    more GPUs or cores than there are.
    """
    gpus, cores = visible_gpus(), usable_cores()
    units = len(gpus) or len(cores)
    ranks_here = ranks if isinstance(ranks, int) else 1
    if slots == "auto":
        slots = max(1, units // ranks) if isinstance(ranks, int) else 1
    assert isinstance(slots, int)
    if slots == 1:
        return [Slot()]
    if slots * ranks_here > units:
        what = "GPUs" if gpus else "cores"
        wanted = f"{slots} of {ranks_here} ranks each" if ranks_here > 1 else slots
        raise ConfigError(
            f"sweep.slots={wanted} is more than the {units} {what} of this machine; type sweep.slots=auto"
        )
    return [
        Slot(
            frozenset(_share(cores, slots, number)),
            {"CUDA_VISIBLE_DEVICES": ",".join(_share(gpus, slots, number))} if gpus else {},
        )
        for number in range(slots)
    ]


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; macOS has no affinity
        return sorted(os.sched_getaffinity(0))
    return list(range(cpu_count()))


def visible_gpus() -> list[str]:
    """The GPUs of NVIDIA that jobs may use. Without torch: a process that has asked CUDA must not fork."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    devices = Path("/dev").glob("nvidia[0-9]*")
    return sorted((path.name.removeprefix("nvidia") for path in devices), key=int)


def _share(items: Sequence[Item], parts: int, number: int) -> Sequence[Item]:
    """The part with this number of `parts` equal parts; what is left over belongs to none."""
    size = len(items) // parts
    return items[number * size : (number + 1) * size]
