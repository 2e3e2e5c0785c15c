"""Which hyperparameters and which schedule a resumed run uses: the config of this run wins.

What the config did not change continues where the snapshot left it, since schedulers move lr, momentum and betas.
"""

import logging
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.training.schedulers import WithWarmup

log = logging.getLogger(__name__)

Group = dict[str, Any]

# How a step is computed, not what it computes. These follow the device and the strategy of each run.
IMPLEMENTATION_FLAGS = frozenset({"fused", "foreach", "capturable", "differentiable"})
MOVED_BY_SCHEDULE = frozenset({"lr", "momentum", "betas"})  # OneCycleLR and CyclicLR move more than the lr


def resumed_group(saved: Group, saved_initial: Group, built: Group, initial: Group, same_schedule: bool) -> Group:
    """The hyperparameters of one parameter group after a resume, without its parameters.

    saved: as the snapshot holds them. saved_initial: as that run built them, before its scheduler changed any. built,
    initial: the same of this run. An lr that the config changed keeps the factor which the schedule has reached.
    same_schedule: the schedule goes on from its own state; else it moves what it moves from this run's values.
    Keys that a scheduler added (initial_lr, max_lr) are this run's: it computed them from its own lr and settings.
    """
    group = {key: value for key, value in saved.items() if key not in IMPLEMENTATION_FLAGS} | built
    for key in built.keys() & saved.keys() & saved_initial.keys() & initial.keys() - IMPLEMENTATION_FLAGS:
        if key in MOVED_BY_SCHEDULE and not same_schedule:
            continue
        if is_same(saved_initial[key], initial[key]):
            group[key] = _in_form_of(built[key], saved[key])
        elif key == "lr":
            group[key] = _in_form_of(built[key], _scaled_lr(saved[key], saved_initial[key], initial[key]))
    return group


def log_changes(saved_initial: list[Group], initial: list[Group]) -> None:
    """One line for each hyperparameter that the config changed since the snapshot, however many groups it is in."""
    lines = []
    for old, new in zip(saved_initial, initial, strict=True):
        for key in sorted(old.keys() & new.keys() - IMPLEMENTATION_FLAGS):
            if not is_same(old[key], new[key]):
                lines.append(f"optimizer.{key}: {old[key]} in the snapshot, {new[key]} now")
    for line in dict.fromkeys(lines):
        log.info(line)


def restore_scheduler(scheduler: LRScheduler, saved_built: dict[str, Any], saved: dict[str, Any]) -> None:
    """Continue the schedule of `saved`, with this run's settings. Call it after the optimizer is restored.

    saved_built: the state of the snapshot's scheduler before the first step. Whatever differs between it and `saved`
    is progress and is restored. The rest is settings, such as base_lrs and total_steps: these stay this run's.
    """
    scheduler.load_state_dict(_merged(saved_built, saved, scheduler.state_dict()))
    if isinstance(scheduler, WithWarmup):
        scheduler.factor = saved["factor"]  # it is in the restored lr, even where it equals the one of a first step
    scheduler._last_lr = [_detached(group["lr"]) for group in scheduler.optimizer.param_groups]


def move_scheduler(scheduler: LRScheduler, steps: int) -> None:
    """Bring a scheduler that has not stepped yet, and its optimizer, to where they are after `steps` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch misses the steps of the optimizer
        for _ in range(steps):
            scheduler.step()


def is_same(one: Any, other: Any) -> bool:
    """Equality of nested plain values and tensors. A list equals a tuple: YAML knows only lists."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def _merged(saved_built: Any, saved: Any, ours: Any) -> Any:
    """`ours`, with every nested value from `saved` that moved away from `saved_built`."""
    if is_same(saved_built, saved):
        return ours
    if isinstance(saved_built, dict) and isinstance(saved, dict) and isinstance(ours, dict):
        return {
            key: _merged(saved_built[key], saved[key], value) if key in saved_built and key in saved else value
            for key, value in ours.items()
        }
    lists = [value for value in (saved_built, saved, ours) if isinstance(value, list)]
    if len(lists) == 3 and len(saved_built) == len(saved) == len(ours):
        return [_merged(*values) for values in zip(saved_built, saved, ours, strict=True)]
    return saved


def _scaled_lr(saved: Any, saved_initial: Any, initial: Any) -> float:
    old, new = float(saved_initial), float(initial)
    return float(saved) * new / old if old else new


def _in_form_of(like: Any, value: Any) -> Any:
    """`value` as a tensor if `like` is one, for example a capturable optimizer's lr, else as a plain value."""
    if torch.is_tensor(like):
        return torch.full_like(like, float(value))
    return value.item() if torch.is_tensor(value) else value


def _detached(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value
