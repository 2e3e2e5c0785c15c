"""mode=train, the default. Functions import torch, and what needs it, inside: `main` imports this without torch."""

from typing import TYPE_CHECKING

from lockstep.distributed import signals
from lockstep.failures.record import heartbeat
from lockstep.modes.base import Mode, join

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.preflight import Parts


class Train(Mode):
    """Trains, and evaluates on the way."""

    name, trains = "train", True

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> float | None:
        """Returns the objective of the weights that it chose, None if nothing is chosen."""
        from lockstep import build
        from lockstep.snapshots.checkpointer import write_hydra_files
        from lockstep.training.loop import fit

        with join(config, record, parts) as world:
            run = build.build_run(config, world, parts)
            record = record.completed(run.config)
            with (
                build.loggers(run) as loggers,
                build.snapshots(record, run) as snapshots,
                heartbeat.recording(),  # of the training, before the files are closed, which takes time
            ):
                snapshots.resume(config.resume)
                if not run.finished:
                    write_hydra_files(world, config.run_dir, record.files)
                info = build.run_info(record, snapshots)
                tested = build.earlier_test(info)
                loggers.start(info)
                with signals.stop_after_saving():
                    return fit(run, *build.evaluators(run, loggers), snapshots, loggers, info, tested)
