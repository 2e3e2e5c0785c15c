"""The entry point of Lockstep.

python src/train.py
torchrun --standalone --nproc_per_node=2 src/train.py backend=gloo trainer.epochs=10
python src/train.py -m launch=torchrun optimizer.lr=0.1,0.01

Functions import torch, and what needs it, inside: `--help` and `--cfg job` answer without torch.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep import cli
from lockstep.config.check import check_config
from lockstep.config.instantiate import hydra_record, instantiate

if TYPE_CHECKING:
    from lockstep.data.loader import BatchLoader
    from lockstep.distributed.world import World
    from lockstep.launchers.base import Launcher
    from lockstep.loggers.base import LoggerList, RunInfo
    from lockstep.snapshots.manager import SnapshotManager
    from lockstep.strategies.base import Strategy
    from lockstep.training.state import TrainState
    from lockstep.training.timer import StepTimer

log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Check the config, then train in every rank. Returns the objective, for a sweeper."""
    record = hydra_record(cfg, HydraConfig.get())
    cfg = cli.resolve(cfg)
    check_config(cfg)
    launcher: Launcher = instantiate(cfg.launch)
    launcher.prepare()
    from lockstep.preflight import preflight  # imports torch, while the launcher's helper does the same

    preflight(cfg, launcher)
    cli.collect_garbage()
    return launcher.launch(train_worker, cfg, record)


def train_worker(cfg: DictConfig, record: Mapping[str, str]) -> float:
    """What one rank does from start to end. Returns the last value of `cfg.objective`.

    record: the files that rank 0 writes to the run folder's `.hydra`, {name: text}.
    """
    from lockstep.distributed import signals
    from lockstep.distributed.environment import read_rank_info
    from lockstep.distributed.lazy_dynamo import postpone_dynamo
    from lockstep.distributed.run_folder_lock import hold_run_folder
    from lockstep.distributed.world import init_distributed
    from lockstep.loggers.rank_logs import rank_logs
    from lockstep.snapshots.record import write_record
    from lockstep.training.setup import set_determinism

    signals.listen()
    postpone_dynamo()
    strategy: Strategy = instantiate(cfg.strategy)
    with (
        rank_logs(cfg.run_dir, read_rank_info().rank),
        init_distributed(**cfg.backend, bind_device=strategy.binds_one_device) as world,
        hold_run_folder(cfg.run_dir, world),
    ):
        world.require_same_config(flat_config(cfg), hint="start every rank with the same command")
        set_determinism(cfg.seed, cfg.trainer.deterministic)
        train_loader, eval_loader = build_model_and_data(cfg, world, strategy)
        state = build_train_state(cfg, strategy, len(train_loader))
        with build_snapshots(cfg, state, train_loader) as snapshots, closing(build_loggers(cfg, world)) as loggers:
            snapshots.resume(cfg.resume)
            if not state.finished:
                write_record(world, cfg.run_dir, record, state.progress.step)
            loggers.on_fit_start(run_info(cfg, state, train_loader, eval_loader, record))
            return fit(cfg, state, train_loader, eval_loader, snapshots, loggers)


def fit(
    cfg: DictConfig,
    state: "TrainState",
    train_loader: "BatchLoader",
    eval_loader: "BatchLoader",
    snapshots: "SnapshotManager",
    loggers: "LoggerList",
) -> float:
    """Train epoch by epoch, evaluate, save. Returns the last value of `cfg.objective`."""
    from lockstep.loggers.base import EpochSummary
    from lockstep.training.loop import evaluate, train_epoch
    from lockstep.training.running_metrics import RunningMetrics

    objective, progress = cfg.objective.removeprefix("test/"), state.progress
    tested: dict[str, float] = {}
    running = RunningMetrics(state, loggers, snapshots.newest)
    timer = build_timer(cfg, state, train_loader, loggers)
    snapshots.before_save = loggers.flush  # the curves of a killed run reach as far as its snapshots
    while not state.finished:
        epoch, start = progress.epoch + 1, time.perf_counter()
        loggers.on_epoch_start(epoch, state.settings.epochs, len(train_loader), progress.samples)
        samples = train_epoch(state, train_loader, timer, [running.after_step, snapshots.after_step])
        metrics = {"train": running.finite("loss", state.meter.means())}
        samples_per_second = samples / (time.perf_counter() - start)
        loggers.log_metrics(state.strategy.epoch_metrics(), progress.step)
        if state.evaluation_due:
            tested = metrics["test"] = running.finite("test loss", evaluate(state, eval_loader))
            if state.update_best(tested[objective], state.task.mode(cfg.objective)):
                snapshots.save("best")
        loggers.on_epoch_end(EpochSummary(epoch, state.settings.epochs, progress.step, metrics, samples_per_second))
        snapshots.after_epoch()
    tested = tested or evaluate(state, eval_loader)  # a finished run was started again
    snapshots.export()
    loggers.on_fit_end(Path(cfg.run_dir), tested)
    return tested[objective]


