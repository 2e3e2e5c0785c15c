"""Whole numbers that are typed where a float is wanted become floats."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config.check import as_dict, described_nodes
from lockstep.config.fields import rules


def with_floats(cfg: DictConfig) -> DictConfig:
    """A checked config in which every field for floats holds floats. AdamW, for one, refuses the betas [0.9, 0]."""
    config = as_dict(cfg)
    for _, node, schema in described_nodes(config):
        for name, rule in rules(schema).items():
            if name in node and rule.kind is float:
                node[name] = _as_float(node[name])
    converted = OmegaConf.create(config)
    assert isinstance(converted, DictConfig)
    return converted


def _as_float(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_float(item) for item in value]
    return float(value) if type(value) is int else value
