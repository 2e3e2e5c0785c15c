"""mode=train, the default."""

from contextlib import suppress
from pathlib import Path

from lockstep import build
from lockstep.config.record import RECORD, ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.distributed import signals
from lockstep.failures.record import heartbeat
from lockstep.modes.base import Mode, Parts, join
from lockstep.training.loop import fit


class Train(Mode):
    """Trains, and evaluates on the way."""

    name, trains, needs_run = "train", True, False

    def work(self, config: RunConfig, record: ConfigRecord, parts: Parts) -> float | None:
        """Returns the objective of the weights that it chose, None if nothing is chosen."""
        with join(config, record, parts) as world:
            run = build.build_run(config, world, parts)
            record = record.completed(run.config)
            with (
                build.loggers(run) as loggers,
                build.snapshots(record, run) as snapshots,
                heartbeat.recording(),  # of the training, before the files are closed, which takes time
            ):
                snapshots.resume(config.resume)
                folder = Path(config.run_dir, RECORD)
                with suppress(OSError):  # a full disk costs these files, not the training
                    for name, text in record.files.items() if world.is_rank_zero and not run.finished else ():
                        folder.mkdir(exist_ok=True)
                        (folder / name).write_text(text)
                info = build.run_info(record, snapshots)
                loggers.start(info)
                with signals.stop_after_saving():
                    return fit(run, *build.evaluators(run, loggers), snapshots, loggers, info)
