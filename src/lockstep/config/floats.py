"""Whole numbers that are typed where a float is wanted become floats."""

from typing import Any

from lockstep.config.check import Node, described_nodes
from lockstep.config.fields import rules


def with_floats(config: Node) -> Node:
    """A checked config, changed in place: every field for floats holds floats. AdamW refuses betas=[0.9,0]."""
    for _, node, schema in described_nodes(config):
        for name, rule in rules(schema).items():
            if name in node and rule.kind is float:
                node[name] = _as_float(node[name])
    return config


def _as_float(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_float(item) for item in value]
    return float(value) if type(value) is int else value
