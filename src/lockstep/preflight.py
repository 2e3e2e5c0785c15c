"""Checks before any process starts: what options, machine and data contradict."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig

from lockstep.build_data import check_class_weights, prepare
from lockstep.config.check import check_arguments
from lockstep.config.targets import instantiate, instantiate_as, without_untaken
from lockstep.data.partition import global_batch_size, seeded
from lockstep.distributed.backend import uses_mps, validate_backend
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.run_folder import check_run_folder
from lockstep.distributed.sync_batch_norm import refuse_batch_norms, validate_batch_norms
from lockstep.errors import ConfigError
from lockstep.failures.record import exception_record
from lockstep.launchers.base import Launcher
from lockstep.models.base import has_lazy_layers
from lockstep.modes.base import Mode
from lockstep.snapshots.initial_weights import freeze, load_initial_weights
from lockstep.snapshots.manager import SaveInterval, validate_format
from lockstep.snapshots.mirror import validate_mirror
from lockstep.snapshots.resume import find_snapshots, snapshots_to_try
from lockstep.strategies.base import JobSpec, Strategy, refuse_changing_weights
from lockstep.strategies.gradient_sync import Auto, GradientSync
from lockstep.tasks.base import Task
from lockstep.training.checkpointing import checkpointed_blocks
from lockstep.training.setup import cast, model_memory_format


def preflight(cfg: DictConfig, launcher: Launcher) -> DictConfig:
    """Raise ConfigError for whatever can be known to fail. Returns the config as its classes take it."""
    cfg = as_taken(cfg)
    strategy, world_size = check_options(cfg, launcher)
    if not launcher.runs_elsewhere:
        check_run_folder(cfg.run_dir)
    if launcher.starts_processes:
        prepare_data(cfg)
        check_model(cfg, strategy, world_size)
    return cfg


def preflight_job(cfg: DictConfig, words: Sequence[str]) -> None:
    """As `preflight`, for a job of a sweep that starts later: without the data, and nothing is started or written.

    words: the overrides of the job.
    """
    check_arguments(cfg, ("launch", "mode"))
    launcher, mode = instantiate_as(Launcher, cfg.launch, "launch"), instantiate_as(Mode, cfg.mode, "mode")
    if not mode.trains:
        chosen = f"mode={mode.name}"
        raise ConfigError(f"{chosen} is no training, and a sweep trains; leave {chosen} out of the sweep")
    cfg, _ = without_untaken(cfg, words)
    check_model(cfg, *check_options(cfg, launcher))


def as_taken(cfg: DictConfig) -> DictConfig:
    """`cfg` without what a typed `_target_` does not take, of which rank 0 prints a line: see `without_untaken`."""
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    cfg, lines = without_untaken(cfg, words)
    for line in lines:
        if read_rank_info().is_rank_zero:
            print(line, flush=True)
    return cfg


def prepare_data(cfg: DictConfig) -> None:
    """Call dataset.prepare. Raises ConfigError for whatever it raises: no rank has started that could report it."""
    try:
        prepare(cfg)
    except ConfigError:
        raise
    except Exception as error:
        advice = "correct that, or type dataset.prepare=null if the data is ready"
        raise ConfigError(f"dataset.prepare failed{_place_and_reason(error)}; {advice}") from error


def check_task(cfg: DictConfig) -> None:
    """Raise ConfigError for whatever the task's constructor raises, and for an objective that it does not measure.

    A task that needs what only the training data tells, such as the number of classes, is made by the ranks.
    """
    try:
        with seeded(cfg.seed):
            task = instantiate_as(Task, cfg.task, "task")
    except ConfigError:
        raise
    except Exception as error:
        if any(cfg.task.get(key, "given") is None for key in ("shape", "classes")):
            return
        advice = "correct that, or type task=classification"
        raise ConfigError(f"task._target_={cfg.task._target_} failed{_place_and_reason(error)}; {advice}") from error
    task.mode(cfg.objective)
    check_class_weights(cfg)


def check_loggers(cfg: DictConfig) -> None:
    """Raise ConfigError for a logger whose packages are not installed."""
    for name, node in cfg.get("logger", {}).items():  # logger=[] leaves no section
        needed = getattr(get_object(node._target_), "packages", ())
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(f"logger={name} needs {' and '.join(missing)}; type pip install {' '.join(missing)}")


def _place_and_reason(error: Exception) -> str:
    """ " at file.py:12 (TypeError: its message)", of an exception of the user's code."""
    failed = exception_record(error)
    place = f" at {failed['file']}:{failed['line']}" if "file" in failed else ""
    said = f"{failed['type']}: {failed['message']}".partition("\n")[0]
    return f"{place} ({said})"


