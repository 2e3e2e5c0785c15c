"""The entry point of Lockstep.

python src/train.py
torchrun --standalone --nproc_per_node=2 src/train.py backend=gloo trainer.epochs=10
python src/train.py -m launch=torchrun optimizer.lr=0.1,0.01

Functions import torch, and what needs it, inside: `--help` and `--cfg job` answer without torch.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep import cli
from lockstep.config.arguments import check_arguments
from lockstep.config.check import check_config
from lockstep.config.instantiate import hydra_record, instantiate

if TYPE_CHECKING:
    from lockstep.data.loader import BatchLoader
    from lockstep.launchers.base import Launcher
    from lockstep.loggers.base import LoggerList
    from lockstep.snapshots.manager import SnapshotManager
    from lockstep.strategies.base import Strategy
    from lockstep.training.state import TrainState


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Check the config, then train in every rank. Returns the objective, for a sweeper."""
    record = hydra_record(cfg, HydraConfig.get())
    cfg = cli.resolve(cfg)
    check_config(cfg)
    check_arguments(cfg, ("launch",))
    launcher: Launcher = instantiate(cfg.launch)
    launcher.prepare()
    from lockstep.preflight import preflight  # imports torch, while the fork server does the same

    preflight(cfg, launcher)
    cli.collect_garbage()
    return launcher.launch(train_worker, cfg, record)


def train_worker(cfg: DictConfig, record: Mapping[str, str]) -> float:
    """What one rank does from start to end. Returns the last value of `cfg.objective`.

    record: the files that rank 0 writes to the run folder's `.hydra`, {name: text}.
    """
    from lockstep import build
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
        world.require_same_config(build.flat_config(cfg), hint="type the same command on every node")
        set_determinism(cfg.seed, cfg.trainer.deterministic)
        train_loader, eval_loader = build.model_and_data(cfg, world, strategy)
        state = build.train_state(cfg, strategy, len(train_loader))
        with build.snapshots(cfg, state, train_loader) as snapshots, closing(build.loggers(cfg, world)) as loggers:
            snapshots.resume(cfg.resume)
            if not state.finished:
                write_record(world, cfg.run_dir, record, state.progress.step)
            loggers.on_fit_start(build.run_info(cfg, state, train_loader, eval_loader, record))
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
    from lockstep import build
    from lockstep.loggers.base import EpochSummary
    from lockstep.training.loop import evaluate, train_epoch
    from lockstep.training.running_metrics import RunningMetrics

    objective, progress = cfg.objective.removeprefix("test/"), state.progress
    tested: dict[str, float] = {}
    running = RunningMetrics(state, loggers, snapshots.newest)
    timer = build.timer(cfg, state, train_loader, loggers)
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


if __name__ == "__main__":
    cli.run_main(main)
