# until issue 45
"""Builds what trains, evaluates, saves and logs in a rank, as the packages that are not written anew yet take it."""

import hashlib
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.build import Loaders, agreed_on
from lockstep.config.nodes import instantiate, instantiate_as
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.dataset import class_names, whole_of
from lockstep.data.loader import BatchLoader
from lockstep.data.partition import seeded
from lockstep.distributed.world import World, require_same_data
from lockstep.errors import ConfigError
from lockstep.loggers.base import Logger, LoggerList, RunInfo, hyperparameters
from lockstep.loggers.run_json import RunJson, run_facts
from lockstep.preflight_rules import check_batch_size
from lockstep.runs.record import read_run
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.initial_weights import file_of_weights
from lockstep.snapshots.manager import SnapshotManager
from lockstep.snapshots.resume import compared
from lockstep.strategies.base import Strategy, warn_of_gradient_hooks
from lockstep.tasks.base import Task, modules_of
from lockstep.training.evaluation import Evaluations, Evaluator, images_wanted
from lockstep.training.parameter_groups import ParameterRules, can_fuse
from lockstep.training.setup import cast
from lockstep.training.state import TrainSettings, TrainState, time_limit
from lockstep.training.timing import StepTimer
from lockstep.training.watchers import RunningMetrics
from lockstep.training.weight_check import WeightCheck

WRITTEN_NUMBERS = 2000  # of validation samples in run.json; of more, the recipe and the hash


def train_state(config: RunConfig, strategy: Strategy, loader: BatchLoader, takes_steps: bool = True) -> TrainState:
    """The run that trains the strategy's model on the samples of `loader`.

    takes_steps: False works on any number of ranks, also on more than the batch has samples.
    """
    world, trainer = strategy.world, config.trainer
    task = build_task(config, world)
    settings = train_settings(config, loader, strategy.data_parallel_size(world.size), takes_steps)
    rules = ParameterRules(config.parameters.no_decay, config.parameters.groups)
    node = dict(config.optimizer)
    if "fused" in node and node["fused"] is None:
        node["fused"] = can_fuse(strategy.model)
    optimizer = rules.optimizer(partial(instantiate, node), strategy)
    schedule: Any = partial(
        instantiate_as,
        object,
        config.scheduler,
        "scheduler",
        steps_per_epoch=settings.steps_per_epoch,
        total_steps=settings.total_steps,
        objective_mode="min" if config.objective is None else task.mode(config.objective),
    )
    cuts_batches = world.size * settings.gradient_accumulation_steps > 1
    if takes_steps and cuts_batches and strategy.batch_norm_sees():  # else they are cut alike on any number of ranks
        warn_of_gradient_hooks(strategy.model)
    return TrainState(
        settings=settings,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        schedule=schedule,
        ema=trainer.ema,
        nan=config.watch.nan,
        read=loader.read,
        objective=config.objective,
        buffers=trainer.buffers,
    )


def build_task(config: RunConfig, world: World) -> Task:
    """The task, with its own modules on the rank's device."""
    with seeded(config.seed):
        task = instantiate_as(Task, config.task, "task")
    precision = config.trainer.precision
    for module in modules_of(task):
        cast(module, "fp32" if precision == "bf16-true" else precision)  # losses are of float32
        if world.device.type == "mps":  # weights of classes are of float64, which it lacks
            module.float()
        module.to(world.device)
    return task


def train_settings(config: RunConfig, loader: BatchLoader, shares: int, takes_steps: bool) -> TrainSettings:
    trainer = config.trainer
    return TrainSettings(
        epochs=trainer.epochs,
        epoch_samples=len(loader),
        max_steps=trainer.max_steps,
        max_seconds=time_limit(trainer.max_time),
        pause_after=trainer.pause_after,
        batch_size=check_batch_size(config, shares) if takes_steps else trainer.batch_size,
        gradient_accumulation_steps=trainer.gradient_accumulation_steps,
        max_grad_norm=trainer.max_grad_norm,
        precision=trainer.precision,
        eval_batch_size=config.evaluation.batch_size,
        eval_every=config.evaluation.every if trainer.final is None else trainer.epochs,
        patience=config.evaluation.patience,
        log_every=config.logging.every,
        draws_by_sample=not trainer.compile,
    )


def snapshots(
    config: RunConfig,
    record: ConfigRecord,
    state: TrainState,
    loaders: Loaders,
    loggers: LoggerList,
    weights: WeightCheck,
) -> SnapshotManager:
    """The manager of this run's snapshots. Raises ConfigError, on all ranks, if their training data differs."""
    count, data = len(loaders.train), data_fingerprint(loaders.train.dataset)
    require_same_data(state.strategy.world, "training data", count, data)
    fingerprint = model_config(record) | {
        "optimizer": config.optimizer["_target_"],
        "training samples": count,
        "training data": data,
        "seed": config.seed,
    }
    if loaders.split is not None:
        fingerprint["validation data"] = loaders.split
    return SnapshotManager(
        state,
        config.run_dir,
        fingerprint,
        agreed_on(record.shown),
        every=config.snapshot.every,
        keep_last=config.snapshot.keep_last,
        form=config.snapshot.format,
        mirror=config.snapshot.mirror,
        before_save=loggers.flush,  # the curves of a killed run reach as far as its snapshots
        compare_weights=weights.check_now,
    )


