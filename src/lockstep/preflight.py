"""Checks before any process starts, and the parts of a job that they build for all ranks."""

import gc
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.config.check import check_nodes, instantiate, instantiate_as, locate
from lockstep.config.schema import RunConfig
from lockstep.data.build import prepare_first
from lockstep.distributed import backend, environment, signals
from lockstep.errors import ConfigError
from lockstep.launchers.base import Launcher
from lockstep.modes.base import Mode
from lockstep.snapshots.checkpointer import interval
from lockstep.snapshots.files import list_snapshots, named_snapshots, snapshots_to_try
from lockstep.strategies.base import JobSpec, Strategy
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.text import first_line
from lockstep.training.run import time_limit
from lockstep.training.step import Step


@dataclass(frozen=True)
class Parts:
    """What a command is made of. Ranks get it as it is."""

    launcher: Launcher
    mode: Mode
    strategy: Strategy
    gradient_sync: GradientSync


def preflight(config: RunConfig, starts: bool = True) -> Parts:
    """The parts of a job. Raises ConfigError for whatever can be known to fail. starts: False for a job of a sweep that
    starts later. Nothing is begun or written, and no data is prepared."""
    check_nodes(config.launch, "launch")
    check_nodes(config.mode, "mode")
    launcher, mode = instantiate_as(Launcher, config.launch, "launch"), instantiate_as(Mode, config.mode, "mode")
    if not starts and not mode.trains:
        raise ConfigError(f"mode={mode.name} is no training, and a sweep trains; type the command without -m")
    parts = build_parts(config, launcher, mode)
    if starts:
        begin(config, parts)
    gc.freeze()  # what has been imported stays
    gc.enable()
    return parts


def begin(config: RunConfig, parts: Parts) -> None:
    """What comes first in the process that starts a job."""
    if not (parts.mode.starts_ranks or parts.launcher.runs_elsewhere):
        signals.set_run_folder(config.run_dir)
        if parts.launcher.starts_processes:
            prepare_first(config)


def build_parts(config: RunConfig, launcher: Launcher, mode: Mode) -> Parts:
    """The parts, checked against each other, this machine and what the config names. Nothing is started or written."""
    check_nodes(config)
    check_own_rules(config)
    strategy = instantiate_as(Strategy, config.strategy, "strategy")
    gradient_sync = instantiate_as(GradientSync, config.gradient_sync, "gradient_sync")
    launcher.validate()
    time_limit(config.trainer.max_time)
    interval(config.snapshot.every)
    job, folder = job_spec(config, launcher), Path(config.run_dir)
    if mode.trains:
        if not list_snapshots(folder / "snapshots"):
            named_snapshots(config.resume)
        if config.snapshot.mirror is not None:
            instantiate(config.snapshot.mirror).require_free(config.resume, folder)
    elif mode.needs_run:
        snapshots_to_try(config.resume, mode.snapshot, mode.name)
    elif config.resume is not None:
        what = f"mode={mode.name} reads no run; leave resume={config.resume} out"
        raise ConfigError(f"{what}, or type parameters.init=<a run> for its weights")
    mode.validate(job)
    strategy.validate(job)
    if not mode.needs_run:
        check_batch_size(config, strategy.data_share_of(job.world_size))
    return Parts(launcher, mode, strategy, gradient_sync)


def check_own_rules(config: RunConfig) -> None:
    """Raise ConfigError for a tracker whose package is not installed, and for hyperparameters that an optimizer of
    torch refuses: it is asked with one small weight."""
    for name, node in config.logger.items():
        package = getattr(locate(f"logger.{name}", node["_target_"]), "package", "")
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger={name} needs {package}; type pip install {package}")
    path = config.optimizer["_target_"]
    if path.startswith("torch.optim."):
        try:
            instantiate(config.optimizer, [torch.nn.Parameter(torch.zeros(2, 2))])
        except Exception as error:
            raise ConfigError(f"{path} refuses its arguments ({first_line(error)}); type optimizer=sgd") from None


def job_spec(config: RunConfig, launcher: Launcher) -> JobSpec:
    """What the config asks for. Raises ConfigError if this machine lacks the backend."""
    (world_size, ranks_here), name = launcher.num_ranks(), config.backend.name
    started_by = "fork" if launcher.starts_processes else environment.read_rank_info().started_by
    info = environment.RankInfo(0, world_size, 0, ranks_here, started_by)
    # Another machine may have the GPUs that this one lacks.
    chosen = name if launcher.runs_elsewhere else backend.choose_backend(name, info)
    device_type = "cuda" if chosen == "nccl" else "mps" if backend.uses_mps(name, world_size) else "cpu"
    has_own_step = locate("step", config.step["_target_"]) is not Step
    gradient_sync = locate("gradient_sync", config.gradient_sync["_target_"])
    return JobSpec(config, world_size, device_type, has_own_step, gradient_sync)


def check_batch_size(config: RunConfig, shares: int) -> int:
    """Samples of a global batch, which is cut into `shares`. Raises ConfigError if a rank would get none."""
    trainer, steps = config.trainer, config.trainer.gradient_accumulation_steps
    batch_size = trainer.batch_size if trainer.batch_size_per_rank is None else trainer.batch_size_per_rank * shares
    if batch_size < shares * steps:
        cut_into = [f"{shares} ranks"] * (shares > 1) + [f"{steps} micro-batches"] * (steps > 1)
        what = f"trainer.batch_size={batch_size} is too small for {' and '.join(cut_into)}"
        raise ConfigError(f"{what}; type trainer.batch_size={shares * steps} or more")
    return batch_size