def check_options(cfg: DictConfig, launcher: Launcher) -> tuple[Strategy, int]:
    """The strategy and the number of ranks. Raises ConfigError for what options and machine contradict."""
    check_arguments(cfg)
    launcher.validate()
    check_loggers(cfg)
    strategy = instantiate_as(Strategy, cfg.strategy, "strategy")
    gradient_sync = instantiate_as(GradientSync, cfg.gradient_sync, "gradient_sync")
    check_task(cfg)
    job = job_spec(cfg, launcher)
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
    if job.compile and not has_compiler and not launcher.runs_elsewhere:
        raise ConfigError(
            "trainer.compile needs a C++ compiler, and this machine has none; type apt install g++, or "
            "trainer.compile=false"
        )
    mode = check_mode(cfg, job)
    validate_training(job)
    strategy.validate(job)
    strategy.validate_gradient_sync(gradient_sync, job)
    validate_accumulation(cfg, strategy, gradient_sync, job)
    ranks_agree = strategy.ranks_agree and gradient_sync.ranks_agree
    validate_nan_policy(job, ranks_agree)
    validate_format(cfg.snapshot.format, strategy)
    if mode.trains:
        validate_mirror(cfg.snapshot.mirror, cfg.snapshot.format, strategy, cfg.resume, Path(cfg.run_dir))
    if cfg.trainer.digest != "off" and job.world_size > 1 and not ranks_agree:  # rank 0 does not hold all weights
        raise ConfigError(
            f"trainer.digest={cfg.trainer.digest} needs the same weights and gradients on all ranks, which this "
            f"strategy or gradient_sync does not give; type trainer.digest=off, or strategy=ddp gradient_sync=auto"
        )
    shares = strategy.data_parallel_size(job.world_size)
    if not mode.needs_run:
        check_batch_size(cfg, shares)
    return strategy, job.world_size


def check_mode(cfg: DictConfig, job: JobSpec) -> Mode:
    """The mode. Raises ConfigError if there is no snapshot to start from, or if the mode cannot be had."""
    mode = instantiate_as(Mode, cfg.mode, "mode")
    if mode.trains:
        find_snapshots(cfg.resume, Path(cfg.run_dir))
        return mode
    if mode.needs_run:
        snapshots_to_try(cfg.resume, mode.snapshot, mode.name)
    elif cfg.resume is not None:
        raise ConfigError(
            f"mode={mode.name} reads no run; leave resume={cfg.resume} out, or type init=<a run> for its weights"
        )
    mode.validate(job)
    return mode


def job_spec(cfg: DictConfig, launcher: Launcher) -> JobSpec:
    """What the config asks for. Raises ConfigError if this machine lacks the backend."""
    world_size, ranks_here = launcher.num_ranks()
    backend = backend_typed = cfg.backend.name
    if not launcher.runs_elsewhere:  # another machine may have the GPUs that this one lacks
        backend = validate_backend(backend, ranks_here, cfg.backend.socket_ifname)
    return JobSpec(
        world_size=world_size,
        ranks_here=ranks_here,
        device_type="cuda" if backend == "nccl" else "mps" if uses_mps(backend_typed, world_size) else "cpu",
        precision=cfg.trainer.precision,
        sync_bn=cfg.sync_bn.mode,
        # What refuses two refuses a number that may grow.
        gradient_accumulation_steps=2 if accumulates_more(cfg) else cfg.trainer.gradient_accumulation_steps,
        compile=cfg.trainer.compile,
        deterministic=cfg.trainer.deterministic,
        profile=cfg.profiler.enabled,
        nan=cfg.watch.nan,
        save_unit=SaveInterval(cfg.snapshot.every).unit,
        optimizer=get_object(cfg.optimizer._target_),
        fused_optimizer=cfg.optimizer.get("fused") is True,
    )


