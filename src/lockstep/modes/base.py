"""The contract of a mode: what a command does with its config. `src/train.py` starts ranks, and each calls `Mode.work`.

To add one: a subclass of `Mode` with `run` in a file of its own here, `conf/mode/<name>.yaml` with its `_target_` and
keys. docs/modes.md tells what users see.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed import get_backend

from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.loader import Loader
from lockstep.data.source import class_names, require_same_classes
from lockstep.distributed import signals
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.run_folder import folder_of_run, hold_run_folder, unwritable
from lockstep.distributed.world import World, join_world, require_same, watch
from lockstep.errors import KINDS, ConfigError, StoppedEarly, differing, exits_are_failures
from lockstep.failures.record import heartbeat, message_of
from lockstep.files import Contents, write_whole
from lockstep.launchers.base import Launcher
from lockstep.runs.record import read_run
from lockstep.snapshots.checkpointer import restore_trained
from lockstep.snapshots.files import snapshots_to_try
from lockstep.strategies.base import JobSpec, Strategy
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.training.run import Run
from lockstep.training.setup import set_determinism

log = logging.getLogger(__name__)

OTHER_FILE = "type mode.file=<a file that you can write>"


@dataclass(frozen=True)
class TrainedRun:
    """A trained run on this rank: the net with its weights, spread over the ranks as its strategy says.
    run: `run.averaged_weights()` is a block in which the net holds its averaged weights, if the run kept an average:
    what training evaluates and exports. snapshot: where the weights are from, after so many steps. classes: their
    names, empty if the training data had none. config: {key: value} of this command, as files may have it."""

    run: Run
    world: World
    folder: Path  # of the run
    snapshot: Path
    step: int
    classes: Sequence[str]
    config: Mapping[str, Any]

    def loader(self, split: str) -> Loader:
        """split: "train", "val" or "test". Raises ConfigError for a validation set that there is none of."""
        found: Loader | None = getattr(self.run.loaders, split)
        if found is None:
            what = f"mode.split={split} needs a validation set, and this run was trained without one"
            raise ConfigError(f"{what}; type mode.split=test")
        return found

    def output(self, file: str | None, name: str) -> Path:
        """Where a mode writes: `file`, as it was typed, else `name` in the run folder. Raises ConfigError."""
        path = self.folder / name if file is None else Path(file)
        if path.exists() and not path.is_file():  # such as a device, which a file would replace
            raise ConfigError(f"{path} is no file that can be replaced; {OTHER_FILE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, path: Path, contents: Contents) -> None:
        """Rank 0 writes the file, whole or not at all. A collective. Raises ConfigError on all ranks if it cannot."""
        with self.world.refusals_on_all(cannot=f"{path} cannot be written (REASON); {OTHER_FILE}"):
            if self.world.is_rank_zero:
                write_whole(path, contents, shared=True)  # another command may write the same file
        log.info("written to: %s", path)


def recorded(snapshot: Path) -> Mapping[str, Any]:
    """run.json of the run that a snapshot is of, empty if it is gone."""
    with suppress(ConfigError):
        return read_run(folder_of_run(str(snapshot)))
    return {}


class Mode:
    """What a command does. As a rule it uses a trained run: its config is that of the run which `resume` names, with
    what is typed on top. Such a mode has `run`, writes no snapshots and no curves, and its log and its failure reports
    go to <run folder>/<name of the mode>.
    snapshot: the weights to use: last, best, or a snapshot's file."""

    name = ""  # of its option in conf/mode
    trains = False  # whether it is a training, which a sweep may repeat
    reads_training_data = True  # whether it fails without; else the tests' may stand in for training data that is gone
    needs_labels = True  # whether each image that it reads must have one
    in_one_process = False  # whether several ranks are refused
    starts_ranks = False  # whether `work` is called once, in the process that was typed, and starts ranks itself
    needs_run = True  # whether it starts from a trained run, as no training does
    snapshot = "last"

    def validate(self, job: JobSpec) -> None:
        """Raise ConfigError for what this mode cannot do. Called before any process starts."""
        if self.in_one_process and job.world_size > 1:
            what = f"mode={self.name} is the work of one process, not of {job.world_size}"
            raise ConfigError(f"{what}; type launch=env")

    def work(self, config: RunConfig, record: ConfigRecord, parts: "Parts") -> Any:
        """What every rank does from start to end. Rank 0's value is what the command returns.
        Here: bring the trained net back, and `run`. Raises ConfigError if a class number, or a token number of a text,
        has another name than in the training. Warns if the data has changed although the config names the same data."""
        from lockstep import build

        with join(config, record, parts, holds=False) as world:
            run = build.build_run(config, world, parts)
            record = record.completed(run.config)
            paths = snapshots_to_try(config.resume, self.snapshot, self.name)
            saved, snapshot = restore_trained(run, paths, record.shown)
            folder, before = folder_of_run(str(config.resume)), recorded(snapshot)
            classes, data = before.get("classes", []), before.get("data", {})
            is_same = not any(key.startswith("dataset.") for key in differing(saved["config"], record.shown))
            for name, loader in (("training", run.loaders.train), ("test", run.loaders.test)):
                dataset, advice = loader.reader.dataset, "type dataset=<data with the classes of the training>"
                require_same_classes(classes, class_names(dataset), "the training", "this data", advice)
                found = build.data_fingerprint(dataset)
                then = data.get(f"{name}_data", found)
                if is_same and then != found:
                    log.warning("the %s data is not that of the training: it was %s, and is %s", name, then, found)
            heartbeat.enter("mode")
            step = saved["progress"]["step"]
            return self.run(TrainedRun(run, world, folder, snapshot, step, classes, record.shown))

    def run(self, trained: TrainedRun) -> Any:
        """Called in every rank. Rank 0's value is what the command returns."""
        raise NotImplementedError


