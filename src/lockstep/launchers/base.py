"""The contract of a launcher, which runs one function in every rank, and launch=env.

Every launcher ends in RANK, WORLD_SIZE and LOCAL_RANK (or Slurm's or MPI's names for them) being set in each rank.
To add one: a class in a file of its own here, and `conf/launch/<name>.yaml` with its `_target_`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.distributed import signals
from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError, RankFailed
from lockstep.failures.record import heartbeat
from lockstep.failures.report import leave, screen, tell

Worker = Callable[..., Any]
ECHO_DELAY = 60  # seconds added to the time that torchrun reads, so that it names another rank as the first


class Launcher:
    """What `preflight` and `train.py` call, in this order: `validate`, `num_ranks`, `launch`. starts_processes: whether
    `launch` starts the ranks as processes of this machine. runs_elsewhere: whether the ranks run later, perhaps on
    machines that are unlike this one."""

    starts_processes = False
    runs_elsewhere = False

    def validate(self) -> None:
        """Raise ConfigError for whatever would make `launch` fail."""

    def num_ranks(self) -> tuple[int, int]:
        """(world size, ranks on this machine)."""
        raise NotImplementedError

    def launch(self, worker: Worker, *args: Any) -> Any:
        """Run `worker(*args)` in every rank. Returns rank 0's value, or None if rank 0 runs on another machine. Raises
        RankFailed for a rank that fails, StoppedEarly if a signal stopped the ranks, and a rank's ConfigError."""
        raise NotImplementedError


def refuse_nesting() -> None:
    """Raise ConfigError if another launcher has started this process as a rank already."""
    info = read_rank_info()
    if not info.may_start_ranks:
        what = f"a launcher inside {info.started_by} would start every rank several times"
        raise ConfigError(f"{what}; type launch=env, or leave {info.started_by} out")


def flush_output() -> None:
    """Write out what stdout and stderr still hold."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, as by `| head`: a finished run has still finished
            stream.flush()


class EnvLauncher(Launcher):
    """This process is a rank that torchrun, srun or mpirun has started, or the only one: the worker is just called."""

    def num_ranks(self) -> tuple[int, int]:
        info = read_rank_info()
        return info.world_size, info.local_world_size

    def launch(self, worker: Worker, *args: Any) -> Any:
        info = read_rank_info()
        heartbeat.begin(info.rank, info.world_size, info.started_by)
        try:
            return worker(*args)
        except (Exception, KeyboardInterrupt) as error:
            heartbeat.fails(error)
            # A sentence needs no report; a rank that has not met the others is the only one to know.
            if isinstance(error, ConfigError | KeyboardInterrupt) or heartbeat.record["run_dir"] is None:
                raise
            report, prints = tell(heartbeat.folder, heartbeat.record)
            shown = screen(report)
            with suppress(OSError, KeyError):  # of the ranks' errors torchrun names the earliest, by whole seconds
                told_at = int(time.time()) + ECHO_DELAY * (report["first"]["rank"] != info.rank)
                message = shown.partition("\n")[0].removeprefix("lockstep: ")
                file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
                file.write_text(json.dumps({"message": message, "timestamp": str(told_at)}))
            raise RankFailed(shown if prints else "", report) from error
        finally:
            signals.each_second(None)
            leave()
            heartbeat.begin()