def check_batch_size(cfg: DictConfig, shares: int) -> int:
    """Samples of a global batch. Raises ConfigError if a rank would get none."""
    trainer = cfg.trainer
    steps = 1 if accumulates_more(cfg) else trainer.gradient_accumulation_steps
    return global_batch_size(shares, trainer.batch_size, trainer.batch_size_per_rank, steps)


def accumulates_more(cfg: DictConfig) -> bool:
    """Whether a batch is cut into more micro-batches when a step runs out of memory."""
    return bool(cfg.trainer.gradient_accumulation_steps == "auto")


def validate_accumulation(cfg: DictConfig, strategy: Strategy, gradient_sync: GradientSync, job: JobSpec) -> None:
    """Raise ConfigError where one rank that runs out of memory would leave the others waiting in its pass."""
    if not accumulates_more(cfg):
        return
    auto = "trainer.gradient_accumulation_steps=auto"
    if strategy.own_epoch() is not None:
        raise ConfigError(
            f"{auto} needs steps that all ranks take together; type strategy=ddp, or "
            f"trainer.gradient_accumulation_steps=2"
        )
    if job.world_size == 1:
        return
    if strategy.communicates_in_forward or not strategy.ranks_agree:
        raise ConfigError(
            f"{auto} does a step again that ran out of memory on one rank, while with this strategy the others would "
            f"wait in their passes; type strategy=ddp, or trainer.gradient_accumulation_steps=2"
        )
    if type(gradient_sync) not in (Auto, GradientSync):
        raise ConfigError(
            f"{auto} averages gradients after the backward pass, and gradient_sync={gradient_sync.name} in it; "
            f"type gradient_sync=auto, or trainer.gradient_accumulation_steps=2"
        )


def check_model(cfg: DictConfig, strategy: Strategy, world_size: int) -> None:
    """Build the model without weights, so that what does not fit is said once and not by every rank."""
    if any(cfg.model.get(key, "given") is None for key in ("shape", "classes")):
        return  # the training data tells, which the ranks read
    try:
        with torch.device("meta"):
            model: Any = instantiate(cfg.model)
            load_initial_weights(model, cfg.init, cfg.new_layers)
            freeze(model, cfg.freeze)
            cast(model, cfg.trainer.precision)
            checkpointed_blocks(model, cfg.trainer.checkpoint_activations)
    except ConfigError:
        raise
    except Exception:  # a model of the user's may not work without weights; the ranks build it with weights
        return
    # is_available() would start CUDA, and launch=fork could not fork
    on_gpus = cfg.backend.name != "gloo" and torch.cuda.device_count() > 0
    model_memory_format(model, cfg.trainer.channels_last, torch.device("cuda" if on_gpus else "cpu"))
    refuse_changing_weights(model, world_size)
    if not has_lazy_layers(model):  # the first sample gives their shapes; the ranks check them then
        strategy.validate_model(model, world_size)
        if strategy.syncs_batch_norm(cfg.sync_bn.mode, world_size):
            validate_batch_norms(model)
            if accumulates_more(cfg) and world_size > 1:
                refuse_batch_norms(model)


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
            "type watch.nan=stop or watch.nan=rollback, or strategy=ddp gradient_sync=auto"
        )
    if job.precision == "fp16":
        raise ConfigError(
            "watch.nan=skip and the loss scaling of fp16 would both leave out updates; "
            "type watch.nan=stop, or trainer.precision=bf16"
        )
