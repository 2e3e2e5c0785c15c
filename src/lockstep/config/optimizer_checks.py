"""Checks of the node optimizer that go beyond single values."""

from typing import Any

from lockstep.config.fields import rules, show
from lockstep.config.options import TARGETS
from lockstep.config.training_options import SGD
from lockstep.errors import ConfigError

EXAMPLE = "optimizer.groups=[{match:fc,lr:0.1}]"


def check_optimizer(node: dict[str, Any]) -> None:
    """Raise ConfigError for hyperparameters that contradict each other, or groups that are none."""
    schema = TARGETS.get(str(node.get("_target_")))
    if schema is SGD and node.get("nesterov") and not node.get("momentum"):
        raise ConfigError("optimizer.nesterov=true wants a momentum above 0; type optimizer.momentum=0.9")
    for group in node.get("groups") or ():
        _check_group(group, schema)


def _check_group(group: object, schema: type | None) -> None:
    patterns = group.get("match") if isinstance(group, dict) else None
    listed = patterns if isinstance(patterns, list) else [patterns]
    if not isinstance(group, dict) or not listed or not all(isinstance(pattern, str | int) for pattern in listed):
        raise ConfigError(f"optimizer.groups: {show(group)} says no match, the parameters' name; type {EXAMPLE}")
    if schema is None:
        return
    for name, value in group.items():
        rule = rules(schema).get(name)
        if rule is not None and not rule.accepts(value):
            typed = f"{{match:{show(patterns)},{name}:{show(rule.limits.example)}}}"
            raise ConfigError(
                f"optimizer.groups: {name}={show(value)} wants {rule.wants}; type optimizer.groups=[{typed}]"
            )
