"""The contract of a mode: what a command does with its config. `src/train.py` starts ranks, and each calls `Mode.work`.

To add one: a subclass of `Mode` with `run` in a file of its own here, `conf/mode/<name>.yaml` with its `_target_` and
keys. docs/modes.md tells what users see. No torch at the top: `main` imports this.
"""

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.distributed import signals
from lockstep.errors import ConfigError, exits_are_failures
from lockstep.failures import reporter
from lockstep.files import Contents, write_whole
from lockstep.runs.record import read_run

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.data.loader import Loader
    from lockstep.distributed.world import World
    from lockstep.loggers.rank_logs import RankLogs
    from lockstep.preflight import Parts
    from lockstep.strategies.base import JobSpec
    from lockstep.training.run import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """A trained run on this rank: the net with its weights, spread over the ranks as its strategy says.

    run: `run.averaged_weights()` is a block in which the net holds its averaged weights, if the run kept an average:
    what training evaluates and exports. snapshot: where the weights are from. saved: its contents.
    config: {key: value} of this command, as files may have it.
    """

    run: "Run"
    snapshot: Path
    saved: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def world(self) -> "World":
        return self.run.world

    @property
    def folder(self) -> Path:
        """The run folder, where the snapshot is."""
        return folder_of(self.snapshot)

    @property
    def step(self) -> int:
        """Optimizer steps that the weights were trained."""
        return int(self.saved["progress"]["step"])

    @property
    def classes(self) -> list[str]:
        """The names of the classes in run.json, empty if the training data had none."""
        return recorded_classes(self.folder)

    def loader(self, split: str) -> "Loader":
        """split: "train", "val" or "test". Raises ConfigError for a validation set that there is none of."""
        found: Loader | None = getattr(self.run.loaders, split)
        if found is None:
            what = f"mode.split={split} needs a validation set, and this run was trained without one"
            raise ConfigError(f"{what}; type mode.split=test")
        return found


def recorded_classes(folder: Path) -> list[str]:
    """The names of the classes that the run in `folder` was trained on, empty if there are none."""
    with suppress(ConfigError):
        return [str(name) for name in read_run(folder).get("classes", ())]
    return []


def folder_of(snapshot: Path) -> Path:
    """The run folder that a snapshot is in."""
    parent = snapshot.parent
    return parent.parent if parent.name == "snapshots" else parent


class Mode:
    """What a command does. As a rule it uses a trained run: its config is that of the run which `resume` names, with
    what is typed on top. Such a mode has `run`, writes no snapshots and no curves, and its log and its failure reports
    go to <run folder>/<name of the mode>.

    snapshot: the weights to use: last, best, or a snapshot's file.
    """

    name = ""  # of its option in conf/mode
    trains = False  # whether it is a training, which a sweep may repeat
    reads_training_data = True  # whether it fails without; else the tests' may stand in for training data that is gone
    needs_labels = True  # whether each image that it reads must have one
    starts_ranks = False  # whether `work` is called once, in the process that was typed, and starts ranks itself
    snapshot = "last"

    @property
    def needs_run(self) -> bool:
        """Whether it starts from a trained run."""
        return not self.trains and not self.starts_ranks

    def validate(self, job: "JobSpec") -> None:
        """Raise ConfigError for what this mode cannot do. Called before any process starts."""

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> Any:
        """What every rank does from start to end. Rank 0's value is what the command returns.

        Here: bring the trained net back, and `run`.
        """
        from lockstep import build, build_state
        from lockstep.snapshots.find import restore_trained, snapshots_to_try

        with join(config, parts) as (world, logs):
            begin(config, record, world, logs)
            trained_run = build.build_run(config, world, parts)
            record = record.completed(trained_run.config)
            paths = snapshots_to_try(config.resume, self.snapshot, self.name)
            saved, snapshot = restore_trained(trained_run, paths, build_state.model_config(record))
            trained = TrainedRun(trained_run, snapshot, saved, record.shown)
            _require_same_classes(trained)
            _warn_of_changed_data(trained)
            reporter.enter("mode")
            return self.run(trained)

    def run(self, trained: TrainedRun) -> Any:
        """Called in every rank. Rank 0's value is what the command returns."""
        raise NotImplementedError


