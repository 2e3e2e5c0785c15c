"""The contract of a mode: what a command does with its config. `src/train.py` starts ranks, and each calls `Mode.work`.

To add one: a subclass of `Mode` with `run` in a file of its own here, `conf/mode/<name>.yaml` with its `_target_`, and
its keys in `src/lockstep/config/options.py`. docs/modes.md tells what users see. No torch at the top: `main` imports
this.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep.config.targets import instantiate_as
from lockstep.distributed import signals
from lockstep.errors import ConfigError, exits_are_failures
from lockstep.failures import rank as monitor
from lockstep.runs.record import read_run

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.data.loader import BatchLoader
    from lockstep.distributed.world import World
    from lockstep.loggers.rank_logs import RankLogs
    from lockstep.strategies.base import JobSpec, Strategy
    from lockstep.training.state import TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """A trained run on this rank: the net with its weights, spread over the ranks as its strategy says.

    state: `state.strategy.model` is the net, `state.task` its task. `state.ema_weights()` is a block in which the net
    holds its averaged weights, if the run kept an average: what training evaluates and exports.
    train_loader, eval_loader: this rank's share of the data. snapshot: where the weights are from. saved: its contents.
    """

    state: "TrainState"
    train_loader: "BatchLoader"
    eval_loader: "BatchLoader"
    snapshot: Path
    saved: Mapping[str, Any]

    @property
    def world(self) -> "World":
        return self.state.strategy.world

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

    def loader(self, split: str) -> "BatchLoader":
        """split: "train" or "test"."""
        return self.train_loader if split == "train" else self.eval_loader


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

    snapshot: which weights: "last", "best", or a file.
    """

    name = ""  # of its option in conf/mode
    trains = False  # whether it is a training, which a sweep may repeat
    starts_ranks = False  # whether `work` is called once, in the process that was typed, and starts ranks itself
    snapshot = "last"

    @property
    def needs_run(self) -> bool:
        """Whether it starts from a trained run."""
        return not self.trains and not self.starts_ranks

    def validate(self, job: "JobSpec") -> None:
        """Raise ConfigError for what this mode cannot do. Called before any process starts."""

    def work(self, cfg: DictConfig, record: "ConfigRecord") -> Any:
        """What every rank does from start to end. Rank 0's value is what the command returns.

        Here: bring the trained net back, and `run`.
        """
        from lockstep import build, build_trained
        from lockstep.snapshots.resume import restore_trained, snapshots_to_try

        with join(cfg) as (world, strategy, logs):
            begin(cfg, record, world, logs)
            train_loader, eval_loader = build.model_and_data(cfg, world, strategy)
            state = build.train_state(cfg, strategy, len(train_loader))
            record = record.completed(cfg)
            paths = snapshots_to_try(cfg.resume, self.snapshot, self.name)
            saved, snapshot = restore_trained(state, paths, build.model_config(record))
            trained = TrainedRun(state, train_loader, eval_loader, snapshot, saved)
            build_trained.warn_of_changed_data(trained, record.shown)
            monitor.enter("mode")
            return self.run(trained)

    def run(self, trained: TrainedRun) -> Any:
        """Called in every rank. Rank 0's value is what the command returns."""
        raise NotImplementedError


@contextmanager
def join(cfg: DictConfig) -> Iterator[tuple["World", "Strategy", "RankLogs"]]:
    """Inside the block this rank has met the others. What fails there is reported, and signals are listened to."""
    from lockstep.distributed.world import init_distributed
    from lockstep.loggers.rank_logs import rank_logs
    from lockstep.strategies.base import Strategy
    from lockstep.training.setup import set_determinism

    signals.listen(cfg.run_dir)
    strategy = instantiate_as(Strategy, cfg.strategy, "strategy")
    with (
        rank_logs() as logs,
        exits_are_failures("this rank left before the end of the training"),
        monitor.failures(),
        init_distributed(**cfg.backend, bind_device=strategy.binds_one_device) as world,
    ):
        set_determinism(cfg.seed, cfg.trainer.deterministic)
        yield world, strategy, logs


def begin(cfg: DictConfig, record: "ConfigRecord", world: "World", logs: "RankLogs") -> None:
    """Open the log files, tell the monitor where they are, and check that all ranks have the same config."""
    from lockstep import build
    from lockstep.distributed.world import join_monitor

    logs.open(cfg.run_dir)
    if record.notice:
        log.warning("%s", record.notice)
    join_monitor(world, cfg.run_dir, cfg.watch.timeout, cfg.watch.on_hang)
    build.check_same_config(record, world)
