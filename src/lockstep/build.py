"""Builds the parts of a run from its config. What else reads the config: see CONTRIBUTING.md."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lockstep.build_data import batch_transforms, completed, datasets, prepare, samples
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import NOT_PASSED, as_dict, nodes_with_target
from lockstep.config.targets import instantiate, instantiate_as, matching_arguments
from lockstep.data.dataset import weight_of_each_sample
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import random_states_kept, seeded
from lockstep.data.samples import Samples
from lockstep.data.transforms import Augment
from lockstep.distributed.sync_batch_norm import BatchNorm, convert_sync_batch_norm, refuse_batch_norms
from lockstep.distributed.world import World, require_same_code, require_same_config, require_same_data
from lockstep.errors import ConfigError
from lockstep.failures import reporter
from lockstep.loggers.base import LoggerList
from lockstep.models.base import WeightsFromData, give_shapes, has_lazy_layers
from lockstep.preflight import accumulates_more, check_batch_size
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.initial_weights import freeze, load_initial_weights
from lockstep.snapshots.manager import SnapshotManager
from lockstep.strategies.base import Strategy, refuse_changing_weights, warn_of_gradient_hooks
from lockstep.strategies.gradient_sync import AfterBackward
from lockstep.tasks.base import Task, modules_of
from lockstep.text import first_line
from lockstep.training.checkpointing import checkpoint_activations
from lockstep.training.evaluation import Evaluations, Evaluator, Wanted, wanted_by
from lockstep.training.parameter_groups import ParameterRules, can_fuse
from lockstep.training.setup import cast, model_dtype, model_memory_format, prepare_model
from lockstep.training.state import TrainSettings, TrainState, time_limit
from lockstep.training.timing import StepTimer, StragglerWatch
from lockstep.training.watchers import RunningMetrics
from lockstep.training.weight_check import WeightCheck


class Loaders(NamedTuple):
    """What gives this rank its share of each data set. val: None without a validation set.

    split: which samples the validation set has, in words with a hash; None without one.
    numbers: (n,) of the validation samples in the training data; None if they are other data.
    """

    train: BatchLoader
    val: BatchLoader | None
    test: BatchLoader
    split: str | None = None
    numbers: Tensor | None = None


def model_and_data(cfg: DictConfig, world: World, strategy: Strategy) -> tuple[DictConfig, Loaders]:
    """Hand the model to the strategy. Returns the config with what the data tells, and the loaders of the data sets.

    Nothing here keeps the model: a strategy may hold only a part of it on this rank.
    """
    reporter.enter("prepare")
    world.once_per_machine(lambda: prepare(cfg))
    config = as_dict(cfg)
    for group in ("model", "dataset", "optimizer", "scheduler", "strategy", "gradient_sync", "task"):
        for _, node in nodes_with_target(config.get(group)):
            with suppress(Exception):  # what fails here fails again when it is instantiated, with a message
                get_object(node["_target_"])  # a module that seeds torch when it is imported does so here
    reporter.enter("build")
    require_same_code(world)
    found = datasets(cfg)
    require_same_data(world, "test data", len(found.test), data_fingerprint(found.test))
    split = None
    if found.val is not None:
        split = data_fingerprint(found.val) if found.held_out is None else str(found.held_out)
        require_same_data(world, "validation data", len(found.val), split)
    cfg = completed(cfg, found.train)
    check_sizes(cfg)
    trainer, data = cfg.trainer, cfg.dataset
    train_samples, test_samples = samples(cfg, found.train, "training data"), samples(cfg, found.test, "test data")
    val_samples = None if found.val is None else samples(cfg, found.val, "validation data")
    with seeded(cfg.seed):
        torch.set_default_dtype(torch.float32)  # a file of the user's may have set another: `trainer.precision` decides
        with strategy.building(world.size):
            model = instantiate_as(nn.Module, cfg.model, "model")
        torch.set_default_dtype(torch.float32)  # a constructor, too
        memory_format = model_memory_format(model, trainer.channels_last, world.device)
        device, dtype = strategy.device_before_setup(world), model_dtype(trainer.precision)
        model = prepare_model(model, world, device, trainer.precision, memory_format, trainer.compile)
        set_weights_from_data(model, train_samples, Converter(device, dtype, memory_format, data.mean, data.std))
    load_initial_weights(model, cfg.init, cfg.new_layers)
    freeze(model, cfg.freeze)
    is_synced = strategy.syncs_batch_norm(cfg.sync_bn.mode, world.size)
    if accumulates_more(cfg) and world.size > 1:
        refuse_batch_norms(model, BatchNorm if is_synced else nn.SyncBatchNorm)
    if is_synced:
        model = convert_sync_batch_norm(model, world)
    elif world.size == 1 or strategy.supports_sync_bn:
        model = convert_sync_batch_norm(model, world, nn.SyncBatchNorm)  # torch's refuses tensors of a CPU
    refuse_changing_weights(model, world.size)
    strategy.validate_model(model, world.size)
    checkpoint_activations(model, trainer.checkpoint_activations)
    is_after = accumulates_more(cfg) and world.size > 1
    gradient_sync = AfterBackward() if is_after else instantiate(cfg.gradient_sync)
    strategy.setup(model, world, gradient_sync, trainer.precision)

    converter = Converter(world.device, dtype, memory_format, data.mean, data.std)
    share = strategy.evaluation_share(world)
    augment, transforms = Augment(**data.augment, epochs=trainer.epochs), batch_transforms(cfg)
    weights = None
    if data.sampling is not None and instantiate(cfg.mode).reads_training_data:
        weights = weight_of_each_sample(found.train, data.sampling)
    if isinstance(train_samples, Samples) and train_samples.stream is not None:
        train_samples.stream.share(*share)
    train = BatchLoader(train_samples, converter, *share, cfg.seed, augment, data.workers, transforms, weights)
    val, test = (
        None if evaluated is None else BatchLoader(evaluated, converter, *share, cfg.seed, workers=data.workers)
        for evaluated in (val_samples, test_samples)
    )
    assert test is not None
    for loader in filter(None, (train, val, test)):
        world.resources.callback(loader.close)
    return cfg, Loaders(train, val, test, split, None if found.held_out is None else found.held_out.numbers)


def check_sizes(cfg: DictConfig) -> None:
    """Raise ConfigError for a size of training images that the model cannot take, though it takes that of the data."""
    sizes, shape = cfg.dataset.augment.sizes, cfg.dataset.shape
    if sizes is None:
        return
    with random_states_kept(), torch.no_grad(), torch.device("meta"):  # without weights
        try:
            model = instantiate_as(nn.Module, cfg.model, "model")
            model(torch.empty(2, *shape))
        except Exception:  # a model of the user's may need its weights; the first step shows what it takes
            return
        for size in sizes:
            try:
                model(torch.empty(2, shape[0], size, size))
            except Exception as error:
                raise ConfigError(
                    f"dataset.augment.sizes has {size}, and the model takes no images of {size}x{size} pixels "
                    f"({first_line(error)}); type model=resnet18, whose last layer sees the mean over an image of any "
                    f"size, or dataset.augment.sizes=null"
                ) from None


def set_weights_from_data(model: nn.Module, data: Any, converter: Converter) -> None:
    """Give a model whose first weights, or their shapes, depend on the training data the samples that it needs."""
    if has_lazy_layers(model):
        with random_states_kept():  # reading a sample seeds what its weights are drawn from
            inputs = BatchLoader(data, converter).raw_inputs(1, epoch=0)
        give_shapes(model, converter(converter.to_device(inputs), ())[0])
        model.to(memory_format=converter.memory_format)
    if isinstance(model, WeightsFromData):
        inputs = BatchLoader(data, converter).raw_inputs(model.samples_wanted, epoch=0)
        model.set_weights_from(converter(converter.to_device(inputs), ())[0])


def train_state(cfg: DictConfig, strategy: Strategy, loader: BatchLoader, takes_steps: bool = True) -> TrainState:
    """The run that trains the strategy's model on the samples of `loader`.

    takes_steps: False works on any number of ranks, also on more than the batch has samples.
    """
    trainer = cfg.trainer
    with seeded(cfg.seed):
        task = instantiate_as(Task, cfg.task, "task")
    shares = strategy.data_parallel_size(strategy.world.size)
    for module in modules_of(task):
        cast(module, "fp32" if trainer.precision == "bf16-true" else trainer.precision)  # losses are of float32
        if strategy.world.device.type == "mps":  # weights of classes are of float64, which it lacks
            module.float()
        module.to(strategy.world.device)
    settings = TrainSettings(
        epochs=trainer.epochs,
        epoch_samples=len(loader),
        max_steps=trainer.max_steps,
        max_seconds=time_limit(trainer.max_time),
        pause_after=trainer.pause_after,
        batch_size=check_batch_size(cfg, shares) if takes_steps else trainer.batch_size,
        gradient_accumulation_steps=1 if accumulates_more(cfg) else trainer.gradient_accumulation_steps,
        accumulates_more=accumulates_more(cfg),
        max_grad_norm=trainer.max_grad_norm,
        precision=trainer.precision,
        eval_batch_size=cfg.evaluation.batch_size,
        eval_every=cfg.evaluation.every if trainer.final is None else trainer.epochs,
        patience=cfg.evaluation.patience,
        log_every=cfg.logging.every,
        draws_by_sample=not trainer.compile,
    )
    rules = ParameterRules(cfg.optimizer.get("no_decay") or (), cfg.optimizer.get("groups") or ())
    options = {key: value for key, value in cfg.optimizer.items() if key not in NOT_PASSED["optimizer"]}
    if options.get("fused") == "auto":
        options["fused"] = can_fuse(strategy.model)
    make = instantiate(OmegaConf.create(options))
    optimizer = rules.optimizer(make, strategy)
    schedule = instantiate(cfg.scheduler)
    # By name, and only what the signature has: torch's own schedulers have no parameter for these facts.
    facts = {
        "steps_per_epoch": settings.steps_per_epoch,
        "total_steps": settings.total_steps,
        "objective_mode": task.mode(cfg.objective),
    }
    with_facts = partial(schedule, **matching_arguments(schedule, facts))
    cuts_batches = strategy.world.size * settings.gradient_accumulation_steps > 1 or settings.accumulates_more
    if takes_steps and cuts_batches and strategy.batch_norm_sees():  # else they are cut alike on any number of ranks
        warn_of_gradient_hooks(strategy.model)
    return TrainState(
        settings=settings,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        schedule=with_facts,
        ema=trainer.ema,
        nan=cfg.watch.nan,
        read=loader.read,
        objective=cfg.objective,
        keeps_gradients=_wanted(cfg).histograms,
        buffers=trainer.buffers,
    )


def snapshots(
    cfg: DictConfig,
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
        "optimizer": cfg.optimizer._target_,
        "training samples": count,
        "training data": data,
        "seed": cfg.seed,
    }
    if loaders.split is not None:
        fingerprint["validation data"] = loaders.split
    return SnapshotManager(
        state,
        cfg.run_dir,
        fingerprint,
        agreed_on(record.shown),
        every=cfg.snapshot.every,
        keep_last=cfg.snapshot.keep_last,
        form=cfg.snapshot.format,
        mirror=cfg.snapshot.mirror,
        before_save=loggers.flush,  # the curves of a killed run reach as far as its snapshots
        compare_weights=weights.check_now,
    )


def model_config(record: ConfigRecord) -> dict[str, Any]:
    """{key: value} of the model, without values from environment variables."""
    return {key: value for key, value in record.shown.items() if key.startswith("model.")}


def weight_check(cfg: DictConfig, state: TrainState) -> WeightCheck:
    """What compares the ranks' weights."""
    return WeightCheck(state, cfg.watch.every, cfg.watch.weights)


