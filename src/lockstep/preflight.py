"""Checks before any process starts, and the parts of a job that they build, once, for all ranks.

Functions import torch, and what needs it, inside: what only prints something answers without it.
"""

import gc
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.check import default_of, word
from lockstep.config.nodes import check_nodes, instantiate, instantiate_as, locate
from lockstep.config.schema import RunConfig
from lockstep.distributed.environment import RankInfo, read_rank_info
from lockstep.distributed.run_folder import check_run_folder
from lockstep.distributed.signals import set_run_folder
from lockstep.errors import ConfigError
from lockstep.launchers.base import Launcher
from lockstep.modes.base import Mode
from lockstep.text import show

if TYPE_CHECKING:
    from lockstep.strategies.base import JobSpec, Strategy
    from lockstep.strategies.gradient_sync import GradientSync


@dataclass(frozen=True)
class Parts:
    """What a command is made of. Ranks get it as it is."""

    launcher: Launcher
    mode: Mode
    strategy: "Strategy"
    gradient_sync: "GradientSync"


def preflight(config: RunConfig, starts: bool = True) -> Parts:
    """The parts of a job. Raises ConfigError for whatever can be known to fail.

    starts: False for a job of a sweep that starts later. Nothing is begun or written, and no data is prepared.
    """
    check_nodes(config.launch, "launch")
    check_nodes(config.mode, "mode")
    launcher, mode = instantiate_as(Launcher, config.launch, "launch"), instantiate_as(Mode, config.mode, "mode")
    if not starts and not mode.trains:
        raise ConfigError(f"mode={mode.name} is no training, and a sweep trains; type the command without -m")
    parts = build_parts(config, launcher, mode)
    if starts and not (mode.starts_ranks or launcher.runs_elsewhere):
        check_run_folder(config.run_dir)
        set_run_folder(config.run_dir)
        if launcher.starts_processes:
            from lockstep.data.build import prepare_first

            prepare_first(config)
    gc.freeze()  # what has been imported stays
    gc.enable()
    return parts


def build_parts(config: RunConfig, launcher: Launcher, mode: Mode) -> Parts:
    """The parts, checked against each other, this machine and what the config names. Nothing is started or written."""
    from lockstep.strategies.base import Strategy
    from lockstep.strategies.gradient_sync import GradientSync

    check_nodes(config)
    check_loggers(config)
    check_optimizer(config)
    strategy = instantiate_as(Strategy, config.strategy, "strategy")
    gradient_sync = instantiate_as(GradientSync, config.gradient_sync, "gradient_sync")
    launcher.validate()
    check_options(config, launcher, mode, strategy)
    return Parts(launcher, mode, strategy, gradient_sync)


