"""launch=dry: a job of many ranks, planned in this process. Nothing is started, and nothing of a run is written."""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from lockstep import build, build_data
from lockstep.config.targets import instantiate
from lockstep.distributed.dry_world import Traffic, dry_world
from lockstep.errors import TrainingDiverged
from lockstep.launchers.base import Launcher
from lockstep.loggers.rank_logs import rank_logs
from lockstep.modes.plan import FirstStep, Job, PlannedRank, lines
from lockstep.preflight import check_options, prepare_data
from lockstep.training.setup import set_determinism

SHOWN = ("model", "dataset", "optimizer", "strategy", "gradient_sync", "sync_bn")  # groups


def dry_run(cfg: DictConfig, launcher: Launcher, options: Mapping[str, str | None]) -> None:
    """Print the plan. The first, the middle and the last rank are built one after the other, and take a step.

    options: {config group: the option chosen}.
    """
    _, ranks = check_options(cfg, launcher)
    cfg.dataset.workers, cfg.trainer.compile, cfg.profiler.enabled = 0, False, False
    with rank_logs() as logs:
        logging.getLogger().handlers = logs.files  # warnings are shown below the plan, once
        prepare_data(cfg)
        data = build_data.datasets(cfg)
        numbers = sorted({0, ranks // 2, ranks - 1})
        planned = [plan_rank(cfg, data, rank, ranks) for rank in numbers]
        warnings = [record.getMessage() for record in logs.kept if record.levelno >= logging.WARNING]
    job = planned[0][0]
    chosen = " ".join(f"{group}={options[group]}" for group in SHOWN)
    named = ", ".join(map(str, numbers))
    print(f"launch=dry: {ranks} ranks; of these {named} took a step here, and nothing was started or written\n")
    print(f"config:     {chosen} trainer.precision={cfg.trainer.precision}")
    print("\n".join([*lines(job, [rank for _, rank in planned]), *(f"warning:    {text}" for text in warnings)]))


def plan_rank(cfg: DictConfig, data: tuple[Any, Any], rank: int, ranks: int) -> tuple[Job, PlannedRank]:
    """Build rank `rank` of `ranks` on a CPU, and take its first step."""
    strategy, traffic = instantiate(cfg.strategy), Traffic()
    with dry_world(rank, ranks, traffic) as world:
        set_determinism(cfg.seed, cfg.trainer.deterministic)
        cfg, loader, _ = build.model_and_data(cfg, world, strategy, data)
        state = build.train_state(cfg, strategy, loader)
        planned = PlannedRank(rank, traffic)
        traffic.clear()  # what was sent until now is no part of a step
        try:
            FirstStep(planned, state).take(loader)
        except TrainingDiverged:  # its sentence names other ranks, of which this one knows nothing
            raise TrainingDiverged(
                f"the loss or the gradient of rank {rank} is not finite in its first step; "
                f"type mode=check to see which samples hold NaN"
            ) from None
        settings, samples = state.settings, len(loader)
        steps = settings.steps_per_epoch(samples), settings.total_steps(samples)
        shares = strategy.data_parallel_size(ranks)
    return Job(ranks, shares, settings.batch_size, samples, steps), planned
