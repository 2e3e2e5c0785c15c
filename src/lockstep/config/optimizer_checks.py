"""Checks of the nodes optimizer and scheduler that go beyond single values."""

from typing import Any

from lockstep.config.fields import rules, show
from lockstep.config.options import TARGETS
from lockstep.config.training_options import SGD
from lockstep.errors import ConfigError

EXAMPLE = "optimizer.groups=[{match:fc,lr:0.1}]"
# What these optimizers of torch want, and no training here gives them.
UNFIT = {
    "LBFGS": ("computes the loss again and again in a step", "optimizer=adamw"),
    "SparseAdam": ("wants sparse gradients", "optimizer=adamw"),
    "Muon": ("is for matrices only", "optimizer=muon, which leaves the other parameters to AdamW"),
}


def check_optimizer(node: dict[str, Any]) -> None:
    """Raise ConfigError for hyperparameters that contradict each other, or groups that are none."""
    target = str(node.get("_target_"))
    name = target.rpartition(".")[2]
    if target.startswith("torch.optim.") and name in UNFIT:
        problem, advice = UNFIT[name]
        raise ConfigError(f"optimizer._target_={target} {problem}; type {advice}")
    schema = TARGETS.get(target)
    if schema is SGD and node.get("nesterov") and not node.get("momentum"):
        raise ConfigError("optimizer.nesterov=true wants a momentum above 0; type optimizer.momentum=0.9")
    for group in node.get("groups") or ():
        _check_group(group, schema)


def check_scheduler(node: dict[str, Any]) -> None:
    """Raise ConfigError for torch's schedule whose steps want a metric: a step or an epoch has none."""
    schedule = node.get("schedule")
    targets = [node.get("_target_"), schedule.get("_target_") if isinstance(schedule, dict) else None]
    if any(str(target).endswith("lr_scheduler.ReduceLROnPlateau") for target in targets):
        raise ConfigError("ReduceLROnPlateau is stepped with the result of an evaluation; type scheduler=plateau")


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
