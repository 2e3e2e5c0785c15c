"""What run.json says of a run before its first step. What takes time is added later, see `lockstep.runs.record`."""

import hashlib
import json
import platform
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.world import World


def run_facts(
    world: World, step: int, command: Mapping[str, Any], computed: Sequence[str], data: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain values for run.json. A collective.

    step: optimizer steps already done. command: what was typed, and "config", {key: value}. computed: the keys of it
    that say what is computed. data: the number of samples and a fingerprint of the data.
    """
    compared = {key: command["config"][key] for key in sorted(computed)}
    config_hash = hashlib.sha256(json.dumps(compared).encode()).hexdigest()[:16]
    hosts = list(dict.fromkeys(world.all_gather_json(socket.gethostname())))
    return {
        **command,
        "config_hash": config_hash,
        "data": dict(data),
        "code": {},
        "environment": _machine(world),
        "life": {
            "from_step": step,
            "world_size": world.size,
            "launcher": read_rank_info().started_by,
            "hosts": hosts,
            "config_hash": config_hash,
        },
    }


def _machine(world: World) -> dict[str, Any]:
    device = world.device
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def _cpu_name() -> str:
    with suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
