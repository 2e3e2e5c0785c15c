# until issue 45
"""Builds what trains, evaluates, saves and logs in a rank, as the packages that are not written anew yet take it."""

import hashlib
import json
import os
import platform
import shlex
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
from lockstep.errors import ConfigError, path_value
from lockstep.loggers.base import Logger, Loggers, RunInfo, hyperparameters
from lockstep.runs.record import SWEEP, RunRecord, read_run
from lockstep.runs.samples import NAME as SAMPLES
from lockstep.snapshots.checkpointer import Checkpointer
from lockstep.snapshots.files import MANIFEST
from lockstep.snapshots.find import compared
from lockstep.snapshots.fingerprint import data_fingerprint
from lockstep.snapshots.initial_weights import file_of_weights
from lockstep.training.evaluate import Evaluations, Evaluator, images_wanted
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
    images = images_wanted(config.logger.values())
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
    return Loggers(members, RunRecord(Path(run.config.run_dir), (name, direction)), restore)


def run_info(record: ConfigRecord, snapshots: Checkpointer) -> RunInfo:
    """What loggers receive at the start. A collective."""
    run, world = snapshots.run, snapshots.world
    config, loaders = run.config, run.loaders
    names = {"training_samples": "training samples", "training_data": "training data"}
    data = {name: snapshots.identity[key] for name, key in names.items()}
    if loaders.val is not None:
        data |= {"validation_samples": len(loaders.val.reader), "validation_data": loaders.split}
    if loaders.held_out is not None and len(loaders.held_out) <= WRITTEN_NUMBERS:
        data["validation_numbers"] = " ".join(map(str, loaders.held_out.tolist()))
    data |= {"test_samples": len(loaders.test.reader), "test_data": data_fingerprint(loaders.test.reader.dataset)}
    data |= _beginning(config.parameters.init, snapshots) if world.is_rank_zero else {}
    listed = class_names(loaders.train.reader.dataset)
    facts = run_facts(world, record) | {"data": data, "classes": listed if len(listed) <= WRITTEN_NUMBERS else []}
    script, resume = shlex.split(record.command)[1], f"resume={path_value(snapshots.run_dir)}"
    return RunInfo(
        run_dir=snapshots.run_dir,
        config_yaml=record.files["config.yaml"],
        hyperparameters=hyperparameters(record, world.size),
        metrics=[*run.task.better, *config.evaluation.metrics],
        world_size=world.size,
        data_parallel_size=run.strategy.data_share_of(world.size),
        train_samples=len(loaders.train),
        val_samples=0 if loaders.val is None else len(loaders.val.reader),
        test_samples=len(loaders.test.reader),
        batch_size=run.batch_size,
        epochs=config.trainer.epochs,
        start_step=run.progress.step,
        samples_done=run.progress.samples,
        objective=run.objective,
        is_final=config.trainer.final is not None,
        is_over=run.finished,
        sweep=facts["sweep"],
        facts=facts,
        evaluate=shlex.join(["python", script, "mode=evaluate", resume, *record.flags]),
        best=run.progress.best,
        best_step=run.progress.best_step,
    )


def run_facts(world: World, record: ConfigRecord) -> dict[str, Any]:
    """Keys of run.json, before the first step; "start" has those of this start. A collective."""
    config, folder = dict(record.shown), str(record.shown["run_dir"])
    for key, value in config.items():  # loggers name a place in the run folder; equal configs shall have the same hash
        if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
            config[key] = value.replace(folder, "${run_dir}", 1)
    computed = {key: config[key] for key in sorted(compared(record.shown)) if not key.startswith("logger.")}
    config_hash = hashlib.sha256(json.dumps(computed, default=str).encode()).hexdigest()[:16]
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
        "config_hash": config_hash,
        "environment": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        },
        "start": {"world_size": world.size, "launcher": read_rank_info().started_by, "hosts": hosts},
    }


def _cpu_name() -> str:
    with suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def earlier_test(run: RunInfo, world: World) -> Any:
    """The test that run.json has of an earlier start of this run, as `RunInfo.test`. None if there is none, if the run
    goes on from a step before it, or if the test data is other data now. A collective."""
    found = None
    if world.is_rank_zero and run.start_step > 0:
        with suppress(ConfigError):
            before = read_run(run.run_dir)
            test, data = before["test"], before["data"].get("test_data")
            if test and test["step"] <= run.start_step and data == run.facts["data"]["test_data"]:
                found = test
    return world.broadcast_json(found)


def _beginning(init: str | None, snapshots: Checkpointer) -> dict[str, str]:
    """Hashes of the files that the run began with: of `parameters.init=`, or of a snapshot in another folder."""
    files = {} if init is None else {"init": file_of_weights(init)}
    before = snapshots.resumed_from
    if before is not None:
        files = {} if before.parent.parent.samefile(snapshots.run_dir) else {"resume": before}
    files = {key: path / MANIFEST if path.is_dir() else path for key, path in files.items()}  # it has all hashes
    hashes = {}
    for key, path in files.items():
        with suppress(OSError), path.open("rb") as file:  # a run that still trains may have removed its snapshot
            hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return hashes
