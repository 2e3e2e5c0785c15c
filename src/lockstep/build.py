"""Builds the parts of a run from its config. With `preflight` and `train.py` it is all that reads the config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lockstep.config.arguments import matching_arguments
from lockstep.config.check import flatten
from lockstep.config.instantiate import instantiate
from lockstep.data.augment import Augment
from lockstep.data.in_memory import check_classes
from lockstep.data.loader import BatchLoader, Converter
from lockstep.distributed.sync_batch_norm import convert_sync_batch_norm
from lockstep.distributed.world import World
from lockstep.loggers.base import LoggerList, RunInfo
from lockstep.preflight import check_batch_size
from lockstep.snapshots.fingerprint import data_fingerprint
from lockstep.snapshots.manager import SnapshotManager
from lockstep.strategies.base import Strategy
from lockstep.training.ema import ExponentialMovingAverage
from lockstep.training.meter import Meter
from lockstep.training.setup import grad_scaler, model_dtype, model_memory_format, prepare_model
from lockstep.training.state import TrainSettings, TrainState
from lockstep.training.timer import StepTimer


def model_and_data(cfg: DictConfig, world: World, strategy: Strategy) -> tuple[BatchLoader, BatchLoader]:
    """Hand the model to the strategy, and return the loaders of training and test data.

    Nothing here keeps the model: a strategy may hold only a part of it on this rank.
    """
    with world.local_rank_zero_first():
        instantiate(cfg.dataset.prepare)
    trainer, data = cfg.trainer, cfg.dataset
    model = instantiate(cfg.model)
    memory_format = model_memory_format(model, trainer.channels_last)
    model = prepare_model(model, world, trainer.precision, memory_format, trainer.compile)
    if strategy.syncs_batch_norm(cfg.sync_bn.mode, world.size):
        model = convert_sync_batch_norm(model, world)
    strategy.validate_model(model, world.size)
    strategy.setup(model, world, instantiate(cfg.gradient_sync))

    converter = Converter(world.device, model_dtype(trainer.precision), memory_format, data.mean, data.std)
    shard = (strategy.data_parallel_rank(world), strategy.data_parallel_size(world.size))
    train_data, test_data = instantiate(data.train), instantiate(data.test)
    check_classes(train_data, data.classes)
    train_loader = BatchLoader(train_data, converter, *shard, cfg.seed, Augment(**data.augment), data.workers)
    return train_loader, BatchLoader(test_data, converter, *shard, cfg.seed, workers=data.workers)


def train_state(cfg: DictConfig, strategy: Strategy, samples: int) -> TrainState:
    """The run that trains the strategy's model on `samples` samples an epoch."""
    world, trainer, task = strategy.world, cfg.trainer, instantiate(cfg.task)
    settings = TrainSettings(
        epochs=trainer.epochs,
        max_steps=trainer.max_steps,
        batch_size=check_batch_size(cfg, strategy.data_parallel_size(world.size)),
        gradient_accumulation_steps=trainer.gradient_accumulation_steps,
        max_grad_norm=trainer.max_grad_norm,
        precision=trainer.precision,
        eval_batch_size=cfg.evaluation.batch_size,
        eval_every=cfg.evaluation.every,
        patience=cfg.evaluation.patience,
        log_every=cfg.logging.every,
    )
    optimizer = instantiate(cfg.optimizer)(strategy.module.parameters())
    initial = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    schedule = instantiate(cfg.scheduler)
    # By name, and only what the signature has: torch's own schedulers have no parameter for a run's length.
    length = {"steps_per_epoch": settings.steps_per_epoch(samples), "total_steps": settings.total_steps(samples)}
    return TrainState(
        settings=settings,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        initial_hyperparameters=initial,
        scheduler=schedule(optimizer, **matching_arguments(schedule, length)),
        scaler=grad_scaler(world, trainer.precision),
        meter=Meter(list(task.metrics), world),
        ema=None if trainer.ema is None else ExponentialMovingAverage(strategy.model, trainer.ema),
    )


def snapshots(cfg: DictConfig, state: TrainState, train_loader: BatchLoader) -> SnapshotManager:
    """The manager of this run's snapshots."""
    fingerprint = flatten(cfg.model, "model") | {
        "optimizer": cfg.optimizer._target_,
        "training samples": len(train_loader),
        "training data": data_fingerprint(train_loader.dataset),
        "seed": cfg.seed,
    }
    return SnapshotManager(
        state,
        state.strategy.world,
        cfg.run_dir,
        fingerprint,
        flat_config(cfg),
        epoch_samples=len(train_loader),
        every=cfg.snapshot.every,
        keep_last=cfg.snapshot.keep_last,
    )


def loggers(cfg: DictConfig, world: World) -> LoggerList:
    """The loggers on rank 0, none on other ranks."""
    nodes = cfg.get("logger", {}).values() if world.is_rank_zero else []  # logger=[] leaves no section
    return LoggerList([instantiate(node) for node in nodes])


def timer(cfg: DictConfig, state: TrainState, train_loader: BatchLoader, loggers: LoggerList) -> StepTimer:
    """The profiler with profiler.enabled=true, else a timer that does nothing."""
    if not cfg.profiler.enabled:
        return StepTimer()
    from lockstep.loggers.profiler import StepProfiler

    strategy, options = state.strategy, cfg.profiler
    return StepProfiler(
        device=strategy.world.device,
        rank=strategy.world.rank,
        parameters=list(strategy.model.parameters()),
        log_metrics=lambda metrics: loggers.log_metrics(metrics, state.progress.step),
        run_dir=cfg.run_dir,
        current_step=lambda: state.progress.step,
        whole_batches_per_epoch=len(train_loader) // state.settings.batch_size,
        every=options.every,
        trace_after=options.trace_after,
        trace_steps=options.trace_steps,
    )


def run_info(
    cfg: DictConfig,
    state: TrainState,
    train_loader: BatchLoader,
    eval_loader: BatchLoader,
    record: Mapping[str, str],
) -> RunInfo:
    """What loggers receive at the start."""
    world = state.strategy.world
    return RunInfo(
        run_dir=Path(cfg.run_dir),
        config_yaml=record.get("config.yaml", ""),
        world_size=world.size,
        data_parallel_size=train_loader.size,
        train_samples=len(train_loader),
        eval_samples=len(eval_loader),
        batch_size=state.settings.batch_size,
        epochs=state.settings.epochs,
        start_step=state.progress.step,
        start_epoch=state.progress.epoch,
    )


def flat_config(cfg: DictConfig) -> dict[str, Any]:
    """{key: value} of what all ranks must agree on: all but how they were launched."""
    return flatten({key: value for key, value in cfg.items() if key != "launch"})
