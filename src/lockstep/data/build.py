# until issue 40
"""Builds the data sets of a run from its config, and completes the config from the data."""

import logging
from collections.abc import Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from hydra.utils import get_object

from lockstep.compat import changes_colours
from lockstep.config.nodes import instantiate, nodes_in
from lockstep.config.schema import Node, RunConfig
from lockstep.data.dataset import (
    IGNORED,
    InMemoryDataset,
    Labels,
    balanced_weights,
    check_shape,
    class_count,
    class_names,
    numbers_of,
    require_same_classes,
    require_samples,
    sample_shape,
    whole_of,
)
from lockstep.data.image_files import VALIDATION, ImageFiles, has_validation
from lockstep.data.loader import require_channels
from lockstep.data.partition import fold_in, seeded
from lockstep.data.samples import SampleError, Samples, require_stream
from lockstep.data.split import HeldOut, Split, hold_out
from lockstep.data.text import TextWindows
from lockstep.data.transforms import BatchTransform, as_batch_transforms
from lockstep.errors import ConfigError
from lockstep.modes.base import Mode
from lockstep.tasks.base import Task
from lockstep.tasks.classification import Classification
from lockstep.tasks.language_modelling import LanguageModelling
from lockstep.tasks.multi_label import MultiLabel
from lockstep.tasks.regression import Regression
from lockstep.tasks.segmentation import Segmentation
from lockstep.text import show

log = logging.getLogger(__name__)

MASKS = 8  # that are looked at before the training
TRAINING, TESTS, VALIDATIONS = 1, 2, 3  # folded into the seeds of what data sets draw when they are made
SHARE = 0.1  # of the training data, that dataset.validation=auto holds out


class DataSets(NamedTuple):
    """The data of a run. val: None without a validation set. held_out: how `val` was drawn from the training data, None
    if it was not."""

    train: Any
    val: Any
    test: Any
    held_out: HeldOut | None = None


def prepare(config: RunConfig) -> None:
    """Call dataset.prepare, for images also with those of a folder val/."""
    with seeded(config.seed):
        instantiate(config.dataset.prepare)
        if config.dataset.validation == "auto" and validation_node(config) is not None:
            instantiate(_of_validation(config.dataset.prepare, "test"))


def prepare_first(config: RunConfig) -> None:
    """`prepare` before a rank has started that could report an error: any is raised as ConfigError."""
    from lockstep.failures.record import exception_record

    try:
        prepare(config)
    except ConfigError:
        raise
    except Exception as error:
        failed = exception_record(error)
        place = f" at {failed['file']}:{failed['line']}" if "file" in failed else ""
        said = f"{failed['type']}: {failed['message']}".partition("\n")[0]
        advice = "correct that, or type dataset.prepare=null if the data is ready"
        raise ConfigError(f"dataset.prepare failed{place} ({said}); {advice}") from error


def validation_node(config: RunConfig) -> Any:
    """The node that reads validation data of its own: the user's, or with dataset.validation=auto that of a folder val/
    of images. None if validation data is held out of the training data, or if there is none."""
    data = config.dataset
    if isinstance(data.validation, dict):
        return data.validation
    files = data.test.get("files")
    if data.validation != "auto" or data.folds is not None or not has_validation(files):
        return None
    return _of_validation(data.test, "files")


def _of_validation(node: Node | None, files: str) -> Node | None:
    """`node` with the images of the folder val/ in the place of those for tests. files: its key of their list."""
    if node is None or files not in node:
        return None
    return node | {files: node[files] | {"test_split": VALIDATION}}


def held_out_of(config: RunConfig, train: Any) -> HeldOut | None:
    """What the config holds out of the training data, None if it does not."""
    data = config.dataset
    if config.trainer.final is not None:
        return None
    fold = None if data.folds is None or data.fold is None else (data.fold, data.folds)
    if fold is None and (data.validation is None or validation_node(config) is not None):
        return None
    size = SHARE if data.validation == "auto" else data.validation
    assert not isinstance(size, dict)
    return hold_out(train, Split(size, fold, data.split_seed, data.groups))