def model_config(record: ConfigRecord) -> dict[str, Any]:
    """{key: value} of the model, without values from environment variables."""
    return {key: value for key, value in record.shown.items() if key.startswith("model.")}


def running_metrics(config: RunConfig, state: TrainState, loggers: LoggerList) -> tuple[RunningMetrics, StepTimer]:
    """What is logged while the run trains, and what measures its steps."""
    timer = StepTimer()
    if config.profiler.enabled:
        from lockstep.training.step_profiler import StepProfiler

        every, after, steps = config.profiler.every, config.profiler.trace_after, config.profiler.trace_steps
        timer = StepProfiler(state, loggers, config.run_dir, every, after, steps)
    return RunningMetrics(state, loggers), timer


def evaluators(config: RunConfig, state: TrainState, loaders: Loaders, loggers: LoggerList) -> Evaluations:
    """The evaluations. All ranks prepare what the keys of rank 0's loggers ask for."""
    images = images_wanted(config.logger.values())
    decides = None if config.objective is None else "val"
    at_each = {"val"} if loaders.val is not None else set()
    at_each |= {"test"} if config.evaluation.test == "every" else set()
    evaluators = {
        name: Evaluator(state, loader, loggers, images, name)
        for name, loader in (("val", loaders.val), ("test", loaders.test))
        if name in at_each and loader is not None
    }
    test = Evaluator(state, loaders.test, loggers, images, "test")
    return Evaluations(decides, evaluators, None if config.evaluation.test == "never" else test)


def loggers(config: RunConfig, state: TrainState, before_writing: Callable[[], None]) -> LoggerList:
    """The loggers on rank 0, none on other ranks. before_writing: see LoggerList."""
    members: list[Logger] = []
    if state.strategy.world.is_rank_zero:
        members = [instantiate_as(Logger, node, f"logger.{name}") for name, node in config.logger.items()]
        is_paused = lambda: state.reached_limit == "trainer.pause_after"  # noqa: E731
        name = config.objective or f"test/{state.task.monitor}"
        members.append(RunJson(name, state.task.mode(name), is_paused))
    return LoggerList(members, before_writing)


def run_info(config: RunConfig, record: ConfigRecord, snapshots: SnapshotManager, loaders: Loaders) -> RunInfo:
    """What loggers receive at the start. A collective."""
    state, world = snapshots.state, snapshots.world
    names = {"training_samples": "training samples", "training_data": "training data"}
    data = {name: snapshots.fingerprint[key] for name, key in names.items()}
    if loaders.val is not None:
        data |= {"validation_samples": len(loaders.val), "validation_data": loaders.split}
    if loaders.numbers is not None and len(loaders.numbers) <= WRITTEN_NUMBERS:
        data["validation_numbers"] = " ".join(map(str, loaders.numbers.tolist()))
    data |= {"test_samples": len(loaders.test), "test_data": data_fingerprint(loaders.test.dataset)}
    data |= _beginning(config.parameters.init, snapshots) if world.is_rank_zero else {}
    text = getattr(whole_of(loaders.train.dataset), "text", None)
    if text is not None:
        data["symbols"] = text.symbols_hash
    computed = [key for key in compared(record.shown) if not key.startswith("logger.")]
    facts = run_facts(world, state.progress.step, record, computed, data)
    facts["classes"] = class_names(loaders.train.dataset)
    return RunInfo(
        run_dir=snapshots.run_dir,
        config_yaml=record.files["config.yaml"],
        hyperparameters=hyperparameters(record, world.size),
        metrics=list(state.task.metrics),
        world_size=world.size,
        data_parallel_size=state.strategy.data_parallel_size(world.size),
        train_samples=len(loaders.train),
        val_samples=0 if loaders.val is None else len(loaders.val),
        eval_samples=len(loaders.test),
        batch_size=state.settings.batch_size,
        epochs=state.settings.epochs,
        start_step=state.progress.step,
        best=state.progress.best,
        best_step=state.progress.best_step,
        objective=config.objective,
        is_final=config.trainer.final is not None,
        facts=facts,
        script=Path(shlex.split(record.command)[1]),
        flags=record.flags,
    )


def earlier_test(run: RunInfo, world: World) -> Any:
    """The test that run.json has of an earlier start of this run: {"step": of the weights, "metrics"}. None if there is
    none, if the run goes on from a step before it, or if the test data is other data now. A collective."""
    found = None
    if world.is_rank_zero and run.start_step > 0:
        with suppress(ConfigError):
            before = read_run(run.run_dir)
            test, data = before.get("test"), before["data"].get("test_data")
            if test and test["step"] <= run.start_step and data == run.facts["data"]["test_data"]:
                found = test
    return world.broadcast_json(found)


def _beginning(init: str | None, snapshots: SnapshotManager) -> dict[str, str]:
    """Hashes of the files that the run began with: of `parameters.init=`, or of a snapshot in another folder."""
    files = {} if init is None else {"init": file_of_weights(init)}
    before = snapshots.resumed_from
    if before is not None:
        files = {} if before.parent.parent.samefile(snapshots.run_dir) else {"resume": before}
    hashes = {}
    for key, path in files.items():
        with suppress(OSError), path.open("rb") as file:  # a run that still trains may have removed its snapshot
            hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return hashes