@contextmanager
def join(config: "RunConfig", parts: "Parts") -> Iterator[tuple["World", "RankLogs"]]:
    """Inside the block this rank has met the others. What fails there is reported, and signals are listened to."""
    from lockstep.distributed.world import join_world
    from lockstep.loggers.rank_logs import rank_logs
    from lockstep.training.setup import set_determinism

    signals.listen(config.run_dir)
    with (
        rank_logs() as logs,
        exits_are_failures("this rank left before the end of the training"),
        reporter.failures(),
        join_world(**vars(config.backend), bind_device=parts.strategy.binds_one_device) as world,
    ):
        set_determinism(config.seed, config.trainer.deterministic, config.trainer.tf32)
        yield world, logs


def begin(config: "RunConfig", record: "ConfigRecord", world: "World", logs: "RankLogs") -> None:
    """Open the log files, tell the monitor where they are, and check that all ranks have the same config."""
    from lockstep import build
    from lockstep.distributed.old_world import join_monitor

    logs.open(config.run_dir)
    join_monitor(world, config.run_dir, config.watch.timeout, config.watch.on_hang)
    build.check_same_config(record, world)


def _require_same_classes(trained: TrainedRun) -> None:
    """Raise ConfigError if a class number, or a token number of a text, has another name than in the training."""
    from lockstep.data.source import class_names, require_same_classes

    for loader in (trained.run.loaders.train, trained.run.loaders.test):
        names, advice = class_names(loader.reader.dataset), "type dataset=<data with the classes of the training>"
        require_same_classes(trained.classes, names, "the training", "this data", advice)


def _warn_of_changed_data(trained: TrainedRun) -> None:
    """Warn if the data has changed since the training, although the config names the same data."""
    from lockstep.snapshots.fingerprint import data_fingerprint

    before, now = trained.saved["config"], trained.config
    if any(before.get(key) != now.get(key) for key in before.keys() | now.keys() if key.startswith("dataset.")):
        return
    recorded: dict[str, Any] = {}
    with suppress(ConfigError):
        recorded = read_run(trained.folder)["data"]
    for name, loader in (("training data", trained.run.loaders.train), ("test data", trained.run.loaders.test)):
        fingerprint = data_fingerprint(loader.reader.dataset)
        then = recorded.get(name.replace(" ", "_"), fingerprint)
        if then != fingerprint:
            log.warning("the %s is not that of the training: it was %s, and is %s", name, then, fingerprint)


# The file that a mode writes, which `mode.file` names.


def require_place(file: str | None) -> None:
    """Raise ConfigError for a `file` in no folder, and for a folder or a device."""
    if file is not None and not Path(file).parent.is_dir():
        raise cannot_write(Path(file), FileNotFoundError(errno.ENOENT, file))
    if file is not None and Path(file).exists() and not Path(file).is_file():
        raise ConfigError(f"{file} is no file that can be replaced; type mode.file=<a file that you can write>")


def write_output(world: "World", path: Path, contents: Contents) -> None:
    """Rank 0 writes the file, whole or not at all. A collective. Raises ConfigError on all ranks if it cannot."""
    problem = None
    if world.is_rank_zero:
        try:
            write_whole(path, contents, shared=True)  # another command may write the same file
        except OSError as error:
            problem = str(cannot_write(path, error))
    if problem := world.broadcast_json(problem):
        raise ConfigError(problem)
    log.info("written to: %s", path)


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """The error for a file that cannot be written."""
    reason = os.strerror(error.errno or 0)
    return ConfigError(f"{path} cannot be written ({reason}); type mode.file=<a file that you can write>")
