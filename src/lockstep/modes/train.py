"""mode=train, the default. Functions import torch, and what needs it, inside: `main` imports this without torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from lockstep.distributed import signals
from lockstep.failures import rank as monitor
from lockstep.modes.base import Mode, begin, join

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.data.loader import BatchLoader
    from lockstep.loggers.base import LoggerList
    from lockstep.snapshots.manager import SnapshotManager
    from lockstep.training.state import TrainState


class Train(Mode):
    """Trains, and evaluates on the way."""

    name, trains = "train", True

    def work(self, cfg: DictConfig, record: "ConfigRecord") -> float:
        """Returns the last value of `cfg.objective`."""
        from lockstep import build, build_loggers
        from lockstep.distributed.run_folder import hold_run_folder
        from lockstep.snapshots.resume import write_hydra_files

        with join(cfg) as (world, strategy, logs), hold_run_folder(cfg.run_dir, world) as held:
            begin(cfg, record, world, logs)
            train_loader, eval_loader = build.model_and_data(cfg, world, strategy)
            record = record.completed(cfg)
            state = build.train_state(cfg, strategy, len(train_loader))
            with (
                build_loggers.loggers(cfg, state, held.restore) as loggers,
                build.snapshots(cfg, record, state, train_loader, loggers) as snapshots,
                monitor.failures(),  # of the training, before the files are closed, which takes time
            ):
                snapshots.resume(cfg.resume)
                if not state.finished:
                    write_hydra_files(world, cfg.run_dir, record.hydra_files, state.progress.step)
                loggers.on_fit_start(build_loggers.run_info(record, snapshots, train_loader, eval_loader))
                with signals.stop_after_saving():
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
    from lockstep.training.meter import RunningMetrics

    objective, progress = cfg.objective.removeprefix("test/"), state.progress
    tested: dict[str, float] = {}
    running = RunningMetrics(state, loggers)
    evaluate = build.evaluator(cfg, state, eval_loader, loggers)
    trainer = build.epoch_trainer(cfg, state, train_loader, snapshots, loggers, running)
    while not state.finished:
        trained = trainer.train()
        metrics, epochs = {"train": trained.means} if trained.means else {}, state.settings.epochs
        if state.evaluation_due:
            tested = metrics["test"] = evaluate(snapshots.stop_before_evaluation)
            if state.update_best(tested[objective], state.task.mode(cfg.objective)):
                snapshots.save("best")
        best = {} if progress.best is None else {objective: progress.best}
        speed, counted = trained.samples_per_second, trained.counted_per_second
        step, best_step = progress.step, progress.best_step
        summary = EpochSummary(trained.epoch, epochs, step, metrics, speed, best, best_step, counted)
        loggers.on_epoch_end(summary)
        snapshots.after_epoch()
    tested = tested or evaluate.means(snapshots.stop)  # a finished run was started again: all is logged
    monitor.enter("export")
    snapshots.export()
    loggers.on_fit_end(Path(cfg.run_dir), tested)
    return tested[objective]
