"""Builds what a run writes for people: its loggers, and what they receive at the start."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from omegaconf import DictConfig

from lockstep.config.check import flatten
from lockstep.config.environment_values import as_written
from lockstep.config.instantiate import instantiate_as
from lockstep.config.run_columns import run_columns
from lockstep.data.loader import BatchLoader
from lockstep.launchers.slurm import config_flags
from lockstep.loggers.base import Logger, LoggerList, RunInfo
from lockstep.loggers.recorded import LogRecord, RecordedLoggers
from lockstep.loggers.run_facts import require_repetition, run_facts
from lockstep.loggers.run_record import RunRecord
from lockstep.snapshots.fingerprint import compared, plain_values
from lockstep.snapshots.manager import SnapshotManager
from lockstep.training.state import TrainState


def loggers(
    cfg: DictConfig, state: TrainState, before_writing: Callable[[], None], record: LogRecord | None = None
) -> LoggerList:
    """The loggers on rank 0, none on other ranks. before_writing: see LoggerList. record: notes what is logged."""
    members: list[Logger] = []
    if state.strategy.world.is_rank_zero:
        nodes = cfg.get("logger", {}).items()  # logger=[] leaves no section
        members = [instantiate_as(Logger, node, f"logger.{name}") for name, node in nodes]
        if cfg.trainer.digest != "off":
            from lockstep.loggers.step_digests import EVERY, StepDigests

            members.append(StepDigests(state, EVERY if cfg.trainer.digest == "on" else cfg.trainer.digest))
        members.append(RunRecord(cfg.objective, state.task.mode(cfg.objective)))
    return RecordedLoggers(members, before_writing, record) if record else LoggerList(members, before_writing)


def run_info(
    cfg: DictConfig,
    state: TrainState,
    train_loader: BatchLoader,
    eval_loader: BatchLoader,
    snapshots: SnapshotManager,
    record: Mapping[str, str],
    written: Mapping[str, str],
) -> RunInfo:
    """What loggers receive at the start. record, written: see `train_worker`. A collective."""
    world = state.strategy.world
    config = as_written(plain_values(flatten(cfg)), written)
    names = {"training_samples": "training samples", "training_data": "training data"}
    data = {name: snapshots.fingerprint[key] for name, key in names.items()} | {"test_samples": len(eval_loader)}
    computed = [key for key in compared(config) if not key.startswith("logger.")]
    searched = [word for word in sys.argv if word.startswith("hydra.searchpath=")]
    facts = run_facts(
        world, state.progress.step, config, computed, data, record, [*config_flags(sys.argv[1:]), *searched]
    )
    require_repetition(world, facts)
    columns = {key: value for key, value in config.items() if not key.startswith("launch.")}
    return RunInfo(
        run_dir=Path(cfg.run_dir),
        config_yaml=record.get("config.yaml", ""),
        hyperparameters=run_columns(columns, record.get("hydra.yaml", ""), world.size),
        metrics=list(state.task.metrics),
        world_size=world.size,
        data_parallel_size=train_loader.size,
        train_samples=len(train_loader),
        eval_samples=len(eval_loader),
        batch_size=state.settings.batch_size,
        epochs=state.settings.epochs,
        start_step=state.progress.step,
        start_epoch=state.progress.epoch,
        facts=facts,
    )
