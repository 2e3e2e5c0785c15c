"""The check that a model which reads token numbers gets them, and that no other model does."""

from typing import Any

from lockstep.config.dataset_options import DATASETS, Text
from lockstep.config.model_options import GPT
from lockstep.config.options import TARGETS
from lockstep.errors import ConfigError


def check_tokens(config: dict[str, Any]) -> None:
    """Raise ConfigError if model and data set are of this project, and only one of them has token numbers."""
    dataset = config.get("dataset")
    reader = DATASETS.get(_target(dataset.get("train") if isinstance(dataset, dict) else None))
    model = TARGETS.get(_target(config.get("model")))
    if model is None or reader is None or (model is GPT) == (reader is Text):
        return
    if reader is Text:
        raise ConfigError("dataset=text has token numbers, which this model does not read; type model=gpt")
    raise ConfigError("model=gpt reads token numbers, which this data set does not have; type dataset=text")


def _target(node: object) -> str:
    return str(node.get("_target_")) if isinstance(node, dict) else ""
