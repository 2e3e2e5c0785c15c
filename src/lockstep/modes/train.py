"""mode=train, the default. Functions import torch, and what needs it, inside: `main` imports this without torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed import signals
from lockstep.failures import reporter
from lockstep.modes.base import Mode, begin, join

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.preflight import Parts


class Train(Mode):
    """Trains, and evaluates on the way."""

    name, trains = "train", True

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> float | None:
        """Returns the objective of the weights that it chose, None if nothing is chosen."""
        from lockstep import build, build_state
        from lockstep.distributed.run_folder import hold_run_folder
        from lockstep.snapshots.resume import write_hydra_files
        from lockstep.training.loop import fit
        from lockstep.training.weight_check import WeightCheck

        with join(config, parts) as (world, logs), hold_run_folder(config.run_dir, world) as held:
            begin(config, record, world, logs)
            config, loaders = build.model_and_data(config, world, parts)
            record = record.completed(config)
            state = build_state.train_state(config, parts.strategy, loaders)
            weights = WeightCheck(state, config.watch.every, config.watch.weights)
            with (
                build_state.loggers(config, state, held.restore) as loggers,
                build_state.snapshots(config, record, state, loaders, loggers, weights) as snapshots,
                reporter.failures(),  # of the training, before the files are closed, which takes time
            ):
                snapshots.resume(config.resume)
                if not state.finished:
                    write_hydra_files(world, config.run_dir, record.files, state.progress.step)
                info = build_state.run_info(config, record, snapshots, loaders)
                tested = build_state.earlier_test(info, world)
                loggers.on_fit_start(info)
                evaluations = build_state.evaluators(config, state, loaders, loggers)
                running, timer = build_state.running_metrics(config, state, loggers)
                watchers = [running, weights, snapshots]
                with signals.stop_after_saving():
                    run_dir = Path(config.run_dir)
                    return fit(state, loaders.train, evaluations, snapshots, loggers, watchers, timer, run_dir, tested)
