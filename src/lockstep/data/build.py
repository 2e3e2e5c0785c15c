"""The data of a run, from its config: the splits, what the data tells the config, and what reads them. In each rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lockstep.config.check import instantiate, instantiate_as
from lockstep.config.schema import RunConfig
from lockstep.data import source as sources
from lockstep.data.augment import ShiftFlip
from lockstep.data.loader import Loader
from lockstep.data.partition import Order, fold_in, seeded
from lockstep.data.reader import Check, SampleReader, request_of
from lockstep.data.source import DataSource, Splits, class_numbers, of_each_sample, unwrapped
from lockstep.data.split import hold_out
from lockstep.errors import ConfigError, first_line, show
from lockstep.failures.record import exception_record

log = logging.getLogger(__name__)

SOURCE, TRANSFORMS = 11, 12  # folded into the seeds of what data sets and transforms draw when they are made
TOLD = ("dataset", "model", "task")  # sections in which null is a value of the data
NAMES = {"train": "training data", "val": "validation data", "test": "test data"}


@contextmanager
def source_of(config: RunConfig) -> Iterator[DataSource]:
    """The data set, whose errors in the block are raised as ConfigError: of a file, a download, a package, a column."""
    try:
        with seeded(fold_in(config.seed, SOURCE)):
            yield instantiate_as(DataSource, config.dataset, "dataset")
    except ConfigError:
        raise
    except Exception as error:
        failed = exception_record(error)
        place = f"{failed['file']}:{failed['line']}: " if "file" in failed else ""
        why = f"{place}{type(error).__name__}: {first_line(error)}"
        what = f"the data of {config.dataset['_target_']} cannot be read ({why})"
        advice = f"other values of dataset, data_dir=<another folder than {config.data_dir}>, or dataset=digits"
        raise ConfigError(f"{what}; correct what it names, or type {advice}") from error


def prepare_first(config: RunConfig) -> None:
    """`DataSource.prepare`, once on a machine."""
    with source_of(config) as source:
        source.prepare()


def build_data(config: RunConfig, needs_training_data: bool = True) -> Splits:
    """The data, the same on every rank. Where training data is not needed, the tests' may take its place, and nothing
    has to be held out. Raises ConfigError for a split that is empty or has other classes, or cannot be held out."""
    loader = config.loader
    with source_of(config) as source:
        train, test, val = source.splits()
    is_stand_in = not needs_training_data and not train
    if is_stand_in:
        train = test
    if not config.holds_out and config.trainer.final is None:
        val = None
    if val is not None and config.trainer.final is not None:
        what = f"trainer.final={config.trainer.final} trains on what is held out, and here those are other data"
        raise ConfigError(f"{what}; type trainer.final=null")
    for split, data in [("train", train), ("test", test), *([] if val is None else [("val", val)])]:
        if not hasattr(data, "__len__") or getattr(type(data), "__getitem__", None) in (None, Dataset.__getitem__):
            what = f"the {NAMES[split]}, of {type(data).__name__}, has no __len__ or no __getitem__"
            raise ConfigError(f"{what}; give it both, or write a stream into tars for dataset=tar_shards")
        if not len(data):
            raise ConfigError(f"the {NAMES[split]} has no samples; type dataset=<another one>, or correct its folder")
        advice = "give both the same attribute `classes`, or type dataset=image_folder, which compares names"
        names = sources.class_names(train), sources.class_names(data)
        sources.require_same_classes(*names, "the training data", f"the {NAMES[split]}", advice)
    if val is not None or not config.holds_out or is_stand_in:
        return Splits(train, test, val)
    fold = None if loader.folds is None or loader.fold is None else (loader.fold, loader.folds)
    try:
        train, val = hold_out(train, loader.validation, fold, loader.split_seed, loader.groups)
    except ConfigError:
        if needs_training_data:
            raise
        return Splits(train, test)
    if len(train) == 1:
        log.warning("one training sample is left, and all others are held out: see loader.validation")
    return Splits(train, test, val)


def completed(config: RunConfig, data: Splits) -> RunConfig:
    """`config` with the training data's values for each `shape`, `classes` and `num_classes` that is null;
    `dataset.classes` may stay null. Raises ConfigError where the data does not tell."""
    inputs, targets = reader_of(config, data.train, "train", True).read(request_of([0]))
    own = list(inputs.shape[1:]) if isinstance(inputs, Tensor) else None
    classes = config.dataset.get("classes")
    if classes is None:
        classes = sources.class_count(data.train, targets[0] if isinstance(targets, Tensor) else None)
    found = {"shape": config.dataset.get("shape") or own, "classes": classes, "num_classes": classes}
    is_fixed = hasattr(unwrapped(data.train)[0], "gather") and not config.loader.transforms

    def told(value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [told(item, key) for item in value]
        if not isinstance(value, dict):
            return value
        values = {name: told(item, f"{key}.{name}") for name, item in value.items()}
        for name in found.keys() & values.keys():
            if values[name] is None:
                values[name] = found[name]
            if values[name] is None and name != "shape" and not key.startswith("dataset"):
                what = f"{key}.{name} is not known: the training data has neither `classes` nor `targets`"
                raise ConfigError(f"{what}; type dataset.classes=<how many>")
        if is_fixed and values.get("shape", own) != own:
            what = f"{key}.shape={show(values['shape'])}, and the samples have the shape {show(own)}"
            raise ConfigError(f"{what}; type {key}.shape={show(own)}")
        return values

    metrics = told(config.evaluation.metrics, "evaluation.metrics")
    for name, node in metrics.items():
        if classes is not None and node.get("num_classes", classes) != classes:
            what, own_key = f"and the data has {classes} classes", f"evaluation.metrics.{name}.num_classes"
            raise ConfigError(f"{own_key}={node['num_classes']}, {what}; type {own_key}={classes}")
    loader = replace(config.loader, batch_transforms=told(config.loader.batch_transforms, "loader.batch_transforms"))
    parts = {name: told(getattr(config, name), name) for name in TOLD}
    return replace(config, loader=loader, evaluation=replace(config.evaluation, metrics=metrics), **parts)


def reader_of(
    config: RunConfig, dataset: Any, split: str, is_trained: bool, check: Check | None = None
) -> SampleReader:
    """What reads the samples of a split: "train", "val" or "test". is_trained: whether with the transforms of training.
    check: of targets. Those in memory are looked at here."""
    loader = config.loader
    with seeded(fold_in(config.seed, TRANSFORMS)):
        transforms = instantiate(loader.transforms if is_trained else loader.test_transforms)
        collate = instantiate(loader.collate_fn) or default_collate
    if transforms:
        transforms = [with_mask, *transforms]
    reader = SampleReader(dataset, NAMES[split], config.seed, transforms, collate, check)
    targets = of_each_sample(dataset, "targets") if hasattr(unwrapped(dataset)[0], "gather") else None
    if targets is not None:
        reader.check_targets(torch.as_tensor(targets), range(len(targets)))
    return reader


def with_mask(sample: Any) -> Any:
    """A class for each pixel as torchvision's Mask, which transforms of v2 move with the image."""
    if isinstance(sample, dict):
        known = sources.TARGET_KEYS
        return {key: sources.map_tensors(as_mask, value) if key in known else value for key, value in sample.items()}
    if not isinstance(sample, tuple) or all(one.dim() < 2 for one in sources.tensors_in(sample[1])):
        return sample
    inputs, target = sample
    return inputs, sources.map_tensors(as_mask, target)


