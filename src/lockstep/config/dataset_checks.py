"""Checks of the nodes dataset and model that go beyond single values."""

from typing import Any

from lockstep.config.fields import show
from lockstep.config.options import TARGETS
from lockstep.errors import ConfigError


def check_dataset(dataset: dict[str, Any]) -> None:
    """Both halves have a reader, and mean and std have one number for each channel, or one for all."""
    for half in ("train", "test"):
        reader = dataset.get(half)
        if half == "test" and reader is None:
            raise ConfigError(
                "dataset.test=null leaves nothing to evaluate, and every run is evaluated; "
                "type dataset.test='${dataset.train}' to evaluate the training data"
            )
        if not isinstance(reader, dict) or "_target_" not in reader:
            raise ConfigError(
                f"dataset.{half}={show(reader)} reads no data; type dataset=<an option in conf/dataset>, "
                f"or +dataset.{half}._target_=<module>.<class>"
            )
    shape, augment = dataset.get("shape"), dataset["augment"]
    if isinstance(shape, list) and len(shape) != 3 and (augment["pad"] or augment["flip"]):
        raise ConfigError(
            f"dataset.augment is for images, and the samples have the shape {show(shape)}; "
            f"type dataset.augment.pad=0 dataset.augment.flip=false"
        )
    if not isinstance(shape, list) or len(shape) != 3:
        return
    for name in ("mean", "std"):
        values = dataset[name]
        if values is not None and len(values) not in (1, shape[0]):
            numbers = "1 number" if shape[0] == 1 else f"1 or {shape[0]} numbers"
            raise ConfigError(
                f"dataset.{name}={show(values)} wants {numbers}, as the images have the shape {show(shape)}; "
                f"type dataset.{name}=[0.5] or dataset.{name}=null"
            )


def check_model(model: dict[str, Any], dataset: dict[str, Any]) -> None:
    """A model of this project takes the samples of the data set, and has an output for each of its classes."""
    if model["_target_"] not in TARGETS or not {"shape", "classes"} <= model.keys() & dataset.keys():
        return
    if model["shape"] != dataset["shape"]:
        raise ConfigError(
            f"model.shape={show(model['shape'])} does not fit dataset.shape={show(dataset['shape'])}; "
            f"type model.shape={show(dataset['shape'])}"
        )
    if None not in (model["classes"], dataset["classes"]) and model["classes"] < dataset["classes"]:
        raise ConfigError(
            f"model.classes={model['classes']} is less than dataset.classes={dataset['classes']}; "
            f"type model.classes={dataset['classes']}"
        )
