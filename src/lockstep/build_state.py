# until issue 45
"""Builds what trains, evaluates, saves and logs in a rank, as the packages that are not written anew yet take it."""

import os
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.build import agreed_on
from lockstep.config.nodes import instantiate, instantiate_as
from lockstep.config.record import ConfigRecord
from lockstep.data.source import class_names
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.world import World, require_same_data
from lockstep.errors import ConfigError
from lockstep.loggers.base import Logger, Loggers, RunInfo
from lockstep.runs.record import SWEEP, RunRecord, read_run
from lockstep.runs.samples import NAME as SAMPLES
from lockstep.snapshots.checkpointer import Checkpointer
from lockstep.snapshots.fingerprint import data_fingerprint
from lockstep.training.evaluate import Evaluations, Evaluator
from lockstep.training.run import Run

WRITTEN_NUMBERS = 2000  # of validation samples in run.json; of more, the recipe and the hash


def snapshots(record: ConfigRecord, run: Run) -> Checkpointer:
    """What saves this run and resumes it. Raises ConfigError, on all ranks, if their training data differs."""
    config, loaders = run.config, run.loaders
    count, data = len(loaders.train), data_fingerprint(loaders.train.reader.dataset)
    require_same_data(run.world, "training data", count, data)
    identity = model_config(record) | {
        "optimizer": config.optimizer["_target_"],
        "training samples": count,
        "training data": data,
        "seed": config.seed,
    }
    if loaders.split is not None:
        identity["validation data"] = loaders.split
    mirror = instantiate(config.snapshot.mirror) if run.world.is_rank_zero else None
    return Checkpointer(run, identity, agreed_on(record.shown), mirror)


def model_config(record: ConfigRecord) -> dict[str, Any]:
    """{key: value} of the model, without values from environment variables."""
    return {key: value for key, value in record.shown.items() if key.startswith("model.")}


def torchmetrics_of(run: Run) -> dict[str, Any]:
    """Those of `evaluation.metrics`, by their names, in float64."""
    nodes = run.config.evaluation.metrics
    return {name: instantiate(node).set_dtype(torch.float64).to(run.meter.device) for name, node in nodes.items()}


def evaluations(run: Run, loggers: Loggers) -> Evaluations:
    """All ranks prepare what the keys of rank 0's loggers ask for."""
    config, loaders = run.config, run.loaders
    images = max((node.get("images") or 0 for node in config.logger.values()), default=0)
    metrics, file = torchmetrics_of(run), Path(config.run_dir) / SAMPLES
    test = Evaluator(run, loaders.test, loggers, images, "test", metrics, file)
    each = [Evaluator(run, loaders.val, loggers, images, "val", metrics)] if loaders.val is not None else []
    each += [test] * (config.evaluation.test == "every")
    return Evaluations(each, None if config.evaluation.test == "never" else test)


def loggers(run: Run, restore: Callable[[], None]) -> Loggers:
    """The loggers on rank 0, none on other ranks. restore: see Loggers."""
    if not run.world.is_rank_zero:
        return Loggers([])
    members = [instantiate_as(Logger, node, f"logger.{name}") for name, node in run.config.logger.items()]
    name = run.objective or f"test/{run.task.monitor}"
    direction = run.direction if run.objective else run.task.mode(name)
    return Loggers([RunRecord(Path(run.config.run_dir), (name, direction)), *members], restore)


def run_info(record: ConfigRecord, snapshots: Checkpointer) -> RunInfo:
    """What loggers receive at the start. A collective."""
    run, world = snapshots.run, snapshots.world
    loaders = run.loaders
    names = {"training_samples": "training samples", "training_data": "training data"}
    data = {name: snapshots.identity[key] for name, key in names.items()}
    if loaders.val is not None:
        data |= {"validation_samples": len(loaders.val.reader), "validation_data": loaders.split}
    if loaders.held_out is not None and len(loaders.held_out) <= WRITTEN_NUMBERS:
        data["validation_numbers"] = " ".join(map(str, loaders.held_out.tolist()))
    data |= {"test_samples": len(loaders.test.reader), "test_data": data_fingerprint(loaders.test.reader.dataset)}
    listed = class_names(loaders.train.reader.dataset)
    facts = run_facts(world, record) | {"data": data, "classes": listed if len(listed) <= WRITTEN_NUMBERS else []}
    return RunInfo(run, facts)


def run_facts(world: World, record: ConfigRecord) -> dict[str, Any]:
    """Keys of run.json, before the first step; "start" has those of this start. A collective."""
    config, folder = dict(record.shown), str(record.shown["run_dir"])
    for key, value in config.items():  # loggers name a place in the run folder: in that two runs do not differ
        if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
            config[key] = value.replace(folder, "${run_dir}", 1)
    device, sweep = world.device, os.environ.get(SWEEP)
    hosts = list(dict.fromkeys(world.all_gather_json(socket.gethostname())))
    return {
        "command": record.command,
        "cwd": os.getcwd(),
        "overrides": list(record.overrides),
        "flags": list(record.flags),
        "sweep": sweep,
        "tags": config["tags"],
        "notes": config["notes"],
        "seed": config["seed"],
        "options": {group: option for group, option in record.options.items() if not group.startswith("hydra/")},
        "config": config,
        "environment": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        },
        "start": {"world_size": world.size, "launcher": read_rank_info().started_by, "hosts": hosts},
    }


def earlier_test(info: RunInfo) -> Any:
    """The test that run.json has of an earlier start of this run, as `RunInfo.test`. None if there is none, if the run
    goes on from a step before it, or if the test data is other data now. A collective."""
    found, run = None, info.run
    if run.world.is_rank_zero and run.progress.step > 0:
        with suppress(ConfigError):
            before = read_run(Path(run.config.run_dir))
            test, data = before["test"], before["data"].get("test_data")
            if test and test["step"] <= run.progress.step and data == info.facts["data"]["test_data"]:
                found = test
    return run.world.broadcast_json(found)