def datasets(config: RunConfig, mode: Mode) -> DataSets:
    """The data sets for training, validation and tests.

    A mode that does not read the training data takes the tests' in its place, where it has no samples. Raises
    ConfigError if one has no samples, or if a class number stands for another class in each of them.
    """
    with seeded(fold_in(config.seed, TRAINING)):
        train = instantiate(config.dataset.train)
    with seeded(fold_in(config.seed, TESTS)):
        test = instantiate(config.dataset.test)
    with seeded(fold_in(config.seed, VALIDATIONS)):
        val = instantiate(validation_node(config))
    if val is not None and config.trainer.final is not None:
        raise ConfigError(
            f"trainer.final={config.trainer.final} trains on what is held out of the training data, and the validation "
            f"images are those of a folder val/; type trainer.final=null, or move them to train/"
        )
    held_out = None
    for name, data in (("test", test), ("training", train), ("validation", val)):
        source = getattr(data, "source", None)
        missing = source.first_without_target if isinstance(source, ImageFiles) else None
        if mode.needs_labels and missing is not None:
            raise ConfigError(
                f"{missing} of the {name} data has no label; give it one, or type mode=predict, which needs none"
            )
    if not mode.reads_training_data and isinstance(train, Sized) and len(train) == 0:
        train = test
    require_same_classes(
        class_names(train),
        class_names(test),
        "the training data",
        "the test data",
        "give both the same attribute `classes`, or type dataset=image_folder, which compares names",
    )
    if train is test and class_weights(config) == "balanced":
        raise ConfigError(
            "task.class_weights=balanced counts the classes of the training data, which has no samples here; "
            "type task.class_weights=<the list in the run.json of the run>"
        )
    mixes = any(transform.mixes for transform in batch_transforms(config))
    require_stream(train, "training data", config.dataset.workers, mixes, config.dataset.on_error)
    require_stream(test, "test data", config.dataset.workers, False, config.dataset.on_error)
    require_samples(train, "training data", "dataset.train")
    require_samples(test, "test data", "dataset.test")
    if val is not None:
        require_same_classes(
            class_names(train),
            class_names(val),
            "the training data",
            "the validation data",
            "give both the same attribute `classes`, or type dataset.validation=0.1",
        )
        require_stream(val, "validation data", config.dataset.workers, False, config.dataset.on_error)
        require_samples(val, "validation data", "dataset.validation")
    elif train is not test:
        held_out = held_out_of(config, train)
    return (
        DataSets(train, val, test)
        if held_out is None
        else DataSets(held_out.train, held_out.validation, test, held_out)
    )


def batch_transforms(config: RunConfig) -> list[BatchTransform]:
    """What changes training batches on the device. Raises ConfigError for what cannot do it alike on all ranks, and for
    what takes normalised pixels for colours."""
    transforms = instantiate(config.dataset.batch_transforms)
    for transform in transforms:
        if changes_colours(transform) and (config.dataset.mean is not None or config.dataset.std is not None):
            raise ConfigError(
                f"{type(transform).__name__} changes colours from 0 to 1, and dataset.batch_transforms get pixels that "
                f"dataset.mean and dataset.std have normalised; type dataset.transforms=[...] with it, or "
                f"dataset.mean=null dataset.std=null"
            )
    return as_batch_transforms(transforms)


def samples(config: RunConfig, dataset: Any, name: str) -> InMemoryDataset | Samples:
    """`dataset` as a loader reads it. name: "training data", "validation data" or "test data".

    Raises ConfigError if data in memory has targets that the task does not take, and if unreadable samples are left
    out and many in a row are.
    """
    data = config.dataset
    with seeded(config.seed):
        transforms, plain = instantiate(data.transforms), instantiate(data.test_transforms)
        collate = instantiate(data.collate_fn and data.collate_fn | {"_partial_": True})
    if name != "training data":
        transforms = plain
    kind = _class_of_task(config)
    are_classes, are_masks = issubclass(kind, Classification), issubclass(kind, Segmentation)
    # A task of the user's may be derived from Classification for other targets.
    is_plain = are_classes and kind.__module__.startswith("lockstep.")
    are_numbers = are_masks or issubclass(kind, LanguageModelling)
    ignored = None if is_plain else config.task.get("ignored_label", IGNORED)
    source = getattr(whole_of(dataset), "source", None)
    if isinstance(source, ImageFiles):
        if issubclass(kind, Regression) and kind.__module__.startswith("lockstep.") and source.classes:
            raise ConfigError(
                f"the labels of the {name} are classes, and this task is about numbers; type task=classification, or "
                f"for a CSV file dataset.labels=numbers"
            )
        ignored = IGNORED if source.first_without_target is not None else ignored  # `datasets` has allowed it
    allowed = partial(
        Labels,
        name,
        are_probabilities=is_plain,
        are_flags=issubclass(kind, MultiLabel),
        are_dense=are_numbers,
        ignored=ignored,
    )
    if isinstance(dataset, InMemoryDataset) and not transforms and collate is None:
        known = None if issubclass(kind, Regression) else data.classes
        labels = allowed(known, is_signed=not are_classes and not are_numbers)
        if not isinstance(dataset, TextWindows):  # they are numbered by this project
            labels.check(range(len(dataset.targets)), dataset.targets)
        if are_masks:
            labels.check_masks(dataset.targets[:MASKS])
        return dataset
    counts_samples = kind.count in (Task.count, Classification.count)
    labels = allowed(data.classes if are_classes or are_numbers else None, one_each=counts_samples)
    found = Samples(dataset, name, config.seed, transforms, plain, data.on_error, collate, labels)
    if name == "validation data" and numbers_of(dataset) is not None and found.draws():
        log.warning(
            "the training data draws in __getitem__, so that the validation samples that are held out of it are "
            "augmented, too; give them a node of their own: dataset.validation='{_target_:<module>.<class>}'"
        )
    if found.skips:
        found.one(epoch=0)  # that none can be read shall not be found by the first evaluation
    if are_masks and data.classes is not None and found.stream is None:
        keys = [(0, number) for number in range(min(MASKS, len(dataset)))]
        with suppress(SampleError):  # training names it
            batch = found.collate(found.read(keys))
            labels.check_masks(() if isinstance(batch, ConfigError) else batch[1])
    return found


