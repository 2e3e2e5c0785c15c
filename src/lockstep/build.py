"""Builds the parts of a run in each rank: data, then model, then what trains, evaluates, saves and logs.

Each function with random numbers has a seed block of its own, so that none of them depends on what was built before.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from hydra.utils import get_object
from torch import Tensor, nn

from lockstep.config.nodes import check_nodes, instantiate_as, nodes_in
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.build import DataSets, batch_transforms, completed, datasets, prepare, samples
from lockstep.data.dataset import weight_of_each_sample
from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import random_states_kept, seeded
from lockstep.data.samples import Samples
from lockstep.data.transforms import Augment
from lockstep.distributed.sync_batch_norm import convert_sync_batch_norm
from lockstep.distributed.world import World, require_same_code, require_same_config, require_same_data
from lockstep.errors import ConfigError
from lockstep.failures import reporter
from lockstep.models.base import WeightsFromData, give_shapes, has_lazy_layers
from lockstep.modes.base import Mode
from lockstep.preflight import Parts
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.initial_weights import freeze, load_initial_weights
from lockstep.strategies.base import refuse_changing_weights
from lockstep.text import first_line
from lockstep.training.checkpointing import checkpoint_activations
from lockstep.training.setup import model_dtype, model_memory_format, prepare_model


# until issue 40
class Data(NamedTuple):
    """The data sets of a run, and what reads their samples. split: which samples validate, in words; None for none."""

    sets: DataSets
    train: Any
    val: Any
    test: Any
    split: str | None


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


def model_and_data(config: RunConfig, world: World, parts: Parts) -> tuple[RunConfig, Loaders]:
    """Hand the model to the strategy. Returns the config with what the data tells, and the loaders of the data sets.

    Nothing here keeps the model: a strategy may hold only a part of it on this rank.
    """
    reporter.enter("prepare")
    world.once_per_machine(lambda: prepare(config))
    reporter.enter("build")
    import_nodes(config)
    require_same_code(world)
    config, data = build_data(config, world, parts.mode)
    converter = build_model(config, world, parts, data)
    return config, build_loaders(config, world, parts, data, converter)


# until issue 42
def import_nodes(config: RunConfig) -> None:
    """A module that seeds torch when it is imported does so here."""
    for group in ("model", "dataset", "optimizer", "scheduler", "strategy", "gradient_sync", "task"):
        for _, node in nodes_in(vars(config.dataset) if group == "dataset" else getattr(config, group), group):
            with suppress(Exception):  # what fails here fails again when it is instantiated, with a message
                get_object(node["_target_"])


def build_data(config: RunConfig, world: World, mode: Mode) -> tuple[RunConfig, Data]:
    """The data sets, the same on all ranks, and the config with what they tell. A collective."""
    found = datasets(config, mode)
    require_same_data(world, "test data", len(found.test), data_fingerprint(found.test))
    split = None
    if found.val is not None:
        split = data_fingerprint(found.val) if found.held_out is None else str(found.held_out)
        require_same_data(world, "validation data", len(found.val), split)
    asked, config = config, completed(config, found.train)
    if config.model != asked.model:  # the data has told its shape and classes
        check_nodes("model", config.model)
    check_sizes(config)
    train, test = samples(config, found.train, "training data"), samples(config, found.test, "test data")
    val = None if found.val is None else samples(config, found.val, "validation data")
    return config, Data(found, train, val, test, split)


def build_model(config: RunConfig, world: World, parts: Parts, data: Data) -> Converter:
    """Hand the model to the strategy. Returns what brings samples to its device, type and memory layout."""
    trainer, strategy = config.trainer, parts.strategy
    with seeded(config.seed):
        torch.set_default_dtype(torch.float32)  # a file of the user's may have set another: `trainer.precision` decides
        with strategy.building(world.size):
            model = instantiate_as(nn.Module, config.model, "model")
        torch.set_default_dtype(torch.float32)  # a constructor, too
        memory_format = model_memory_format(model, trainer.channels_last, world.device)
        device, dtype = strategy.device_before_setup(world), model_dtype(trainer.precision)
        model = prepare_model(model, world, device, trainer.precision, memory_format, trainer.compile)
        mean, std = config.dataset.mean, config.dataset.std
        set_weights_from_data(model, data.train, Converter(device, dtype, memory_format, mean, std))
    load_initial_weights(model, config.parameters.init, config.parameters.new_layers)
    freeze(model, config.parameters.freeze)
    if strategy.syncs_batch_norm(config.sync_bn.mode, world.size):
        model = convert_sync_batch_norm(model, world)
    elif world.size == 1 or strategy.supports_sync_bn:
        model = convert_sync_batch_norm(model, world, nn.SyncBatchNorm)  # torch's refuses tensors of a CPU
    refuse_changing_weights(model, world.size)
    strategy.validate_model(model, world.size)
    checkpoint_activations(model, trainer.checkpoint_activations)
    strategy.setup(model, world, parts.gradient_sync, trainer.precision)
    return Converter(world.device, dtype, memory_format, mean, std)


def build_loaders(config: RunConfig, world: World, parts: Parts, data: Data, converter: Converter) -> Loaders:
    """What reads this rank's shares."""
    section, share = config.dataset, parts.strategy.evaluation_share(world)
    options = {name: getattr(section.augment, name) for name in ("pad", "flip", "sizes")}
    augment, transforms = Augment(**options, epochs=config.trainer.epochs), batch_transforms(config)
    weights = None
    if section.sampling is not None and parts.mode.reads_training_data:
        weights = weight_of_each_sample(data.sets.train, section.sampling)
    if isinstance(data.train, Samples) and data.train.stream is not None:
        data.train.stream.share(*share)
    train = BatchLoader(data.train, converter, *share, config.seed, augment, section.workers, transforms, weights)

    def evaluated(read: Any) -> BatchLoader:
        return BatchLoader(read, converter, *share, config.seed, workers=section.workers)

    val, test = None if data.val is None else evaluated(data.val), evaluated(data.test)
    for loader in filter(None, (train, val, test)):
        world.resources.callback(loader.close)
    held_out = data.sets.held_out
    return Loaders(train, val, test, data.split, None if held_out is None else held_out.numbers)


# until issue 40
def check_sizes(config: RunConfig) -> None:
    """Raise ConfigError for a size of training images that the model cannot take, though it takes that of the data."""
    sizes, shape = config.dataset.augment.sizes, config.dataset.shape
    if sizes is None or shape is None:
        return
    with random_states_kept(), torch.no_grad(), torch.device("meta"):  # without weights
        try:
            model = instantiate_as(nn.Module, config.model, "model")
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


# until issue 40
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


def check_same_config(record: ConfigRecord, world: World) -> None:
    """Raise ConfigError, on all ranks, if their configs differ. A collective."""
    require_same_config(world, agreed_on(record.flat), agreed_on(record.shown), "type the same command on every node")


def agreed_on(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must agree on: all but how they were launched."""
    return {key: value for key, value in flat.items() if not key.startswith("launch.")}
