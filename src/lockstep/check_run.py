"""mode=check: a few steps on two ranks and on one, and what they show. Nothing of a run is written."""

import logging
import random
from contextlib import suppress
from dataclasses import replace
from multiprocessing.util import get_temp_dir
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from lockstep import build
from lockstep.config.schema import with_values
from lockstep.config.targets import instantiate, instantiate_as
from lockstep.distributed import signals
from lockstep.distributed.world import OtherData, World, init_distributed, require_same_data
from lockstep.errors import EXIT_PROMISES, ConfigError, StoppedEarly, exits_are_failures
from lockstep.failures import rank as monitor
from lockstep.launchers.base import Launcher
from lockstep.launchers.env import EnvLauncher
from lockstep.launchers.local import SpawnLauncher
from lockstep.loggers.rank_logs import rank_logs
from lockstep.modes.check import Options, Row, figures, is_unexplained, rows, table
from lockstep.modes.check_draws import Draws, first_samples, what_is_drawn
from lockstep.modes.check_notes import notes
from lockstep.modes.check_steps import Facts, FirstSteps, differences
from lockstep.preflight import as_taken, check_batch_size, check_model, check_options, prepare_data
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.strategies.base import Strategy
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.training.setup import set_determinism

RANKS = 2
FEW_SAMPLES = 4  # of a rank
LITTLE = 0.05  # relative; what rounding makes of ReLUs in deep nets is less


def check_run(cfg: DictConfig, launcher: Launcher) -> None:
    """Print the table. Ends the process with EXIT_PROMISES if a promise does not hold.

    launcher: what `launch` says. It starts nothing: the two ranks are forks of this process on this machine's CPUs.
    """
    if cfg.resume is not None:
        raise ConfigError(
            f"mode=check looks at what a command would train, and reads no run; leave resume={cfg.resume} out and type "
            f"the words of that run, which are in its .hydra/overrides.yaml"
        )
    folder = Path(get_temp_dir())  # it goes with this process, also at Ctrl-C
    if folder not in Path(cfg.run_dir).parents:  # `mode: check` in a file
        remove_new_folder(Path(cfg.run_dir))
    cfg = as_taken(cfg)
    strategy, ranks = check_options(cfg, launcher)
    shares, replicas = strategy.batch_shares(ranks), cfg.strategy.get("replicas", 1)
    options = options_of(cfg, strategy)
    cfg = with_values(
        cfg,
        {
            "trainer.batch_size": check_batch_size(cfg, shares),
            "trainer.batch_size_per_rank": None,
            "trainer.compile": False,
            "backend.name": "gloo",
            "profiler.enabled": False,
        }
        | ({"strategy.replicas": 1} if replicas > 1 else {}),  # each needs two ranks or more
    )
    require_small_worlds(cfg)
    prepare_data(cfg)
    check_model(cfg, strategy, RANKS)
    torch.set_num_threads(1)  # this process compares tensors and forks again: it must start no threads
    one, two, draws, lines, apart = compare_worlds(cfg, folder, timed=True)
    found = rows(one, two, draws, apart, options)
    # In float32 a rounding error may turn a ReLU off: only float64 tells.
    if is_unexplained(found) and options.precision != "fp64":
        shown = max(apart.values(), default=0.0)
        found[0] = in_float64(cfg, folder, found[0], draws, options, shown)
    if replicas > 1:
        lines.append(f"replicas:  the two ranks were checked with strategy.replicas=1, not {replicas}")
    print("\n".join([*table(found), "", *figures(one, two, ranks, shares), *lines]), flush=True)
    if any(row.reasons for row in found):
        raise StoppedEarly("a promise does not hold, as the table says", EXIT_PROMISES)


def options_of(cfg: DictConfig, strategy: Strategy) -> Options:
    """What the config says, as far as reasons name it."""
    sync = instantiate_as(GradientSync, cfg.gradient_sync, "gradient_sync")
    cuts = "micro_batches" in cfg.strategy
    grows = strategy.batch_shares(1) != strategy.batch_shares(RANKS)
    return Options(
        precision=cfg.trainer.precision,
        inexact_sync=None if sync.is_exact else sync.name,
        per_rank=cfg.trainer.batch_size_per_rank is not None and grows,
        finds_unused=bool(cfg.strategy.get("find_unused_parameters", True)),
        micro_batches=cuts,
        norms_see_parts=strategy.supports_sync_bn or cuts,
    )


