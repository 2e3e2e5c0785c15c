"""The contract of a mode: what a command does with its config.

To add one: a subclass of `Mode` in a file of its own here, `conf/mode/<name>.yaml` with its `_target_`, and its keys in
`src/lockstep/config/options.py`. docs/modes.md tells what users see. No torch at the top: `main` imports this.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.runs.record import read_run

if TYPE_CHECKING:
    from lockstep.data.loader import BatchLoader
    from lockstep.distributed.world import World
    from lockstep.strategies.base import JobSpec
    from lockstep.training.state import TrainState


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
    """What a command does. Its config is that of the run which `resume` names, with what is typed on top.

    A mode writes no snapshots and no curves. Its log and its failure reports go to <run folder>/<name of the mode>.
    snapshot: which weights: "last", "best", or a file.
    """

    name = ""  # of its option in conf/mode
    trains = False  # whether `train_worker` does the work, and `run` is not called
    checks = False  # whether `lockstep.check_run` does the work, in ranks of its own
    snapshot = "last"

    def validate(self, job: "JobSpec") -> None:
        """Raise ConfigError for what this mode cannot do. Called before any process starts."""

    def run(self, trained: TrainedRun) -> Any:
        """Called in every rank. Rank 0's value is what the command returns."""
        raise NotImplementedError
