"""Rank processes on this machine: how many, what they preload, how they start and end, and what their failures mean.

`spawn` is a fresh interpreter that imports everything itself. `fork` is a copy of this process, and `forkserver` a copy
of a helper process without threads or CUDA; such copies share one import of torch.
"""

import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TextIO

from lockstep.distributed import signals
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.host import LAUNCHER, cpu_count, end_with_parent
from lockstep.errors import EXIT_FAILED, EXIT_FINISHED, CannotStartNow, ConfigError, RankMissing, StoppedEarly
from lockstep.failures import rank as monitor
from lockstep.launchers.base import RankFailed, Worker

START_METHODS = ("spawn", "fork", "forkserver")


def resolve_nproc(nproc_per_node: int | str) -> int:
    """The number of ranks on this machine, by torchrun's rules.

    cpu: one per core. gpu: one per GPU. auto: one per GPU if there are any, else one per core. Raises ConfigError.
    """
    if nproc_per_node == "cpu":
        return cpu_count()
    if nproc_per_node in ("gpu", "auto"):
        import torch

        gpus = torch.cuda.device_count()
        if nproc_per_node == "gpu" and not gpus:
            raise ConfigError(
                "launch.nproc_per_node=gpu needs a GPU and this machine shows none; type launch.nproc_per_node=cpu"
            )
        return gpus or cpu_count()
    try:
        count = int(nproc_per_node)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(
            f"launch.nproc_per_node={nproc_per_node} is not a number of ranks; "
            f"type launch.nproc_per_node=2, or auto, gpu or cpu"
        )
    return count


def validate_start_method(start_method: str) -> None:
    """Raise ConfigError for a start method that Python does not have."""
    if start_method not in START_METHODS:
        raise ConfigError(
            f"launch.start_method={start_method} is none of Python's; "
            f"type launch.start_method=spawn, fork or forkserver"
        )


def preload(start_method: str, rank_imports: str) -> None:
    """Import the module `rank_imports` where ranks are forked from, in a fork server in the background."""
    if start_method != "fork":
        # Otherwise the start of the first process starts it, and that unblocks the signals of `signals.blocked`.
        multiprocessing.resource_tracker.ensure_running()
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload([rank_imports])
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            with signals.blocked():  # it must not end at Ctrl-C or with the terminal: it reads how the ranks end
                multiprocessing.forkserver.ensure_running()
        except OSError as error:  # the system's limit for the path of a Unix socket is about 100 characters
            folder = os.environ.get("TMPDIR", "/tmp")  # tempfile has no answer if no folder can be used
            raise ConfigError(
                f"the helper process of the ranks cannot listen in {folder} ({error}); "
                f"type TMPDIR=/tmp before the command, or launch.start_method=spawn"
            ) from None
        finally:
            del os.environ[LAUNCHER]
    elif start_method == "fork":
        importlib.import_module(rank_imports)


def start_method_here(start_method: str, forks_again: bool, rank_imports: str) -> str:
    """`fork` in place of `forkserver` in a job of a sweep, which is a copy of a process that has imported everything.

    A fork server of its own would import torch again, for 2 s. forks_again: ranks may be started a second time, when
    this process has threads, so that it cannot fork safely.
    """
    return "fork" if start_method == "forkserver" and rank_imports in sys.modules and not forks_again else start_method


def run_rank(worker: Worker, args: tuple[Any, ...], results: Connection | None) -> NoReturn:
    """What a rank process runs: `worker(*args)`, then an exit that skips the interpreter's teardown.

    results: takes the worker's value. How the rank ends goes to the monitor, whose report the launcher shows.
    gloo's threads sometimes abort the teardown, and a finished run would count as failed.
    """
    gc.freeze()  # a collection writes to every object, and memory shared with the parent is copied when written to
    signals.leave_last_line_to_launcher()
    end_with_parent()
    connect_monitor()
    run_to_exit(worker, args, results)


def connect_monitor() -> None:
    """Connect this rank to the monitor that its launcher has started."""
    info = read_rank_info()
    monitor.connect(os.environ[monitor.ADDRESS], info.rank, info.world_size, local_rank=info.local_rank)


def run_to_exit(worker: Worker, args: tuple[Any, ...], results: Connection | None) -> NoReturn:
    """Run `worker(*args)`, tell the monitor how it ended, and exit. results: takes the worker's value."""
    try:
        value = worker(*args)
        if results is not None:
            results.send(value)
        monitor.ended("finished")
        code = EXIT_FINISHED
    except StoppedEarly as stopped:
        monitor.ended("stopped")
        code = stopped.code
    except BaseException as error:  # SystemExit, too: leaving before the end is a failure
        monitor.failed(error)
        code = EXIT_FAILED
    flush_output()
    os._exit(code)


def failure_of(report: dict[str, Any]) -> Exception:
    """The exception that a launcher raises for a failure report (see MonitorLink.report). A ConfigError stays one."""
    first = report["contents"]["first"]
    if first["kind"] == "config":
        can_start_later = first.get("type") in (CannotStartNow.__name__, RankMissing.__name__)
        return (CannotStartNow if can_start_later else ConfigError)(first["message"])
    return RankFailed(report["screen"], report["contents"])


def print_line(text: object, stream: TextIO) -> None:
    """Print a line at once. A stream whose reader has gone, as in `| head`, costs the line and not the run."""
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def flush_output() -> None:
    """Write out what stdout and stderr still hold."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, as by `| head`: a finished run has still finished
            stream.flush()
