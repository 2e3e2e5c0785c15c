"""Builds the data sets of a run from its config, and completes the config from the data."""

from functools import partial
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lockstep.config.schema import as_dict, nodes_with_target
from lockstep.config.targets import instantiate
from lockstep.data.dataset import InMemoryDataset, Labels, check_shape, class_count, require_samples, sample_shape
from lockstep.data.loader import require_channels
from lockstep.data.partition import random_states_kept
from lockstep.data.samples import Samples, require_stream
from lockstep.data.transforms import BatchTransform, as_batch_transforms
from lockstep.tasks.base import Task
from lockstep.tasks.classification import Classification
from lockstep.tasks.multi_label import MultiLabel


def datasets(cfg: DictConfig) -> tuple[Any, Any]:
    """The data sets for training and for tests. Raises ConfigError if one has no samples."""
    with random_states_kept():  # the initial weights depend on the seed, not on what a data set draws
        train, test = instantiate(cfg.dataset.train), instantiate(cfg.dataset.test)
    mixes = any(transform.mixes for transform in batch_transforms(cfg))
    require_stream(train, "training data", cfg.dataset.workers, mixes, cfg.dataset.on_error)
    require_stream(test, "test data", cfg.dataset.workers, False, cfg.dataset.on_error)
    require_samples(train, "training data", "dataset.train")
    require_samples(test, "test data", "dataset.test")
    return train, test


def batch_transforms(cfg: DictConfig) -> list[BatchTransform]:
    """What changes training batches on the device. Raises ConfigError for what cannot do it alike on all ranks."""
    return as_batch_transforms(instantiate(cfg.dataset.batch_transforms))


def samples(cfg: DictConfig, dataset: Any, name: str) -> InMemoryDataset | Samples:
    """`dataset` as a loader reads it. name: "training data" or "test data".

    Raises ConfigError if data in memory has targets that the task does not take, and if unreadable samples are left
    out and many in a row are.
    """
    data = cfg.dataset
    transforms = instantiate(data.transforms if name == "training data" else data.test_transforms)
    task = get_object(cfg.task._target_)
    are_classes = isinstance(task, type) and issubclass(task, Classification)
    # A task of the user's may be derived from Classification for other targets.
    is_plain = are_classes and task.__module__.startswith("lockstep.")
    are_flags = isinstance(task, type) and issubclass(task, MultiLabel)
    allowed = partial(Labels, name, are_probabilities=is_plain, are_flags=are_flags, may_be_ignored=not is_plain)
    if isinstance(dataset, InMemoryDataset) and not transforms and data.collate_fn is None:
        labels = allowed(data.classes, is_signed=not are_classes)
        labels.check(range(len(dataset)), dataset.targets)
        return dataset
    counts_samples = isinstance(task, type) and getattr(task, "count", None) is Task.count
    labels = allowed(data.classes if are_classes else None, one_each=counts_samples)
    found = Samples(dataset, name, cfg.seed, transforms, data.on_error, instantiate(data.collate_fn), labels)
    if found.skips:
        found.one()  # that none can be read shall not be found by the first evaluation
    return found


def completed(cfg: DictConfig, dataset: Any) -> DictConfig:
    """A copy of `cfg` in which every `shape` and `classes` that is null has its value, from the training data.

    Raises ConfigError where the data and a value in the config contradict each other.
    """
    cfg = cfg.copy()
    inputs, targets = samples(cfg, dataset, "training data").one()
    require_channels(inputs, mean=cfg.dataset.mean, std=cfg.dataset.std)
    asked = [key for key in _unknown(cfg) if not key.startswith("dataset.") or "[" in key]
    names = {key.rpartition(".")[2] for key in asked}
    found: dict[str, Any] = {}
    if "shape" in names:
        found["shape"] = sample_shape(inputs)
    if "classes" in names:
        found["classes"] = class_count(dataset, targets)
    for key in _unknown(cfg):
        name = key.rpartition(".")[2]
        if name in found:
            OmegaConf.update(cfg, key, found[name])
    if isinstance(dataset, InMemoryDataset):
        check_shape(dataset, inputs, cfg.model.get("shape"))
    return cfg


def _unknown(cfg: DictConfig) -> list[str]:
    """The keys `shape` and `classes` that are null: of the groups, and of what changes batches."""
    nodes = [("dataset", cfg.dataset), ("model", cfg.model), ("task", cfg.task)]
    nodes += nodes_with_target(as_dict(cfg.dataset).get("batch_transforms"), "dataset.batch_transforms")
    return [
        f"{key}.{name}" for key, node in nodes for name in ("shape", "classes") if name in node and node[name] is None
    ]