def completed(config: RunConfig, dataset: Any) -> RunConfig:
    """A copy of `config` in which every `shape` and `classes` that is null has its value, from the training data.

    Raises ConfigError where the data and a value in the config contradict each other.
    """
    read = samples(config, dataset, "training data")
    inputs, targets = read.one() if isinstance(read, InMemoryDataset) else read.one(epoch=0)
    require_channels(inputs, mean=config.dataset.mean, std=config.dataset.std)
    if isinstance(read, Samples) and read.stream is None:
        with suppress(SampleError, ConfigError):  # training names it
            read.warn_of_other_samples()
    asked = _unknown(config)
    shape = sample_shape(inputs) if "shape" in asked else None
    is_regression = issubclass(_class_of_task(config), Regression)
    classes = class_count(dataset, targets, are_values=is_regression) if "classes" in asked else None
    told: dict[str, Any] = {"shape": shape, "classes": classes}

    def complete(node: Any) -> Any:
        if isinstance(node, list):
            return [complete(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {key: told[key] if value is None and key in told else complete(value) for key, value in node.items()}

    data = config.dataset
    data = replace(data, shape=data.shape or shape, classes=data.classes or classes)
    data = replace(data, batch_transforms=complete(data.batch_transforms))
    config = replace(config, dataset=data, model=complete(config.model), task=complete(config.task))
    if isinstance(dataset, InMemoryDataset):
        shape = config.model.get("shape")
        check_shape(dataset, inputs, shape, "dataset.shape" if shape == data.shape else "model.shape")
    check_class_weights(config)
    if class_weights(config) == "balanced":
        assert config.dataset.classes is not None
        weights = balanced_weights(dataset, config.dataset.classes, config.task.get("ignored_label"))
        config = replace(config, task=config.task | {"class_weights": weights})
    if issubclass(_class_of_task(config), Classification) and config.dataset.classes == 1:
        log.warning("the data has one class, so a classification is right from the start, and learns nothing")
    return config


def class_weights(config: RunConfig) -> Any:
    """task.class_weights of a task that this project has; None of others, where a key of this name may be anything."""
    weighs = issubclass(_class_of_task(config), Classification | Segmentation)
    return config.task.get("class_weights") if weighs else None


def check_class_weights(config: RunConfig) -> None:
    """Raise ConfigError if task.class_weights has another number of weights than there are classes."""
    weights, classes = class_weights(config), config.dataset.classes
    if isinstance(weights, list) and classes not in (None, len(weights)):
        raise ConfigError(
            f"task.class_weights={show(weights)} has {len(weights)} weights, and there are {classes} classes; "
            f"type task.class_weights=balanced, or a list of {classes} numbers"
        )


def _class_of_task(config: RunConfig) -> type[Any]:
    """`Task` where the config names a function."""
    task = get_object(config.task["_target_"])
    return task if isinstance(task, type) else Task


def _unknown(config: RunConfig) -> set[str]:
    """Which of `shape` and `classes` is null in the model, the task or what changes batches."""
    nodes = [config.model, config.task, *(node for _, node in nodes_in(config.dataset.batch_transforms, ""))]
    return {name for node in nodes for name in ("shape", "classes") if name in node and node[name] is None}
