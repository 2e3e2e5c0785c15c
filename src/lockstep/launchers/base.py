"""The contract of a launcher: it runs one function in every rank.

Every launcher ends in RANK, WORLD_SIZE and LOCAL_RANK (or Slurm's or MPI's names for them) being set in each rank.
To add one: a class in a file of its own here, and `conf/launch/<name>.yaml` with its `_target_`.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError

Worker = Callable[..., Any]


class Launcher:
    """What `preflight` and `train.py` call, in this order: `validate`, `num_ranks`, `launch`.

    starts_processes: whether `launch` starts the ranks as processes of this machine. runs_elsewhere: whether the ranks
    run later, perhaps on machines that are unlike this one.
    """

    starts_processes = False
    runs_elsewhere = False

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


def refuse_nesting() -> None:
    """Raise ConfigError if another launcher has started this process as a rank already."""
    info = read_rank_info()
    if not info.may_start_ranks:
        what = f"a launcher inside {info.started_by} would start every rank several times"
        raise ConfigError(f"{what}; type launch=env, or leave {info.started_by} out")


def print_line(text: object, stream: TextIO) -> None:
    """Print a line at once. A stream whose reader has gone, as in `| head`, costs the line and not the run."""
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def flush_output() -> None:
    """Write out what stdout and stderr still hold."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, as by `| head`: a finished run has still finished
            stream.flush()