@dataclass(frozen=True)
class Parts:
    """What a command is made of. Ranks get it as it is."""

    launcher: Launcher
    mode: Mode
    strategy: Strategy
    gradient_sync: GradientSync


class RankLogs:
    """Inside its block, this rank's log lines go to files once they are open; on rank 0 also to stdout. A line that
    cannot be written, on a full disk or to a reader that is gone, is lost without a word. An exception that ends the
    block is written to the rank's own log."""

    def __init__(self) -> None:
        self.rank = read_rank_info().rank
        self.console = logging.NullHandler() if self.rank else logging.StreamHandler(sys.stdout)

    def __enter__(self) -> Self:
        logging.raiseExceptions = False
        logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[self.console], force=True)
        return self

    def open(self, folder: str) -> None:
        """Log to folder/logs/rank<N>.log, and on rank 0 to folder/train.log, when this run holds the folder: one that
        is refused must not write there. Raises ConfigError if the folder is not writable."""
        names = [f"logs/rank{self.rank}.log", *["train.log"] * (self.rank == 0)]
        try:
            Path(folder, "logs").mkdir(parents=True, exist_ok=True)
            # A traceback may hold any characters.
            files = [logging.FileHandler(f"{folder}/{name}", "a", "utf-8", False, "replace") for name in names]
        except OSError as error:
            raise ConfigError(unwritable(folder, error)) from error
        for file in files:
            file.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
            logging.getLogger().addHandler(file)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StoppedEarly):
            log.info("%s", error)
        elif isinstance(error, Exception):
            heartbeat.fails(error)  # before the log has the traceback, which the report need not repeat
            self.console.setLevel(logging.CRITICAL + 1)  # the process that started the ranks prints it there
            log.error("%s", message_of(error), exc_info=None if isinstance(error, tuple(KINDS)) else error)


@contextmanager
def join(config: RunConfig, record: ConfigRecord, parts: Parts, holds: bool = True) -> Iterator[World]:
    """Inside the block this rank has met the others, all with the same config. What fails there is reported, signals
    are listened to, and logs are written. holds: whether no other run may write into the run folder."""
    signals.listen(config.run_dir)
    with (
        RankLogs() as logs,
        exits_are_failures("this rank left before the end of the training"),
        heartbeat.recording(),
        join_world(**vars(config.backend), bind_device=parts.strategy.binds_one_device) as world,
        hold_run_folder(config.run_dir, world) if holds else nullcontext(),
    ):
        set_determinism(config.seed, config.trainer.deterministic, config.trainer.tf32)
        logs.open(config.run_dir)
        threads, started_by = torch.get_num_threads(), read_rank_info().started_by
        said = f"{get_backend()} on {world.device}, {threads} thread{'s' * (threads > 1)}, started by {started_by}"
        log.info("rank %d of %d: %s", world.rank, world.size, said)
        watch(world, config.run_dir, config.watch.timeout, config.watch.on_hang)
        own = [{k: v for k, v in of.items() if not k.startswith("launch.")} for of in (record.flat, record.shown)]
        require_same(world, own[0], "type the same command on every node", own[1])
        yield world
