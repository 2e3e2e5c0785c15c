"""Rank processes on this machine: how many, what they preload, how they start and end, and what their failures mean.

`spawn` is a fresh interpreter that imports everything itself. `fork` is a copy of this process, and `forkserver` a copy
of a helper process without threads or CUDA; such copies share one import of torch.
"""

import atexit
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import re
import sys
from contextlib import suppress
from typing import Any

from lockstep.distributed.host import cpu_count, end_with_parent
from lockstep.errors import EXIT_FINISHED, EXIT_RESUMABLE, ConfigError, StoppedEarly, TrainingDiverged
from lockstep.launchers.base import RankFailed, Worker

START_METHODS = ("spawn", "fork", "forkserver")

# What a rank imports in any case. It is imported once, before ranks are forked.
PRELOADED_MODULES = [
    "torch.utils.tensorboard",
    "tqdm",
    "hydra.utils",
    "lockstep.build",
    "lockstep.strategies.ddp",
    "lockstep.training.loop",
    "lockstep.training.running_metrics",
    "lockstep.snapshots.record",
    "lockstep.loggers.rank_logs",
    "lockstep.loggers.tensorboard",
    "lockstep.loggers.console",
    "lockstep.loggers.progress_bar",
]


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


def preload(start_method: str) -> None:
    """Import PRELOADED_MODULES in the process that ranks are forked from. The fork server does it in the background."""
    if start_method == "forkserver":
        # The server skips a module that it cannot import.
        multiprocessing.set_forkserver_preload(["lockstep.launchers.forkserver_preload", *PRELOADED_MODULES])
        multiprocessing.forkserver.ensure_running()
    elif start_method == "fork":
        for name in PRELOADED_MODULES:
            with suppress(ImportError):  # a rank that needs it reports the error
                importlib.import_module(name)


def run_rank(worker: Worker, *args: Any) -> Any:
    """What a rank process runs: `worker(*args)`, then an exit that skips the interpreter's teardown."""
    gc.freeze()  # a collection writes to every object, and memory shared with the parent is copied when written to
    end_with_parent()
    try:
        value = worker(*args)
    except StoppedEarly:
        _flush()
        os._exit(EXIT_RESUMABLE)  # a worker that returns early keeps torchrun's agent waiting for 30 s
    _flush()
    # gloo's threads sometimes abort the interpreter's teardown, and a finished run would count as failed.
    atexit.register(os._exit, EXIT_FINISHED)
    return value


def rank_failure(rank: int, code: int, message: str) -> BaseException:
    """The exception that a launcher raises for the rank that failed first. A ConfigError stays one.

    message: the rank's exception as torch reports it, perhaps with a traceback before it.
    """
    if code == EXIT_RESUMABLE:
        return StoppedEarly(f"rank {rank} stopped early")
    for kind in (ConfigError, TrainingDiverged):
        sentences = re.findall(rf"\b{kind.__name__}: (.*)", message)
        if sentences:
            return kind(sentences[-1])
    return RankFailed(rank, code, f"rank {rank} failed first (exit {code}): {message}")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
