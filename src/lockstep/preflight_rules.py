# until issue 42
"""What the options of a training contradict, as far as strategies, sync and step do not say it themselves."""

import os
import shutil
from pathlib import Path

from hydra.utils import get_object

from lockstep.config.nodes import instantiate_as
from lockstep.config.schema import RunConfig
from lockstep.data.partition import global_batch_size, seeded
from lockstep.distributed.backend import uses_mps, validate_backend
from lockstep.errors import ConfigError
from lockstep.launchers.base import Launcher
from lockstep.modes.base import Mode
from lockstep.snapshots.manager import SaveInterval, validate_format
from lockstep.snapshots.mirror import validate_mirror
from lockstep.snapshots.resume import find_snapshots, snapshots_to_try
from lockstep.strategies.base import JobSpec, Strategy
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.tasks.base import Task
from lockstep.training.state import time_limit


def check_options(
    config: RunConfig, launcher: Launcher, mode: Mode, strategy: Strategy, gradient_sync: GradientSync
) -> None:
    """Raise ConfigError for what options and machine contradict."""
    if all(config.task.get(key, "given") is not None for key in ("shape", "classes")):  # else the data tells
        with seeded(config.seed):
            task = instantiate_as(Task, config.task, "task")
        if config.objective is not None:
            task.mode(config.objective)
    time_limit(config.trainer.max_time)
    job = job_spec(config, launcher)
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
    if job.compile and not has_compiler and not launcher.runs_elsewhere:
        raise ConfigError(
            "trainer.compile needs a C++ compiler, and this machine has none; type apt install g++, or "
            "trainer.compile=false"
        )
    check_mode(config, mode, job)
    validate_training(job)
    strategy.validate(job)
    strategy.validate_gradient_sync(gradient_sync, job)
    validate_nan_policy(job, strategy.ranks_agree and gradient_sync.ranks_agree)
    validate_format(config.snapshot.format, strategy)
    if mode.trains:
        snapshot = config.snapshot
        validate_mirror(snapshot.mirror, snapshot.format, strategy, config.resume, Path(config.run_dir))
    if not mode.needs_run:
        check_batch_size(config, strategy.data_parallel_size(job.world_size))


def check_mode(config: RunConfig, mode: Mode, job: JobSpec) -> None:
    """Raise ConfigError if there is no snapshot to start from, or if the mode cannot be had."""
    if mode.trains:
        find_snapshots(config.resume, Path(config.run_dir))
        return
    if mode.needs_run:
        snapshots_to_try(config.resume, mode.snapshot, mode.name)
    elif config.resume is not None:
        raise ConfigError(
            f"mode={mode.name} reads no run; leave resume={config.resume} out, or type parameters.init=<a run> for its "
            f"weights"
        )
    mode.validate(job)


def job_spec(config: RunConfig, launcher: Launcher) -> JobSpec:
    """What the config asks for. Raises ConfigError if this machine lacks the backend."""
    world_size, ranks_here = launcher.num_ranks()
    backend: str = config.backend.name
    if not launcher.runs_elsewhere:  # another machine may have the GPUs that this one lacks
        backend = validate_backend(backend, ranks_here, config.backend.socket_ifname)
    trainer = config.trainer
    return JobSpec(
        world_size=world_size,
        ranks_here=ranks_here,
        device_type="cuda" if backend == "nccl" else "mps" if uses_mps(config.backend.name, world_size) else "cpu",
        precision=trainer.precision,
        sync_bn=config.sync_bn.mode,
        gradient_accumulation_steps=trainer.gradient_accumulation_steps,
        compile=trainer.compile,
        deterministic=trainer.deterministic,
        profile=config.profiler.enabled,
        nan=config.watch.nan,
        save_unit=SaveInterval(config.snapshot.every).unit,
        optimizer=get_object(config.optimizer["_target_"]),
        fused_optimizer=config.optimizer.get("fused") is True,
    )


def check_batch_size(config: RunConfig, shares: int) -> int:
    """Samples of a global batch. Raises ConfigError if a rank would get none."""
    trainer = config.trainer
    steps = trainer.gradient_accumulation_steps
    return global_batch_size(shares, trainer.batch_size, trainer.batch_size_per_rank, steps)


def validate_training(job: JobSpec) -> None:
    """Raise ConfigError for training options that do not go together, whatever the strategy."""
    if job.device_type == "mps" and job.precision == "fp64":
        raise ConfigError(
            "trainer.precision=fp64 needs a device with float64, and Apple's GPU has none; type backend=gloo, or "
            "trainer.precision=fp32"
        )
    if job.compile == "reduce-overhead" and job.gradient_accumulation_steps > 1:
        raise ConfigError(
            "trainer.compile=reduce-overhead overwrites gradients that are accumulated (pytorch issue 169545); "
            "type trainer.compile=true, or trainer.gradient_accumulation_steps=1"
        )


def validate_nan_policy(job: JobSpec, ranks_agree: bool) -> None:
    """Raise ConfigError for `watch.nan=skip` where a rank cannot know alone that all ranks have a broken gradient."""
    if job.nan != "skip":
        return
    if not ranks_agree and job.world_size > 1:
        raise ConfigError(
            "watch.nan=skip needs the same gradient on all ranks, which this strategy or gradient_sync does not give; "
            "type watch.nan=stop, or strategy=ddp gradient_sync=auto"
        )
    if job.precision == "fp16":
        raise ConfigError(
            "watch.nan=skip and the loss scaling of fp16 would both leave out updates; "
            "type watch.nan=stop, or trainer.precision=bf16"
        )
