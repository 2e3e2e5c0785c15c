"""The data of a run, from its config: the splits, what the data tells the config, and what reads them. In each rank."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from hydra.utils import get_object
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.config.nodes import instantiate, instantiate_as, signature_of
from lockstep.config.schema import RunConfig
from lockstep.data.augment import BatchWide, ShiftFlip
from lockstep.data.loader import InputConverter, Loader
from lockstep.data.partition import Order, Part, fold_in, seeded
from lockstep.data.reader import Check, Request, SampleReader, Stream
from lockstep.data.source import (
    DataSource,
    class_count,
    class_names,
    of_each_sample,
    require_same_classes,
    tensors_in,
    unwrapped,
)
from lockstep.data.split import hold_out
from lockstep.errors import ConfigError
from lockstep.failures.record import exception_record
from lockstep.text import first_line, show

log = logging.getLogger(__name__)

SOURCE, TRANSFORMS = 11, 12  # folded into the seeds of what data sets and transforms draw when they are made
NAMES = {"train": "training data", "val": "validation data", "test": "test data"}


class Data(NamedTuple):
    """The splits of a run. val: None without a validation set.

    held_out: (n,) indices in the training data of the validation samples; None where they are other data.
    """

    train: Any
    val: Any
    test: Any
    held_out: Any = None


def source_of(config: RunConfig) -> DataSource:
    with seeded(fold_in(config.seed, SOURCE)):
        return instantiate_as(DataSource, config.dataset, "dataset")


def prepare_first(config: RunConfig) -> None:
    """`DataSource.prepare` before a rank has started that could report an error: any is raised as ConfigError."""
    try:
        with seeded(config.seed):
            source_of(config).prepare()
    except ConfigError:
        raise
    except Exception as error:
        failed = exception_record(error)
        place = f"{failed['file']}:{failed['line']}: " if "file" in failed else ""
        why = f"{place}{type(error).__name__}: {first_line(error)}"
        what = f"the data of {config.dataset['_target_']} cannot be prepared ({why})"
        raise ConfigError(f"{what}; correct that, or type dataset=<another one>") from error


def build_data(config: RunConfig, needs_training_data: bool = True) -> Data:
    """The data, the same on every rank. Where training data is not needed, the tests' may take its place, and no part
    has to be held out.

    Raises ConfigError for a split without samples, for other classes in one of them, and for what cannot be held out.
    """
    loader = config.loader
    with seeded(fold_in(config.seed, SOURCE)):
        train, test, val = source_of(config).splits()
    if not needs_training_data and (train is None or (hasattr(train, "__len__") and not len(train))):
        train = test
    if not config.holds_out and config.trainer.final is None:
        val = None
    if val is not None and config.trainer.final is not None:
        what = (
            f"trainer.final={config.trainer.final} trains on what is held out, and the validation data are other data"
        )
        raise ConfigError(f"{what}; type trainer.final=null")
    for split, data in (("train", train), ("test", test), ("val", val)):
        if data is None and split != "val":
            raise ConfigError(f"there is no {NAMES[split]}; type dataset=<another one>")
        if hasattr(data, "__len__") and not len(data):
            raise ConfigError(f"the {NAMES[split]} has no samples; type dataset=<another one>, or correct its folder")
        advice = "give both the same attribute `classes`, or type dataset=image_folder, which compares names"
        named = class_names(train), class_names(data), "the training data", f"the {NAMES[split]}"
        require_same_classes(*named, advice)
    if val is not None or not config.holds_out or train is test:
        return Data(train, val, test)
    fold = None if loader.folds is None or loader.fold is None else (loader.fold, loader.folds)
    try:
        train, val = hold_out(train, loader.validation, fold, loader.split_seed, loader.groups)
    except ConfigError:
        if needs_training_data:
            raise
        return Data(train, None, test)
    if len(train) == 1:
        log.warning("one training sample is left, and all others are held out: see loader.validation")
    return Data(train, val, test, unwrapped(val)[1])


def completed(config: RunConfig, data: Data) -> RunConfig:
    """A copy of `config` in which each `shape` and `classes` that is null has the value of the training data, and
    balanced class weights are numbers.

    Raises ConfigError for other numbers of channels than `mean` and `std` have, and for a shape that is neither that of
    data in memory nor what the transforms of training make of it: tests may be of the other one.
    """
    inputs, targets = reader_of(config, data.train, "train", True).read(Request(0, 0, np.zeros(1, dtype=int)))
    first = targets[0] if isinstance(targets, Tensor) else None
    shape, node = list(inputs.shape[1:]) if isinstance(inputs, Tensor) else None, config.dataset
    for name in ("mean", "std"):
        check_channels(name, node.get(name), inputs)
    whole, shapes = unwrapped(data.train)[0], [shape]
    if hasattr(whole, "gather"):
        shapes.append(list(whole.gather(torch.zeros(1, dtype=torch.int64))[0].shape[1:]))

    def told(value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [told(item, key) for item in value]
        if not isinstance(value, dict):
            return value
        values = {name: told(item, f"{key}.{name}") for name, item in value.items()}
        if values.get("shape", 0) is None:
            values["shape"] = node.get("shape") or shape
        elif len(shapes) > 1 and "shape" in values and values["shape"] not in shapes:
            right = f"{key}.shape={show(shape)}"
            what = f"{key}.shape={show(values['shape'])} but the samples have the shape {show(shape)}"
            raise ConfigError(f"{what}; type {right}")
        is_batch_wide = key.startswith("loader.") and "_target_" in values
        if is_batch_wide and "num_classes" in signature_of(get_object(values["_target_"])).parameters:
            values.setdefault("num_classes", None)
        for name in {"classes", "num_classes"} & values.keys():
            with suppress(ConfigError) if key == "dataset" else nullcontext():  # numbers have none, and need none
                values[name] = values[name] or node.get("classes") or class_count(data.train, first)
        return values

    loader = replace(config.loader, batch_transforms=told(config.loader.batch_transforms, "loader.batch_transforms"))
    sections = {name: told(getattr(config, name), name) for name in ("dataset", "model", "task")}
    return with_class_weights(replace(config, loader=loader, **sections), data)


def check_channels(name: str, values: Sequence[float] | None, inputs: Any) -> None:
    """Raise ConfigError for another number of values than inputs (N, C, ...) have channels; one is for all of them."""
    for tensor in tensors_in(inputs):
        is_normalised = tensor.dim() > 1 and (tensor.is_floating_point() or tensor.dtype == torch.uint8)
        if values is None or not is_normalised or len(values) in (1, tensor.shape[1]):
            continue
        right = [0.5] * (tensor.shape[1] if tensor.dim() == 4 else 1)
        what = f"dataset.{name} has {len(values)} numbers, and the samples have the shape {list(tensor.shape[1:])}"
        raise ConfigError(f"{what}; type dataset.{name}={show(right)}, or dataset.{name}=null")


# until issue 42
def with_class_weights(config: RunConfig, data: Data) -> RunConfig:
    """balanced: N / (classes * n) for each class with n of the N training samples."""
    weights, classes = config.task.get("class_weights"), config.task.get("classes") or config.dataset.get("classes")
    if isinstance(weights, list) and classes not in (None, len(weights)):
        what = f"task.class_weights={show(weights)} has {len(weights)} weights, and there are {classes} classes"
        raise ConfigError(f"{what}; type task.class_weights=balanced, or a list of {classes} numbers")
    if weights != "balanced":
        return config
    targets = class_numbers(data.train)
    if targets is None or data.train is data.test:
        what = "task.class_weights=balanced counts the classes of the training data, and it has none here"
        raise ConfigError(f"{what}; type task.class_weights=<a list of {classes} numbers>")
    counts = targets[targets >= 0].bincount(minlength=int(classes or 0)).double()
    balanced = (counts.sum() / (len(counts) * counts.clamp(min=1))).tolist()
    return replace(config, task=config.task | {"class_weights": balanced})


def class_numbers(dataset: Any) -> Tensor | None:
    """(N,) of each sample; None where they are not known without reading samples."""
    targets = of_each_sample(dataset, "targets")
    is_known = targets is not None and targets.ndim == 1 and targets.dtype.kind in "iu"
    return torch.as_tensor(targets).long() if is_known else None


def reader_of(
    config: RunConfig, dataset: Any, split: str, is_trained: bool, check: Check | None = None
) -> SampleReader:
    """What reads the samples of a split: "train", "val" or "test". is_trained: whether with the transforms of training.

    check: of targets. Those in memory are looked at here.
    """
    loader = config.loader
    with seeded(fold_in(config.seed, TRANSFORMS)):
        transforms = instantiate(loader.transforms if is_trained else loader.test_transforms)
        collate = instantiate(loader.collate_fn) or default_collate
    if transforms:
        transforms = [with_mask, *transforms]
    reader = SampleReader(dataset, NAMES[split], config.seed, transforms, collate, loader.on_error == "skip", check)
    targets = of_each_sample(dataset, "targets") if hasattr(unwrapped(dataset)[0], "gather") else None
    if targets is not None:
        reader.check_targets(torch.as_tensor(targets), range(len(targets)))
    return reader


def with_mask(sample: Any) -> Any:
    """A class for each pixel as torchvision's Mask: transforms of v2 leave a plain tensor as it is, and move the image
    alone."""
    if not isinstance(sample, tuple) or not isinstance(sample[1], Tensor) or sample[1].dim() < 2:
        return sample
    from torchvision.tv_tensors import Mask, TVTensor  # takes half a second

    inputs, target = sample
    return inputs, target if isinstance(target, TVTensor) else Mask(target)


def loader_of(
    config: RunConfig,
    reader: SampleReader,
    is_trained: bool,
    converter: InputConverter,
    device: torch.device,
    parts: Callable[[int, int], Sequence[Part]],
    share: tuple[int, int],
    batch_size: int,
) -> Loader:
    """What reads a split for a rank. parts, share: as of `Loader`."""
    section, is_stream, transforms, augment = config.loader, isinstance(reader.dataset, Stream), list[BatchWide](), None
    draws = weights = shards = None
    if is_trained:
        if section.sampling is not None:
            weights = sampling_weights(reader.dataset, section.sampling)
        draws = getattr(unwrapped(reader.dataset)[0], "draws", None)
        if (files := of_each_sample(reader.dataset, "shards")) is not None:
            shards = torch.as_tensor(files)
        if section.augment is not None:
            augment = instantiate_as(ShiftFlip, section.augment, "loader.augment", epochs=config.trainer.epochs)
        transforms = [BatchWide(one) for one in instantiate(section.batch_transforms)]
        if transforms and is_stream:
            what = "loader.batch_transforms mix in other samples, and a stream gives each once"
            raise ConfigError(f"{what}; type loader.batch_transforms=[]")
    order = Order(len(reader), config.seed, draws, weights, shards, shuffle=not is_stream)
    workers, seed = section.num_workers, config.seed
    return Loader(reader, order, converter, device, seed, batch_size, parts, share, augment, transforms, workers)


def sampling_weights(dataset: Any, sampling: str) -> Tensor:
    """(N,) float64 by which an epoch draws its samples: "balanced" gives each class the same share; "weights"."""
    if sampling == "balanced":
        classes = class_numbers(dataset)
        if classes is None or (classes < 0).any():
            what = "loader.sampling=balanced counts classes, and the training data says no class of each sample"
            raise ConfigError(f"{what}; give it an attribute `targets`, or type loader.sampling=null")
        return 1 / classes.bincount().double().clamp(min=1)[classes]
    found = of_each_sample(dataset, "weights")
    weights = None if found is None else torch.as_tensor(found, dtype=torch.float64)
    if weights is None or weights.ndim != 1 or not (weights.isfinite() & (weights >= 0)).all() or not weights.any():
        what = "loader.sampling=weights needs an attribute `weights` of the training data, 0 or more for each sample"
        raise ConfigError(f"{what}; give it one, or type loader.sampling=balanced")
    return weights