def as_mask(target: Tensor) -> Tensor:
    from torchvision.tv_tensors import Mask, TVTensor  # takes half a second

    return target if isinstance(target, TVTensor) or target.dim() < 2 else Mask(target)


def loader_of(config: RunConfig, reader: SampleReader, is_trained: bool, **of_rank: Any) -> Loader:
    """What reads a split for a rank. of_rank: what `Loader` takes beside the config's."""
    section, transforms, augment, draws, weights, shards = config.loader, list[Any](), None, None, None, None
    if is_trained:
        if section.sampling is not None:
            weights = sampling_weights(reader.dataset, section.sampling)
        draws = getattr(unwrapped(reader.dataset)[0], "draws", None)
        shards = of_each_sample(reader.dataset, "shards")
        if section.augment is not None:
            augment = instantiate_as(ShiftFlip, section.augment, "loader.augment", epochs=config.trainer.epochs)
        transforms = instantiate(section.batch_transforms)
    order = Order(len(reader), config.seed, draws, weights, shards)
    of_rank |= {"seed": config.seed, "augment": augment, "transforms": transforms, "workers": section.num_workers}
    return Loader(reader, order, **of_rank)


def sampling_weights(dataset: Any, sampling: str) -> Tensor:
    """(N,) float64 by which an epoch draws its samples: "balanced" gives each class the same share; "weights"."""
    if sampling == "balanced":
        classes = class_numbers(dataset)
        weights = None if classes is None else 1 / np.bincount(classes).clip(1)[classes]
    else:
        weights = of_each_sample(dataset, "weights")
    if weights is None:
        name = "targets" if sampling == "balanced" else "weights"
        what = f"loader.sampling={sampling} needs an attribute `{name}` of the training data, a number for each sample"
        raise ConfigError(f"{what}; give it one, or type loader.sampling=null")
    return torch.as_tensor(weights, dtype=torch.float64)
