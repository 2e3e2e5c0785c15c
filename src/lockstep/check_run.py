"""mode=check: a few steps on two ranks and on one, and what they show. Nothing of a run is written."""

import io
import logging
import multiprocessing.reduction
import random
from contextlib import suppress
from dataclasses import replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from lockstep import build
from lockstep.config.instantiate import instantiate, instantiate_as
from lockstep.distributed import signals
from lockstep.distributed.early_exit import exits_are_failures
from lockstep.distributed.lazy_dynamo import postpone_dynamo
from lockstep.distributed.same_input import require_same_data
from lockstep.distributed.world import init_distributed
from lockstep.errors import EXIT_PROMISES, ConfigError, StoppedEarly
from lockstep.launchers.base import Launcher
from lockstep.launchers.env import EnvLauncher
from lockstep.launchers.spawn import SpawnLauncher
from lockstep.loggers.rank_logs import rank_logs
from lockstep.modes.check import Options, figures, is_unexplained, rows, table
from lockstep.modes.check_steps import Draws, Facts, FirstSteps, differences, what_is_drawn
from lockstep.monitor import rank as monitor
from lockstep.preflight import check_batch_size, check_options, preflight
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.strategies.gradient_sync.base import GradientSync
from lockstep.training.setup import set_determinism

RANKS = 2
FEW_SAMPLES = 4  # of a rank


def check_run(cfg: DictConfig, launcher: Launcher) -> None:
    """Print the table. Ends the process with EXIT_PROMISES if a promise does not hold.

    launcher: what `launch` says. It starts nothing: the two ranks are forks of this process on this machine's CPUs.
    """
    if cfg.resume is not None:
        raise ConfigError(
            f"mode=check looks at what a command would train, and reads no run; leave resume={cfg.resume} out and type "
            f"the words of that run, which are in its .hydra/overrides.yaml"
        )
    postpone_dynamo()  # the worlds are forks of this process
    folder = Path(get_temp_dir())  # it goes with this process, also at Ctrl-C
    if folder not in Path(cfg.run_dir).parents:  # `mode: check` in a file
        remove_new_folder(Path(cfg.run_dir))
    strategy, ranks = check_options(cfg, launcher)
    shares = strategy.batch_shares(ranks)
    per_rank = cfg.trainer.batch_size_per_rank is not None
    cfg.trainer.batch_size, cfg.trainer.batch_size_per_rank = check_batch_size(cfg, shares), None
    cfg.backend.name, cfg.trainer.compile, cfg.profiler.enabled = "gloo", False, False
    try:
        check_options(cfg, EnvLauncher("restart"))
        preflight(cfg, forks(RANKS))
    except ConfigError as error:
        raise ConfigError(f"mode=check runs on 1 and on {RANKS} ranks: {error}") from None
    torch.set_num_threads(1)  # this process compares tensors and forks again: it must start no threads
    one, two, draws, lines, apart = compare_worlds(cfg, folder, timed=True)
    sync = instantiate_as(GradientSync, cfg.gradient_sync, "gradient_sync")
    finds_unused = bool(cfg.strategy.get("find_unused_parameters"))
    options = Options(cfg.trainer.precision, None if sync.is_exact else sync.name, per_rank, finds_unused)
    found = rows(one, two, draws, apart, options)
    # In float32 a rounding error may turn a ReLU off: only float64 tells.
    if is_unexplained(found) and options.precision != "fp64":
        one64, two64, apart = in_float64(cfg, folder)
        found[0] = rows(one64, two64, draws, apart, replace(options, precision="fp64"))[0]
    print("\n".join([*table(found), "", *figures(one, two, ranks, shares), *lines]), flush=True)
    if any(row.reasons for row in found):
        raise StoppedEarly("a promise does not hold, as the table says", EXIT_PROMISES)


def forks(ranks: int) -> SpawnLauncher:
    """Starts a world as forks of this process."""
    launcher = SpawnLauncher("fork", ranks, 1, 0, "127.0.0.1", 0, "restart", 0)
    launcher.prepare()
    return launcher


