"""Builds the parts of a run in each rank: data, then model, then what trains, evaluates, saves and logs.

Each function with random numbers has a seed block of its own, so that none of them depends on what was built before.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from hydra.utils import get_object
from torch import nn

from lockstep.config.nodes import check_nodes, instantiate_as, nodes_in
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.build import Data, build_data, completed, loader_of, reader_of, source_of
from lockstep.data.loader import InputConverter, Loader
from lockstep.data.partition import random_states_kept, seeded
from lockstep.data.reader import Request, SampleReader
from lockstep.data.source import map_tensors
from lockstep.distributed.sync_batch_norm import convert_sync_batch_norm
from lockstep.distributed.world import World, require_same_config, require_same_data
from lockstep.failures import reporter
from lockstep.files import short_hash
from lockstep.models.base import WeightsFromData, give_shapes, has_lazy_layers
from lockstep.preflight import Parts
from lockstep.preflight_rules import check_batch_size
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.initial_weights import freeze, load_initial_weights
from lockstep.strategies.base import refuse_changing_weights
from lockstep.tasks.base import Task, modules_of
from lockstep.training.checkpointing import checkpoint_activations
from lockstep.training.setup import cast, model_dtype, model_memory_format, prepare_model


class Loaders(NamedTuple):
    """What gives this rank its share of each split. val: None without a validation set.

    split: which samples the validation set has, in words with a hash; None without one.
    held_out: (n,) indices of the validation samples in the training data; None if they are other data.
    """

    train: Loader
    test: Loader
    task: Task
    split: str | None
    held_out: Any
    val: Loader | None = None


def model_and_data(config: RunConfig, world: World, parts: Parts) -> tuple[RunConfig, Loaders]:
    """Hand the model to the strategy. Returns the config with what the data tells, and the loaders of the data sets.

    Nothing here keeps the model: a strategy may hold only a part of it on this rank.
    """
    reporter.enter("prepare")
    world.once_per_machine(lambda: source_of(config).prepare())
    reporter.enter("build")
    import_nodes(config)
    data = build_data(config, parts.mode.reads_training_data)
    split = check_same_data(data, world)
    told, config = config, completed(config, data)
    if config.model != told.model:
        check_nodes("model", config.model)
    task = build_task(config, world)
    readers = build_readers(config, parts, data, task)
    converter = build_model(config, world, parts, readers["train"])
    loaders = build_loaders(config, world, parts, readers, converter)
    return config, Loaders(task=task, split=split, held_out=data.held_out, **loaders)


# until issue 42
def import_nodes(config: RunConfig) -> None:
    """A module that seeds torch when it is imported does so here."""
    for group in ("model", "dataset", "loader", "optimizer", "scheduler", "strategy", "gradient_sync", "task"):
        for _, node in nodes_in(vars(config.loader) if group == "loader" else getattr(config, group), group):
            with suppress(Exception):  # what fails here fails again when it is instantiated, with a message
                get_object(node["_target_"])


def check_same_data(data: Data, world: World) -> str | None:
    """Raise an error if ranks have other data. Returns what validates, in words with a hash. A collective."""
    require_same_data(world, "test data", len(data.test), data_fingerprint(data.test))
    if data.val is None:
        return None
    held_out = "" if data.held_out is None else f", the samples {short_hash(data.held_out.tobytes())}"
    split = f"{len(data.val)} samples of {data_fingerprint(data.val)}{held_out}"
    require_same_data(world, "validation data", len(data.val), split)
    return split


# until issue 42
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


def build_readers(config: RunConfig, parts: Parts, data: Data, task: Task) -> dict[str, SampleReader]:
    """What reads the samples of each split. Training data that a mode evaluates is transformed as the tests are."""
    check = partial(task.check_targets, classes=config.dataset.get("classes")) if parts.mode.needs_labels else None
    train, is_trained = data.train, not parts.mode.needs_run
    if not is_trained:
        train = getattr(train, "evaluated", train)  # of a text: each token once
    readers = {"train": reader_of(config, train, "train", is_trained, check)}
    for name, split in (("val", data.val), ("test", data.test)):
        if split is not None:
            readers[name] = reader_of(config, split, name, False, check)
    return readers


def build_model(config: RunConfig, world: World, parts: Parts, reader: SampleReader) -> InputConverter:
    """Hand the model to the strategy. Returns what brings inputs to its type and memory layout.

    reader: of the training data.
    """
    trainer, strategy = config.trainer, parts.strategy
    with seeded(config.seed):
        torch.set_default_dtype(torch.float32)  # a file of the user's may have set another: `trainer.precision` decides
        with strategy.building(world.size):
            model = instantiate_as(nn.Module, config.model, "model")
        torch.set_default_dtype(torch.float32)  # a constructor, too
        memory_format = model_memory_format(model, trainer.channels_last, world.device)
        device, dtype = strategy.device_before_setup(world), model_dtype(trainer.precision)
        model = prepare_model(model, world, device, trainer.precision, memory_format, trainer.compile)
        converter = InputConverter(dtype, memory_format, config.dataset.get("mean"), config.dataset.get("std"))
        set_weights_from_data(model, reader, converter, device)
    load_initial_weights(model, config.parameters.init, config.parameters.new_layers)
    freeze(model, config.parameters.freeze)
    if strategy.syncs_batch_norm(config.sync_bn.mode, world.size):
        convert_sync_batch_norm(model, world)
    elif world.size == 1 or strategy.supports_sync_bn:
        convert_sync_batch_norm(model, world, nn.SyncBatchNorm)  # torch's refuses tensors of a CPU
    refuse_changing_weights(model, world.size)
    strategy.validate_model(model, world.size)
    checkpoint_activations(model, trainer.checkpoint_activations)
    strategy.setup(model, world, parts.gradient_sync, trainer.precision)
    return converter.to(world.device)


def build_loaders(
    config: RunConfig, world: World, parts: Parts, readers: dict[str, SampleReader], converter: InputConverter
) -> dict[str, Loader]:
    """What reads this rank's shares of each split."""
    strategy, trainer, trains = parts.strategy, config.trainer, not parts.mode.needs_run
    shares = strategy.data_parallel_size(world.size)
    batch_size = check_batch_size(config, shares) if trains else trainer.batch_size
    plan = partial(strategy.parts, micro_batches=trainer.gradient_accumulation_steps)
    options = (converter, world.device, plan, strategy.evaluation_share(world), batch_size)
    return {name: loader_of(config, reader, name == "train" and trains, *options) for name, reader in readers.items()}


def set_weights_from_data(
    model: nn.Module, reader: SampleReader, converter: InputConverter, device: torch.device
) -> None:
    """Give a model whose first weights, or their shapes, depend on the training data the samples that it needs."""

    def inputs(count: int) -> Any:
        with random_states_kept():  # reading a sample seeds what weights are drawn from
            raw, _ = reader.read(Request(0, 0, np.arange(min(count, len(reader)))))
        return converter.to(device)(map_tensors(lambda tensor: tensor.to(device), raw))

    if has_lazy_layers(model):
        give_shapes(model, inputs(1))
        model.to(memory_format=converter.memory_format)
    if isinstance(model, WeightsFromData):
        model.set_weights_from(inputs(model.samples_wanted))


def check_same_config(record: ConfigRecord, world: World) -> None:
    """Raise ConfigError, on all ranks, if their configs differ. A collective."""
    require_same_config(world, agreed_on(record.flat), agreed_on(record.shown), "type the same command on every node")


def agreed_on(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must agree on: all but how they were launched."""
    return {key: value for key, value in flat.items() if not key.startswith("launch.")}
