"""The contract of a launcher: it runs one function in every rank.

Every launcher ends in RANK, WORLD_SIZE and LOCAL_RANK (or Slurm's or MPI's names for them) being set in each rank.
To add one: a class in a file of its own here, and `conf/launch/<name>.yaml` with its `_target_`.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import EXIT_FAILED, ConfigError
from lockstep.failures.report import RAISED_BY_ALL

Worker = Callable[..., Any]


class Launcher:
    """What `train.py` and `preflight` call, in this order: `prepare`, `validate`, `num_ranks`, `launch`."""

    starts_processes: bool = False
    """Whether `launch` starts the ranks as processes of this machine."""
    runs_elsewhere: bool = False
    """Whether the ranks run later, perhaps on machines that are unlike this one."""
    plans: bool = False
    """Whether `launch` trains nothing, and shows what the job would do."""

    def prepare(self, rank_imports: str) -> None:
        """Begin what takes time, such as imports. Called first. Raises ConfigError if it cannot begin.

        rank_imports: the module that imports what ranks need, see `lockstep.rank_imports`.
        """

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
    """A rank has failed: one that this process started, or the process itself where something else started it.

    The message is the failure report as one screen, empty if the monitor prints it. contents: what failure.json holds
    (see docs/failures.md), as far as this process knows it.
    """

    def __init__(self, screen: str, contents: dict[str, Any]) -> None:
        super().__init__(screen)
        self.contents = contents

    @property
    def headline(self) -> str:
        """The first line of the report."""
        return str(self).partition("\n")[0]

    @property
    def code(self) -> int:
        """The exit code for the whole command, see `lockstep.errors`."""
        return int(self.contents.get("exit_code", EXIT_FAILED))

    @property
    def is_raised_by_all(self) -> bool:
        """Whether all ranks have raised it alike. It is not restarted: the message says what the user has to decide."""
        return self.contents.get("first", {}).get("kind") in RAISED_BY_ALL

    @property
    def will_fail_again(self) -> bool:
        """Whether the attempt before ended with the same failure at the same step."""
        return bool(self.contents.get("will_fail_again"))


def refuse_nesting(name: str) -> None:
    """Raise ConfigError if another launcher has started this process as a rank already."""
    info = read_rank_info()
    if not info.may_start_ranks:
        raise ConfigError(
            f"launch={name} inside {info.started_by} would start every rank several times; "
            f"type launch=env, or leave {info.started_by} out"
        )


def print_line(text: object, stream: TextIO) -> None:
    """Print a line at once. A stream whose reader has gone, as in `| head`, costs the line and not the run."""
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def flush_output() -> None:
    """Write out what stdout and stderr still hold."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, as by `| head`: a finished run has still finished
            stream.flush()