def running_metrics(cfg: DictConfig, state: TrainState, loggers: LoggerList) -> tuple[RunningMetrics, StepTimer]:
    """What is logged while the run trains, and what measures its steps."""
    world, strategy, timer = state.strategy.world, state.strategy, StepTimer()
    if cfg.profiler.enabled:
        from lockstep.training.step_records import StepProfiler

        every, after, steps = cfg.profiler.every, cfg.profiler.trace_after, cfg.profiler.trace_steps
        timer = StepProfiler(state, loggers, cfg.run_dir, every, after, steps)
    if cfg.watch.straggler is None or world.size == 1 or strategy.communicates_in_forward:
        return RunningMetrics(state, loggers), timer
    parameters = list(strategy.model.parameters())
    stragglers = StragglerWatch(world, parameters, cfg.watch.straggler, state.settings.log_every, timer)
    return RunningMetrics(state, loggers, stragglers), stragglers


def evaluators(cfg: DictConfig, state: TrainState, loaders: Loaders, loggers: LoggerList) -> Evaluations:
    """The evaluations. All ranks prepare what the keys of rank 0's loggers ask for."""
    decides, wanted = cfg.objective.partition("/")[0], _wanted(cfg)
    at_each = {"val"} if loaders.val is not None else set()
    at_each |= {decides} | ({"test"} if cfg.evaluation.test == "every" else set())
    of_decided = {name: wanted if name == decides else Wanted(wanted.images) for name in ("val", "test")}
    evaluators = {
        name: Evaluator(state, loader, loggers, of_decided[name], name)
        for name, loader in (("val", loaders.val), ("test", loaders.test))
        if name in at_each and loader is not None
    }
    test = Evaluator(state, loaders.test, LoggerList(loggers.loggers), of_decided["test"], "test")
    return Evaluations(decides, evaluators, None if cfg.evaluation.test == "never" else test)


def _wanted(cfg: DictConfig) -> Wanted:
    return wanted_by(cfg.get("logger", {}).values())  # logger=[] leaves no section


def check_same_config(record: ConfigRecord, world: World) -> None:
    """Raise ConfigError, on all ranks, if their configs differ. A collective."""
    hint = "type the same command on every node"
    require_same_config(world, agreed_on(record.flat), agreed_on(record.shown), hint)


def agreed_on(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must agree on: all but how they were launched."""
    return {key: value for key, value in flat.items() if not key.startswith("launch.")}
