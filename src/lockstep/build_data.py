"""Builds the data sets of a run from its config, and completes the config from the data."""

from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lockstep.config.check import flatten
from lockstep.config.instantiate import instantiate
from lockstep.data.describe import class_count, first_sample, require_samples, sample_shape
from lockstep.data.in_memory import InMemoryDataset, check_classes, check_shape
from lockstep.data.random_numbers import random_states_kept
from lockstep.data.samples import Samples
from lockstep.tasks.classification import Classification

DESCRIBED = ("dataset", "model", "task")  # the groups whose options take the shape and the classes of the data


def datasets(cfg: DictConfig) -> tuple[Any, Any]:
    """The data sets for training and for tests. Raises ConfigError if one has no samples."""
    with random_states_kept():  # the initial weights depend on the seed, not on what a data set draws
        train, test = instantiate(cfg.dataset.train), instantiate(cfg.dataset.test)
    require_samples(train, "training data", "dataset.train")
    require_samples(test, "test data", "dataset.test")
    return train, test


def samples(cfg: DictConfig, dataset: Any, name: str) -> InMemoryDataset | Samples:
    """`dataset` as a loader reads it. name: "training data" or "test data"."""
    data = cfg.dataset
    transforms = instantiate(data.transforms if name == "training data" else data.test_transforms)
    if isinstance(dataset, InMemoryDataset) and not transforms and data.collate_fn is None:
        return dataset
    classes = data.classes if _has_class_targets(cfg) else None
    return Samples(dataset, name, cfg.seed, transforms, data.on_error, instantiate(data.collate_fn), classes)


def _has_class_targets(cfg: DictConfig) -> bool:
    task = get_object(cfg.task._target_)
    return isinstance(task, type) and issubclass(task, Classification)


def complete_config(cfg: DictConfig, dataset: Any, read: InMemoryDataset | Samples) -> None:
    """Give every `shape` and `classes` that is null in `cfg` its value, from the training data.

    Raises ConfigError where the data and a value in the config contradict each other.
    """
    inputs, targets = first_sample(read)
    unknown = [f"{group}.{key}" for group in DESCRIBED for key, value in flatten(cfg[group]).items() if value is None]
    asked = {key.rpartition(".")[2] for key in unknown if not key.startswith("dataset.")}
    found: dict[str, Any] = {}
    if "shape" in asked:
        found["shape"] = sample_shape(inputs)
    if "classes" in asked:
        found["classes"] = class_count(dataset, targets)
    for key in unknown:
        name = key.rpartition(".")[2]
        if name in found and key.count(".") == 1:
            OmegaConf.update(cfg, key, found[name])
    check_shape(dataset, cfg.model.get("shape"))
    if cfg.dataset.classes is not None:
        check_classes(dataset, cfg.dataset.classes)
