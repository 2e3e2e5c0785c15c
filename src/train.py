"""The entry point of Lockstep.

python src/train.py
torchrun --standalone --nproc_per_node=2 src/train.py backend=gloo trainer.epochs=10
python src/train.py -m launch=torchrun optimizer.lr=0.1,0.01

Functions import torch, and what needs it, inside: `--help` and `--cfg job` answer without torch.
"""

import os
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))  # the next import takes 30 ms
    from lockstep.distributed.signals import end_at_signals

    end_at_signals()  # before the other imports: Ctrl-C shows no traceback while they are loaded

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep import cli
from lockstep.cli_record import ConfigRecord, record_config
from lockstep.config.targets import check_arguments, instantiate, instantiate_as, names_own_code
from lockstep.distributed import signals
from lockstep.distributed.early_exit import exits_are_failures, exits_before_ranks_are_failures
from lockstep.failures import rank as monitor
from lockstep.launchers.base import Launcher
from lockstep.modes.base import Mode, TrainedRun
from lockstep.sweeps.job_process import wait_for_turn

if TYPE_CHECKING:
    from lockstep.distributed.world import World
    from lockstep.loggers.rank_logs import RankLogs
    from lockstep.strategies.base import Strategy

log = logging.getLogger(__name__)

COMPILER = "torch._inductor.config"  # torch.use_deterministic_algorithms imports it, which takes seconds


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Check the config, then train in every rank, or do what `mode` says. Returns the objective, for a sweeper."""
    with exits_before_ranks_are_failures():
        return run(cfg)


def run(cfg: DictConfig) -> Any:
    """As `main`, which a module of the user's may not end with sys.exit."""
    composed, cfg = cfg, cli.check_input(cfg)
    record = record_config(composed, cfg, HydraConfig.get())
    signals.set_run_folder(cfg.run_dir)
    check_arguments(cfg, ("launch", "mode"))
    launcher, mode = instantiate_as(Launcher, cfg.launch, "launch"), instantiate_as(Mode, cfg.mode, "mode")
    if mode.checks:
        from lockstep.check_run import check_run

        return check_run(cfg, launcher)
    if launcher.plans:
        from lockstep.dry_run import dry_run

        return dry_run(cfg, launcher, record.options)
    launcher.prepare([COMPILER] if cfg.trainer.deterministic else [])
    from lockstep.distributed.lazy_dynamo import postpone_dynamo  # imports torch, while the fork server does the same
    from lockstep.preflight import preflight

    postpone_dynamo()
    if names_own_code(cfg):  # code of the user's must not run beside another job of a sweep
        wait_for_turn()
    preflight(cfg, launcher)
    cli.collect_garbage()
    wait_for_turn()
    return launcher.launch(train_worker if mode.trains else mode_worker, cfg, record)


def train_worker(cfg: DictConfig, record: ConfigRecord) -> float:
    """What one rank does from start to end. Returns the last value of `cfg.objective`."""
    from lockstep import build, build_loggers
    from lockstep.distributed.lazy_dynamo import postpone_dynamo
    from lockstep.distributed.run_folder import hold_run_folder
    from lockstep.distributed.world import init_distributed
    from lockstep.loggers.rank_logs import rank_logs
    from lockstep.snapshots.resume import write_hydra_files
    from lockstep.training.loop import fit
    from lockstep.training.setup import set_determinism

    signals.listen(cfg.run_dir)
    postpone_dynamo()
    strategy: Strategy = instantiate(cfg.strategy)
    with (
        rank_logs() as logs,
        exits_are_failures(),
        monitor.failures(),  # of the meeting and the building
        init_distributed(**cfg.backend, bind_device=strategy.binds_one_device()) as world,
        hold_run_folder(cfg.run_dir, world) as held,
    ):
        begin_run(cfg, record, world, logs)
        set_determinism(cfg.seed, cfg.trainer.deterministic)
        train_loader, eval_loader = build.model_and_data(cfg, world, strategy)
        record = record.completed(cfg)
        state = build.train_state(cfg, strategy, train_loader)
        weights = build.weight_check(cfg, state)
        with (
            build_loggers.loggers(cfg, state, held.restore) as loggers,
            build.snapshots(cfg, record, state, train_loader, loggers, weights) as snapshots,
            monitor.failures(),  # of the training, before the files are closed, which takes time
        ):
            snapshots.resume(cfg.resume)
            if not state.finished:
                write_hydra_files(world, cfg.run_dir, record.files, state.progress.step)
            loggers.on_fit_start(build_loggers.run_info(record, snapshots, train_loader, eval_loader))
            evaluate = build.evaluator(cfg, state, eval_loader, loggers)
            running, timer = build.running_metrics(cfg, state, train_loader, loggers)
            watchers = [running, weights, snapshots]
            with signals.stop_after_saving():
                return fit(state, train_loader, evaluate, snapshots, loggers, watchers, timer, Path(cfg.run_dir))


def mode_worker(cfg: DictConfig, record: ConfigRecord) -> Any:
    """What one rank does in any mode but train: bring the trained net back, and hand it to the mode."""
    from lockstep import build, build_trained
    from lockstep.distributed.lazy_dynamo import postpone_dynamo
    from lockstep.distributed.world import init_distributed
    from lockstep.loggers.rank_logs import rank_logs
    from lockstep.snapshots.resume import restore_trained, snapshots_to_try
    from lockstep.training.setup import set_determinism

    signals.listen(cfg.run_dir)
    postpone_dynamo()
    mode, strategy = instantiate_as(Mode, cfg.mode, "mode"), instantiate(cfg.strategy)
    with (
        rank_logs() as logs,
        exits_are_failures(),
        monitor.failures(),
        init_distributed(**cfg.backend, bind_device=strategy.binds_one_device()) as world,
    ):
        begin_run(cfg, record, world, logs)
        set_determinism(cfg.seed, cfg.trainer.deterministic)
        train_loader, eval_loader = build.model_and_data(cfg, world, strategy)
        state = build.train_state(cfg, strategy, train_loader)
        paths = snapshots_to_try(cfg.resume, mode.snapshot, mode.name)
        saved, snapshot = restore_trained(state, paths, build.model_config(record.completed(cfg)))
        trained = TrainedRun(state, train_loader, eval_loader, snapshot, saved)
        build_trained.warn_of_changed_data(trained, record.completed(cfg).shown)
        monitor.enter("mode")
        return mode.run(trained)


def begin_run(cfg: DictConfig, record: ConfigRecord, world: "World", logs: "RankLogs") -> None:
    """Open the log files, tell the monitor where they are, and check that all ranks have the same config."""
    from lockstep import build
    from lockstep.distributed.world import join_monitor

    logs.open(cfg.run_dir)
    if record.notice:
        log.warning("%s", record.notice)
    join_monitor(world, cfg.run_dir, cfg.watch.timeout, cfg.watch.on_hang)
    build.check_same_config(record, world)


if __name__ == "__main__":
    cli.run_main(main)