def require_small_worlds(cfg: DictConfig) -> None:
    """Raise ConfigError if one rank, or two, cannot train with these options."""
    try:
        for launcher in (EnvLauncher(), forks(RANKS)):
            check_options(cfg, launcher)
    except ConfigError as error:
        raise ConfigError(f"mode=check runs on 1 and on {RANKS} ranks: {error}") from None


def forks(ranks: int) -> SpawnLauncher:
    """Starts a world as forks of this process."""
    launcher = SpawnLauncher("fork", ranks, 1, 0, "127.0.0.1", 0)
    launcher.prepare("lockstep.rank_imports")
    return launcher


def compare_worlds(
    cfg: DictConfig, folder: Path, timed: bool
) -> tuple[Facts, Facts, Draws, list[str], dict[str, float]]:
    """What one rank finds and what two find, what is drawn, lines about it, and how far the worlds are apart.

    timed: see `check_worker`.
    """
    two, _, _ = forks(RANKS).launch(check_worker, cfg, folder, timed)
    one, draws, lines = forks(1).launch(check_worker, cfg, folder, timed)
    apart = dict[str, float]()
    if one.has_step and two.has_step:
        apart = differences(*[torch.load(folder / f"{number}.pt", weights_only=True) for number in (1, RANKS)])
    return one, two, draws, lines, apart


def in_float64(cfg: DictConfig, folder: Path, row: Row, draws: Draws, options: Options, shown: float) -> Row:
    """The first row, computed again in float64, which tells rounding from a cause; `row` with a reason if it fails.

    shown: how far the worlds were apart. If that was little, a few samples tell as much, and convolutions take ten
    times as long in float64.
    """
    precise, trainer = cfg.copy(), cfg.trainer
    ranks = max(RANKS, cfg.strategy.get("count", 0))  # of strategy=virtual_ranks
    few = FEW_SAMPLES * ranks * trainer.gradient_accumulation_steps
    precise.trainer.precision = "fp64"
    if shown < LITTLE:
        precise.trainer.batch_size = min(trainer.batch_size, few)
    one, two, _, _, apart = compare_worlds(precise, folder, timed=False)
    failed = one.failed or two.failed
    if failed is not None:
        reason = f"float64 would tell whether this is rounding alone, but the step fails there ({failed})"
        return replace(row, reasons=[*row.reasons, reason])
    return rows(one, two, draws, apart, replace(options, precision="fp64"))[0]


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

    timed: take some steps for their time, and look at what is drawn. Otherwise the first step alone, in float64, which
    some models cannot compute in: that is no failure then.
    """
    signals.listen()
    strategy = instantiate(cfg.strategy)
    with rank_logs() as logs, exits_are_failures("this rank left before the end of the check"), monitor.failures():
        logging.getLogger().handlers = logs.files  # warnings are shown below the table, once
        with init_distributed(**cfg.backend, bind_device=strategy.binds_one_device()) as world:
            monitor.watch_for_hangs(cfg.watch.timeout, cfg.watch.on_hang, world.timeout)
            random.seed()  # as in the processes of a launcher that does not fork
            np.random.seed()
            set_determinism(cfg.seed, cfg.trainer.deterministic)
            try:
                facts, draws, lines = take_steps(cfg, world, strategy, folder, timed)
            except OtherData as error:
                facts, draws, lines = Facts(world.size, other_data=error.name), Draws(), []
            except (ConfigError, RuntimeError, TypeError) as error:
                if timed:
                    raise
                facts, draws, lines = Facts(world.size, failed=str(error).partition("\n")[0]), Draws(), []
        warnings = [record.getMessage() for record in logs.kept if record.levelno >= logging.WARNING]
    return facts, draws, [*lines, *(f"warning:   {text}" for text in dict.fromkeys(warnings))]


def take_steps(
    cfg: DictConfig, world: World, strategy: Strategy, folder: Path, timed: bool
) -> tuple[Facts, Draws, list[str]]:
    """Build everything, look at what is drawn, and take the first steps. The arguments are those of `check_worker`."""
    cfg, loader, _ = build.model_and_data(cfg, world, strategy)
    fingerprint = data_fingerprint(loader.dataset)
    require_same_data(world, "training data", len(loader), fingerprint)
    state = build.train_state(cfg, strategy, loader)
    steps, draws, lines = FirstSteps(state, timed), Draws(), list[str]()
    read = first_samples(loader)
    if timed and world.size == 1:
        draws, lines = what_is_drawn(state, loader), notes(loader)
    facts = steps.take(loader, folder)
    facts.fingerprint, facts.first_samples = fingerprint, read
    return facts, draws, lines
