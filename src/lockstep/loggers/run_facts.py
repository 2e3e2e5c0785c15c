"""What run.json says of a run before its first step. What takes time is added later, see `lockstep.runs.code`."""

import hashlib
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.runs.record import REPEATED


def run_facts(
    world: World,
    step: int,
    config: Mapping[str, Any],
    computed: Sequence[str],
    data: Mapping[str, Any],
    record: Mapping[str, str],
    flags: Sequence[str],
) -> dict[str, Any]:
    """Plain values for run.json. A collective.

    step: optimizer steps already done. config: {key: value} without values from environment variables. computed: its
    keys that say what is computed. data: the number of samples and a fingerprint of the data. record: {file: text} for
    `.hydra`. flags: those of the command line that say which config is composed.
    """
    config = {key: _without_folder(value, config["run_dir"]) for key, value in config.items()}
    compared = {key: config[key] for key in sorted(computed)}
    hosts = list(dict.fromkeys(world.all_gather_json(socket.gethostname())))
    overrides = OmegaConf.to_container(OmegaConf.create(record.get("overrides.yaml", "[]")))
    assert isinstance(overrides, list)
    config_hash = hashlib.sha256(json.dumps(compared).encode()).hexdigest()[:16]
    return {
        "command": _command(overrides, flags),
        "flags": list(flags),
        "overrides": overrides,
        "cwd": os.getcwd(),
        "seed": config["seed"],
        "config_hash": config_hash,
        "config": config,
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


def _without_folder(value: Any, folder: str) -> Any:
    """Loggers have keys that name a place in the run folder. Two runs with the same config shall have the same hash."""
    is_inside = isinstance(value, str) and (value == folder or value.startswith(f"{folder}/"))
    return value.replace(folder, "${run_dir}", 1) if is_inside else value


def require_repetition(world: World, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError, on all ranks, if `runs.py again` started this run and it is not what was to be repeated.

    A collective, if the environment says so.
    """
    folder = os.environ.get(REPEATED)
    if folder is None:
        return
    from lockstep.runs.again import what_differs
    from lockstep.runs.code import user_modules
    from lockstep.runs.record import read_run

    problem = None
    if world.is_rank_zero:
        problem = what_differs(read_run(Path(folder)), {**facts, "code": {"modules": user_modules()}})
    problem = world.broadcast_json(problem)
    if problem is not None:
        raise ConfigError(problem)


def _command(overrides: Sequence[Any], flags: Sequence[str]) -> str:
    """What was typed, or what gives the same run if this process was started by another program than the shell."""
    script, *words = sys.argv
    if not script.endswith("train.py"):
        script, words = "src/train.py", [*overrides, *flags]
    return shlex.join(["python", script, *words])


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