def compare_worlds(
    cfg: DictConfig, folder: Path, timed: bool
) -> tuple[Facts, Facts, Draws, list[str], dict[str, float]]:
    """What one rank finds and what two find, what is drawn, lines about it, and how far the worlds are apart.

    timed: see `check_worker`.
    """
    two, _, _ = forks(RANKS).launch(check_worker, cfg, folder, timed)
    one, draws, lines = forks(1).launch(check_worker, cfg, folder, timed)
    kept = [torch.load(folder / f"{number}.pt", weights_only=True) for number in (1, RANKS)]
    apart = {} if one.diverged or two.diverged else differences(*kept)
    return one, two, draws, lines, apart


def in_float64(cfg: DictConfig, folder: Path) -> tuple[Facts, Facts, dict[str, float]]:
    """What one rank finds and what two find in float64, and how far they are apart: a step with a few samples, as
    convolutions take ten times as long.
    """
    precise, trainer = cfg.copy(), cfg.trainer
    few = FEW_SAMPLES * RANKS * trainer.gradient_accumulation_steps
    precise.trainer.precision, precise.trainer.batch_size = "fp64", min(trainer.batch_size, few)
    one, two, _, _, apart = compare_worlds(precise, folder, timed=False)
    return one, two, apart


def remove_new_folder(run_dir: Path) -> None:
    """Remove the run folder that Hydra has made, if it is empty, with those that Hydra has made for it here."""
    here = Path.cwd()
    with suppress(OSError):  # it holds something, or is gone
        run_dir.rmdir()
        for parent in run_dir.parents:
            if here not in parent.parents:
                break
            parent.rmdir()


def check_worker(cfg: DictConfig, folder: Path, timed: bool) -> tuple[Facts, Draws, list[str]]:
    """What one rank of a world of one or two does. Returns what it found, and lines about it.

    timed: take some steps for their time, and look at what is drawn; otherwise the first step alone.
    """
    signals.listen()
    strategy = instantiate(cfg.strategy)
    with rank_logs() as logs, exits_are_failures(), monitor.failures():
        logging.getLogger().handlers = logs.files  # warnings are shown below the table, once
        with init_distributed(**cfg.backend, bind_device=strategy.binds_one_device) as world:
            random.seed()  # as in the processes of a launcher that does not fork
            np.random.seed()
            set_determinism(cfg.seed, cfg.trainer.deterministic)
            loader, _ = build.model_and_data(cfg, world, strategy)
            fingerprint = data_fingerprint(loader.dataset)
            require_same_data(world, "training data", len(loader), fingerprint)
            state = build.train_state(cfg, strategy, len(loader))
            steps, draws, lines = FirstSteps(state, timed), Draws(), list[str]()
            if timed and world.size == 1:
                draws, lines = what_is_drawn(state, loader), notes(loader, strategy.model)
            facts = steps.take(loader, folder)
        facts.fingerprint = fingerprint
        warnings = [record.getMessage() for record in logs.kept if record.levelno >= logging.WARNING]
    return facts, draws, [*lines, *(f"warning:   {text}" for text in dict.fromkeys(warnings))]


def notes(loader: Any, model: torch.nn.Module) -> list[str]:
    """Lines about what breaks no promise here."""
    found = []
    if loader.is_stream:
        found.append("iterable:  samples come in the data set's own order, and every rank reads all of them")
    parts: dict[str, Any] = {"the model": model}
    if loader.reader is not None:
        read = loader.samples
        parts |= {
            "the training data": read.dataset,
            "dataset.transforms": read.transforms,
            "collate_fn": read.collate_fn,
        }
    for name, part in parts.items():
        reason = not_picklable(part, name)
        if reason is not None:
            found.append(f"pickling:  {reason}; only loader workers off Linux need it: there type dataset.workers=0")
    return found


class _Sizeless(multiprocessing.reduction.ForkingPickler):
    """Pickles everything but the values of tensors and arrays."""

    def reducer_override(self, value: Any) -> Any:
        return (str, ()) if isinstance(value, torch.Tensor | np.ndarray) else NotImplemented


def not_picklable(value: Any, name: str) -> str | None:
    """The innermost attribute or item of `value` that cannot be pickled, and why. None if all can be."""
    try:
        _Sizeless(io.BytesIO()).dump(value)
    except Exception as error:  # of any class: __reduce__ and __getstate__ may be the user's
        items = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        inside = items if isinstance(items, dict) else getattr(value, "__dict__", {})
        for key, part in inside.items():
            found = not_picklable(part, f"{name}.{key}")
            if found is not None:
                return found
        return f"{name} cannot be pickled ({' '.join(str(error).split())})"
    return None
