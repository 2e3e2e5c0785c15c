"""YAML reads `off` and `on` without quotes as truth values. They become words again where a field has these words."""

from lockstep.config.check import Node, described_nodes
from lockstep.config.fields import rules

WORDS = {"False": "off", "True": "on"}  # also as text: a field for text turns a truth value into it


def with_switches(config: Node) -> Node:
    """A config that is not checked yet, changed in place: {watch: {weights: off}} in a YAML file is "off"."""
    for _, node, schema in described_nodes(config):
        if not isinstance(node, dict):
            continue
        suspects = {name: WORDS[str(value)] for name, value in node.items() if str(value) in WORDS}
        if not suspects:
            continue
        for name, rule in rules(schema).items():
            words = rule.limits.words
            if suspects.get(name) in words and True not in words and False not in words:
                node[name] = suspects[name]
    return config