# until issue 45
def check_loggers(config: RunConfig) -> None:
    """Raise ConfigError for a logger whose packages are not installed."""
    for name, node in config.logger.items():
        needed: Sequence[str] = getattr(locate(f"logger.{name}", node["_target_"]), "packages", ())
        if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
            raise ConfigError(f"logger={name} needs {' and '.join(missing)}; type pip install {' '.join(missing)}")


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for hyperparameters that an optimizer of torch refuses: it is asked with one small weight."""
    import torch

    node, path = config.optimizer, str(config.optimizer["_target_"])

    def refusal(changes: dict[str, Any]) -> str:
        try:
            instantiate(node | changes, [torch.nn.Parameter(torch.zeros(2, 2))])
        except Exception as error:
            return " ".join(str(error).split())
        return ""

    if path.startswith("torch.optim.") and (reason := refusal({})):
        defaults = {name: default_of(f"optimizer.{name}", path) for name in node if name != "_target_"}
        fitting = [word(f"optimizer.{name}", value) for name, value in defaults.items() if not refusal({name: value})]
        raise ConfigError(f"{path} refuses its arguments ({reason}); type {[*fitting, 'optimizer=sgd'][0]}")
    if nameless := [group for group in config.parameters.groups if not group.get("match")]:
        what = f"parameters.groups: {show(nameless[0])} has no match, the names of parameters"
        raise ConfigError(f"{what}; type parameters.groups=[{{match:fc,lr:0.1}}]")


def check_options(config: RunConfig, launcher: Launcher, mode: Mode, strategy: "Strategy") -> None:
    """Raise ConfigError for options that contradict each other."""
    from lockstep.build import direction_of
    from lockstep.data.partition import seeded
    from lockstep.tasks.base import Task
    from lockstep.training.run import time_limit

    if config.monitor not in (None, "auto"):
        try:
            with seeded(config.seed):
                direction_of(config, instantiate_as(Task, config.task, "task"), config.monitor)
        except ConfigError:
            raise
        except Exception:  # perhaps it needs what the data will tell; then a rank makes it, or says why it cannot
            pass
    time_limit(config.trainer.max_time)
    job = job_spec(config, launcher)
    if job.compile == "reduce-overhead" and job.gradient_accumulation_steps > 1:
        what = "trainer.compile=reduce-overhead overwrites gradients that are accumulated (pytorch issue 169545)"
        raise ConfigError(f"{what}; type trainer.compile=true, or trainer.gradient_accumulation_steps=1")
    if job.nan == "skip" and job.precision == "fp16":
        what = "watch.nan=skip and the loss scaling of fp16 would both leave out updates"
        raise ConfigError(f"{what}; type watch.nan=stop, or trainer.precision=bf16")
    check_mode(config, mode, job)
    strategy.validate(job)
    if mode.trains and config.snapshot.mirror is not None:
        mirror: Any = instantiate(config.snapshot.mirror)
        mirror.require_free(config.resume, Path(config.run_dir))
    if not mode.needs_run:
        check_batch_size(config, strategy.data_share_of(job.world_size))


def check_mode(config: RunConfig, mode: Mode, job: "JobSpec") -> None:
    """Raise ConfigError if there is no snapshot to start from, or if the mode cannot be had."""
    from lockstep.snapshots.find import find_snapshots, snapshots_to_try

    if mode.trains:
        find_snapshots(config.resume, Path(config.run_dir))
        return
    if mode.needs_run:
        snapshots_to_try(config.resume, mode.snapshot, mode.name)
    elif config.resume is not None:
        what = f"mode={mode.name} reads no run; leave resume={config.resume} out"
        raise ConfigError(f"{what}, or type parameters.init=<a run> for its weights")
    mode.validate(job)


def job_spec(config: RunConfig, launcher: Launcher) -> "JobSpec":
    """What the config asks for. Raises ConfigError if this machine lacks the backend."""
    from lockstep.distributed.backend import choose_backend, uses_mps
    from lockstep.snapshots.checkpointer import interval
    from lockstep.strategies.base import JobSpec
    from lockstep.training.step import Step

    world_size, ranks_here = launcher.num_ranks()
    started_by = "fork" if launcher.starts_processes else read_rank_info().started_by
    backend: str = config.backend.name
    if not launcher.runs_elsewhere:  # another machine may have the GPUs that this one lacks
        backend = choose_backend(backend, RankInfo(0, world_size, 0, ranks_here, started_by))
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
        nan=config.watch.nan,
        save_unit=interval(config.snapshot.every)[1],
        has_own_step=locate("step", config.step["_target_"]) is not Step,
        gradient_sync=locate("gradient_sync", config.gradient_sync["_target_"]),
    )


def check_batch_size(config: RunConfig, shares: int) -> int:
    """Samples of a global batch, which is cut into `shares`. Raises ConfigError if a rank would get none."""
    trainer, steps = config.trainer, config.trainer.gradient_accumulation_steps
    batch_size = trainer.batch_size if trainer.batch_size_per_rank is None else trainer.batch_size_per_rank * shares
    if batch_size < shares * steps:
        cut_into = [f"{shares} ranks"] * (shares > 1) + [f"{steps} micro-batches"] * (steps > 1)
        what = f"trainer.batch_size={batch_size} is too small for {' and '.join(cut_into)}"
        raise ConfigError(f"{what}; type trainer.batch_size={shares * steps} or more")
    return batch_size
