"""Builds what a run writes for people: its loggers, and what they receive at the start."""

import hashlib
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep.config.check import run_columns
from lockstep.config.record import ConfigRecord
from lockstep.config.targets import chooses_foreign_target, instantiate_as
from lockstep.data.dataset import class_names, whole_of
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.loggers.base import Logger, LoggerList, RunInfo
from lockstep.loggers.run_json import RunJson, run_facts
from lockstep.runs.record import read_run
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.initial_weights import file_of_weights
from lockstep.snapshots.manager import SnapshotManager
from lockstep.snapshots.resume import compared
from lockstep.training.state import TrainState

if TYPE_CHECKING:
    from lockstep.build import Loaders

WRITTEN_NUMBERS = 2000  # of validation samples in run.json; of more, the recipe and the hash


def loggers(cfg: DictConfig, state: TrainState, before_writing: Callable[[], None]) -> LoggerList:
    """The loggers on rank 0, none on other ranks. before_writing: see LoggerList."""
    members: list[Logger] = []
    if state.strategy.world.is_rank_zero:
        nodes = cfg.get("logger", {}).items()  # logger=[] leaves no section
        members = [instantiate_as(Logger, node, f"logger.{name}") for name, node in nodes]
        if cfg.trainer.digest != "off":
            from lockstep.training.step_records import EVERY, StepDigests

            members.append(StepDigests(state, EVERY if cfg.trainer.digest == "on" else cfg.trainer.digest))
        mode = state.task.mode(cfg.objective)
        is_paused = lambda: state.reached_limit == "trainer.pause_after"  # noqa: E731
        members.append(RunJson(cfg.objective, mode, is_paused))
    return LoggerList(members, before_writing)


def run_info(record: ConfigRecord, snapshots: SnapshotManager, loaders: "Loaders") -> RunInfo:
    """What loggers receive at the start. A collective."""
    state, world = snapshots.state, snapshots.world
    names = {"training_samples": "training samples", "training_data": "training data"}
    data = {name: snapshots.fingerprint[key] for name, key in names.items()}
    if loaders.val is not None:
        data |= {"validation_samples": len(loaders.val), "validation_data": loaders.split}
    if loaders.numbers is not None and len(loaders.numbers) <= WRITTEN_NUMBERS:
        data["validation_numbers"] = " ".join(map(str, loaders.numbers.tolist()))
    data |= {"test_samples": len(loaders.test), "test_data": data_fingerprint(loaders.test.dataset)}
    data |= _beginning(record.flat["init"], snapshots) if world.is_rank_zero else {}
    text = getattr(whole_of(loaders.train.dataset), "text", None)
    if text is not None:
        data["symbols"] = text.symbols_hash
    computed = [key for key in compared(record.shown) if not key.startswith("logger.")]
    facts = run_facts(world, state.progress.step, record.run_json, computed, data)
    facts["classes"] = class_names(loaders.train.dataset)
    return RunInfo(
        run_dir=snapshots.run_dir,
        config_yaml=record.hydra_files["config.yaml"],
        hyperparameters=run_columns(record.shown, record.options, world.size),
        metrics=list(state.task.metrics),
        world_size=world.size,
        data_parallel_size=state.strategy.data_parallel_size(world.size),
        train_samples=len(loaders.train),
        val_samples=0 if loaders.val is None else len(loaders.val),
        eval_samples=len(loaders.test),
        batch_size=state.settings.batch_size,
        epochs=state.settings.epochs,
        start_step=state.progress.step,
        best=state.progress.best,
        best_step=state.progress.best_step,
        objective=state.objective[0],
        is_final=record.flat["trainer.final"] is not None,
        facts=facts,
        script=Path(shlex.split(record.run_json["command"])[1]),
        trusted=[*filter(chooses_foreign_target, record.run_json["overrides"]), *record.run_json["flags"]],
    )


def earlier_test(run: RunInfo, world: World) -> Any:
    """The test that run.json has of an earlier start of this run: {"step": of the weights, "metrics"}. None if there is
    none, if the run goes on from a step before it, or if the test data is other data now. A collective."""
    found = None
    if world.is_rank_zero and run.start_step > 0:
        with suppress(ConfigError):
            before = read_run(run.run_dir)
            test, data = before.get("test"), before["data"].get("test_data")
            if test and test["step"] <= run.start_step and data == run.facts["data"]["test_data"]:
                found = test
    return world.broadcast_json(found)


def _beginning(init: str | None, snapshots: SnapshotManager) -> dict[str, str]:
    """Hashes of the files that the run began with: of `init=`, or of a snapshot in another folder."""
    files = {} if init is None else {"init": file_of_weights(init)}
    before = snapshots.resumed_from
    if before is not None:
        files = {} if before.parent.parent.samefile(snapshots.run_dir) else {"resume": before}
    hashes = {}
    for key, path in files.items():
        with suppress(OSError), path.open("rb") as file:  # a run that still trains may have removed its snapshot
            hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return hashes
