"""The contract of a launcher: it runs one function in every rank.

Every launcher ends in RANK, WORLD_SIZE and LOCAL_RANK (or Slurm's or MPI's names for them) being set in each rank.
To add one: a class in a file of its own here, and `conf/launch/<name>.yaml` with its `_target_`.
"""

from collections.abc import Callable
from typing import Any

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError

Worker = Callable[..., Any]


class Launcher:
    """What `train.py` and `preflight` call, in this order: `prepare`, `validate`, `num_ranks`, `launch`."""

    starts_processes: bool = False
    """Whether `launch` starts the ranks as processes of this machine."""
    runs_elsewhere: bool = False
    """Whether the ranks run later, perhaps on machines that are unlike this one."""

    def prepare(self) -> None:
        """Begin what takes time and fails at nothing, such as imports. Called first."""

    def validate(self) -> None:
        """Raise ConfigError for whatever would make `launch` fail."""

    def num_ranks(self) -> tuple[int, int]:
        """(world size, ranks on this machine)."""
        raise NotImplementedError

    def launch(self, worker: Worker, *args: Any) -> Any:
        """Run `worker(*args)` in every rank. Returns rank 0's value, or None if rank 0 runs on another machine.

        Raises RankFailed for a rank that fails, StoppedEarly if a signal stopped the ranks, and a rank's ConfigError.
        """
        raise NotImplementedError


class RankFailed(Exception):
    """A rank that this process started has failed. `code` is its exit status; a negative one is minus a signal."""

    def __init__(self, rank: int, code: int, message: str) -> None:
        super().__init__(message)
        self.rank, self.code = rank, code


def refuse_nesting(name: str) -> None:
    """Raise ConfigError if another launcher has started this process as a rank already."""
    started_by = read_rank_info().started_by
    if started_by != "python":
        raise ConfigError(
            f"launch={name} inside {started_by} would start every rank several times; "
            f"type launch=env, or leave {started_by} out"
        )