def build_model_and_data(cfg: DictConfig, world: "World", strategy: "Strategy") -> tuple["BatchLoader", "BatchLoader"]:
    """Hand the model to the strategy, and return the loaders of training and test data.

    Nothing here keeps the model: a strategy may hold only a part of it on this rank.
    """
    from lockstep.data.augment import Augment
    from lockstep.data.in_memory import check_classes
    from lockstep.data.loader import BatchLoader, Converter
    from lockstep.distributed.sync_batch_norm import convert_sync_batch_norm
    from lockstep.training.setup import model_dtype, model_memory_format, prepare_model

    with world.local_rank_zero_first():
        instantiate(cfg.dataset.prepare)
    trainer, data = cfg.trainer, cfg.dataset
    model = instantiate(cfg.model)
    memory_format = model_memory_format(model, trainer.channels_last)
    model = prepare_model(model, world, trainer.precision, memory_format, trainer.compile)
    if strategy.syncs_batch_norm(cfg.sync_bn.mode, world.size):
        model = convert_sync_batch_norm(model, world)
    strategy.setup(model, world, instantiate(cfg.gradient_sync))

    converter = Converter(world.device, model_dtype(trainer.precision), memory_format, data.mean, data.std)
    shard = (strategy.data_parallel_rank(world), strategy.data_parallel_size(world.size))
    train_data, test_data = instantiate(data.train), instantiate(data.test)
    check_classes(train_data, data.classes)
    train_loader = BatchLoader(train_data, converter, *shard, cfg.seed, Augment(**data.augment), data.workers)
    return train_loader, BatchLoader(test_data, converter, *shard, cfg.seed, workers=data.workers)


def build_train_state(cfg: DictConfig, strategy: "Strategy", samples: int) -> "TrainState":
    """The run that trains the strategy's model on `samples` samples an epoch."""
    from lockstep.preflight import check_batch_size
    from lockstep.training.ema import ExponentialMovingAverage
    from lockstep.training.meter import Meter
    from lockstep.training.setup import grad_scaler
    from lockstep.training.state import TrainSettings, TrainState

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
    return TrainState(
        settings=settings,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        initial_hyperparameters=initial,
        scheduler=schedule(optimizer, settings.steps_per_epoch(samples), settings.total_steps(samples)),
        scaler=grad_scaler(world, trainer.precision),
        meter=Meter(list(task.metrics), world),
        ema=None if trainer.ema is None else ExponentialMovingAverage(strategy.model, trainer.ema),
    )


def build_snapshots(cfg: DictConfig, state: "TrainState", train_loader: "BatchLoader") -> "SnapshotManager":
    """The manager of this run's snapshots."""
    from lockstep.snapshots.fingerprint import data_fingerprint
    from lockstep.snapshots.manager import SnapshotManager

    fingerprint = cli.flatten(cfg.model, "model") | {
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


def build_loggers(cfg: DictConfig, world: "World") -> "LoggerList":
    """The loggers on rank 0, none on other ranks."""
    from lockstep.loggers.base import LoggerList

    nodes = cfg.logger.values() if world.is_rank_zero else []
    return LoggerList([instantiate(node) for node in nodes])


def build_timer(
    cfg: DictConfig, state: "TrainState", train_loader: "BatchLoader", loggers: "LoggerList"
) -> "StepTimer":
    """The profiler with profiler.enabled=true, else a timer that does nothing."""
    from lockstep.training.timer import StepTimer

    if not cfg.profiler.enabled:
        return StepTimer()
    from lockstep.loggers.profiler import StepProfiler

    strategy, options = state.strategy, cfg.profiler
    return StepProfiler(
        strategy.world.device,
        strategy.world.rank,
        [parameter for parameter in strategy.model.parameters() if parameter.requires_grad],
        lambda metrics: loggers.log_metrics(metrics, state.progress.step),
        cfg.run_dir,
        lambda: state.progress.step,
        len(train_loader) // state.settings.batch_size,
        options.every,
        options.trace_after,
        options.trace_steps,
    )


def run_info(
    cfg: DictConfig,
    state: "TrainState",
    train_loader: "BatchLoader",
    eval_loader: "BatchLoader",
    record: Mapping[str, str],
) -> "RunInfo":
    """What loggers are told at the start."""
    from lockstep.loggers.base import RunInfo

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
    return cli.flatten({key: value for key, value in cfg.items() if key != "launch"})


if __name__ == "__main__":
    cli.run_main(main)
