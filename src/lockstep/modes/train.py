"""mode=train, the default. Functions import torch, and what needs it, inside: `main` imports this without torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from lockstep.distributed import signals
from lockstep.failures import reporter
from lockstep.modes.base import Mode, begin, join

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord


class Train(Mode):
    """Trains, and evaluates on the way."""

    name, trains = "train", True

    def work(self, cfg: DictConfig, record: "ConfigRecord") -> float:
        """Returns `cfg.objective` of the weights that it chose."""
        from lockstep import build, build_loggers
        from lockstep.distributed.run_folder import hold_run_folder
        from lockstep.snapshots.resume import write_hydra_files
        from lockstep.training.loop import fit

        with join(cfg) as (world, strategy, logs), hold_run_folder(cfg.run_dir, world) as held:
            begin(cfg, record, world, logs)
            cfg, loaders = build.model_and_data(cfg, world, strategy)
            record = record.completed(cfg)
            state = build.train_state(cfg, strategy, loaders.train)
            weights = build.weight_check(cfg, state)
            with (
                build_loggers.loggers(cfg, state, held.restore) as loggers,
                build.snapshots(cfg, record, state, loaders, loggers, weights) as snapshots,
                reporter.failures(),  # of the training, before the files are closed, which takes time
            ):
                snapshots.resume(cfg.resume)
                if not state.finished:
                    write_hydra_files(world, cfg.run_dir, record.hydra_files, state.progress.step)
                info = build_loggers.run_info(record, snapshots, loaders)
                tested = build_loggers.earlier_test(info, world)
                loggers.on_fit_start(info)
                evaluations = build.evaluators(cfg, state, loaders, loggers)
                running, timer = build.running_metrics(cfg, state, loggers)
                watchers = [running, weights, snapshots]
                with signals.stop_after_saving():
                    run_dir = Path(cfg.run_dir)
                    return fit(state, loaders.train, evaluations, snapshots, loggers, watchers, timer, run_dir, tested)
