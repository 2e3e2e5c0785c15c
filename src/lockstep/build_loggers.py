"""Builds what a run writes for people: its loggers, and what they receive at the start."""

import hashlib
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from lockstep.config.check import run_columns
from lockstep.config.record import ConfigRecord
from lockstep.config.targets import chooses_foreign_target, instantiate_as
from lockstep.data.dataset import class_names
from lockstep.data.loader import BatchLoader
from lockstep.data.text import TextWindows
from lockstep.loggers.base import Logger, LoggerList, RunInfo
from lockstep.loggers.run_json import RunJson, run_facts
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.initial_weights import file_of_weights
from lockstep.snapshots.manager import SnapshotManager
from lockstep.snapshots.resume import compared
from lockstep.training.state import TrainState


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
        members.append(RunJson(cfg.objective, mode, is_paused, lambda: state.progress.time_shares))
    return LoggerList(members, before_writing)


def run_info(
    record: ConfigRecord, snapshots: SnapshotManager, train_loader: BatchLoader, eval_loader: BatchLoader
) -> RunInfo:
    """What loggers receive at the start. A collective."""
    state, world = snapshots.state, snapshots.world
    names = {"training_samples": "training samples", "training_data": "training data"}
    data = {name: snapshots.fingerprint[key] for name, key in names.items()}
    data |= {"test_samples": len(eval_loader), "test_data": data_fingerprint(eval_loader.dataset)}
    data |= _beginning(record.flat["init"], snapshots) if world.is_rank_zero else {}
    if isinstance(train_loader.dataset, TextWindows):
        data["symbols"] = train_loader.dataset.text.symbols_hash
    computed = [key for key in compared(record.shown) if not key.startswith("logger.")]
    facts = run_facts(world, state.progress.step, record.run_json, computed, data)
    facts["classes"] = class_names(train_loader.dataset)
    return RunInfo(
        run_dir=snapshots.run_dir,
        config_yaml=record.hydra_files["config.yaml"],
        hyperparameters=run_columns(record.shown, record.options, world.size),
        metrics=list(state.task.metrics),
        world_size=world.size,
        data_parallel_size=state.strategy.data_parallel_size(world.size),
        train_samples=len(train_loader),
        eval_samples=len(eval_loader),
        batch_size=state.settings.batch_size,
        epochs=state.settings.epochs,
        start_step=state.progress.step,
        best=state.progress.best,
        best_step=state.progress.best_step,
        facts=facts,
        script=Path(shlex.split(record.run_json["command"])[1]),
        trusted=[*filter(chooses_foreign_target, record.run_json["overrides"]), *record.run_json["flags"]],
    )


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
