"""The state of a run as the whole model's, under the names that the model gave its parameters, and back.

It is the same under every strategy and at every world size, so a snapshot moves between them. The config of the run
that resumes wins. What it did not change continues where the snapshot left it: schedulers move lr, momentum and betas.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.compat import set_last_lr
from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy
from lockstep.strategies.tensor_bytes import Block, map_only, whole
from lockstep.training.schedulers import FollowsObjective, WithWarmup
from lockstep.training.state import TrainState

log = logging.getLogger(__name__)

Group = dict[str, Any]
"""The hyperparameters of a parameter group."""

Spread = Callable[[dict[str, Any]], dict[str, Any]]

PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))
HELD = "a snapshot holds tensors, numbers, texts and bytes, and lists, tuples, sets and dicts of them"
NOT_HYPERPARAMETERS = ("params", "param_names")
# How a step is computed, not what it computes. These follow the device and the strategy of each run.
IMPLEMENTATION_FLAGS = frozenset({"fused", "foreach", "capturable", "differentiable"})
MOVED_BY_SCHEDULE = frozenset({"lr", "momentum", "betas"})  # OneCycleLR and CyclicLR move more than the lr


def model_state(strategy: Strategy) -> dict[str, Any]:
    """The state dict of the whole model, on rank 0. A collective."""
    return strategy.full_state(strategy.model.state_dict())


def collect_state(
    state: TrainState, meter_totals: Tensor, scheduler_as_built: dict[str, Any], spread: Spread
) -> dict[str, Any]:
    """What `restore_state` takes, complete on rank 0. A collective.

    meter_totals: `state.meter.totals()`. scheduler_as_built: the scheduler's state dict before the first step.
    spread: the strategy's `full_state`, or its `own_blocks` for this rank's part of a sharded snapshot.
    """
    batch_size = state.settings.batch_size  # a step of the schedule is one of this size
    require_kept(state, scheduler_as_built)
    scheduler = {"class": _class_name(state.scheduler), "built": scheduler_as_built, "batch_size": batch_size}
    model = state.strategy.model
    weights = model.state_dict()
    require_plain(weights)
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in weights]
    optimizer, names = state.optimizer.state_dict(), _parameter_names(model, state.optimizer)
    other_states = {key: values for key, values in optimizer["state"].items() if key not in names}
    return {
        "model": spread(weights),
        "buffers": list(spread(dict.fromkeys(buffers))),
        "optimizer": {
            "state": spread({names[key]: values for key, values in optimizer["state"].items() if key in names}),
            "param_groups": list(map(without_parameters, optimizer["param_groups"])),
        },
        "optimizer_beside": optimizer | {"state": other_states, "param_groups": None},  # what is of no parameter
        "ema": None if state.ema is None else spread(state.ema.state()),
        "initial_hyperparameters": state.initial_hyperparameters,
        "scheduler": scheduler | {"state": state.scheduler.state_dict()},
        "scaler": state.scaler.state_dict(),
        "meter": {"names": state.meter.names, "totals": meter_totals},
        "objective": list(state.objective or ()),
        "skipped": [state.nan.skipped, state.nan.skipped_in_a_row],
        "progress": asdict(state.progress),
        "seconds": state.seconds,
    }


def restore_state(state: TrainState, saved: dict[str, Any]) -> None:
    """Bring `state` to what `collect_state` gave, also if it has trained since. Every rank passes all of it.

    The world and the strategy may be others than the snapshot's. What the config of this run changes stays changed.
    Raises ConfigError if the optimizer has another number of parameter groups.
    """
    restore_weights(state, saved)
    for name, value in saved["progress"].items():  # in place: others hold it
        setattr(state.progress, name, value)
    _restore_optimizer_and_schedule(state, saved)
    if saved["scaler"]:  # empty after a run without loss scaling
        state.scaler.load_state_dict(saved["scaler"])
    state.nan.restore(*saved["skipped"])
    # The sums of the epoch and the best evaluation go on, unless something else is measured now.
    step = state.progress.step
    if saved["meter"]["names"] == state.meter.names and len(saved["meter"]["totals"]) == len(state.meter.sums):
        state.meter.restore(saved["meter"]["totals"])
    else:
        log.info("the task's metrics changed: this epoch's training metrics begin at step %d", step)
    if saved["objective"] != list(state.objective or ()):
        log.info("the objective changed: the best evaluation before step %d does not count", step)
        state.forget_best()
    elif (state.ema is None) != (saved["ema"] is None):
        log.info("trainer.ema changed: the best evaluation before step %d does not count", step)
        state.forget_best()


def restore_weights(state: TrainState, saved: dict[str, Any]) -> None:
    """The part of `restore_state` that an evaluation needs: weights, buffers and the average of the weights."""
    strategy = state.strategy
    weights = whole(strategy.shard_state(saved["model"]))
    strategy.model.load_state_dict(with_buffers(strategy.model, weights, saved["buffers"]))
    if state.ema is not None:
        state.ema.restore(_to_layout_of_weights(strategy, saved["ema"] or {}, saved["model"]))


def with_buffers(model: nn.Module, weights: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """`weights` of a snapshot, as `model` loads them. names: of the buffers among them.

    Some modules make or enlarge a buffer in their forward pass, so a new model has not the form of a trained one: it
    gets such a buffer. A snapshot in parts has sparse ones as dense.
    """
    own, fitting = dict(model.named_buffers(remove_duplicate=False)), dict(weights)
    for name in names:
        if name not in weights or (name in own and is_lazy(own[name])):
            continue  # another rank's, or torch gives it its shape when it is loaded
        if name not in own or own[name].shape != weights[name].shape:
            owner, _, last = name.rpartition(".")
            with suppress(AttributeError, KeyError):  # the model has another form, which load_state_dict explains
                device = next(model.parameters()).device
                model.get_submodule(owner).register_buffer(last, torch.empty_like(weights[name], device=device))
        elif own[name].layout != weights[name].layout:
            fitting[name] = weights[name].to_sparse(layout=own[name].layout)
    return fitting


def require_plain(weights: dict[str, Any]) -> None:
    """Raise ConfigError if what a module gives in get_extra_state is not restored as it is by `plain_copy`."""
    for name, value in weights.items():
        for _, found in _lost(value):
            owner = name.removesuffix("_extra_state") + "get_extra_state"
            raise ConfigError(
                f"{owner} gives a {type(found).__name__}, and {HELD}; return torch.from_numpy(x) of an array there, "
                f"and list(x) of another collection"
            )


def require_kept(state: TrainState, scheduler_as_built: dict[str, Any]) -> None:
    """Raise ConfigError if the optimizer or the scheduler keeps what `plain_copy` would lose.

    What a scheduler has had since it was built, such as a function or a table, a resumed run builds again.
    """
    optimizer = state.optimizer.state_dict()
    kept = {key: value for key, value in optimizer.items() if key != "param_groups"}
    for place, value in _lost(kept):
        raise ConfigError(
            f"{type(state.optimizer).__name__} keeps a {type(value).__name__} in state_dict(){place}, and {HELD}; keep "
            f"list(x) of a collection there, torch.from_numpy(x) of an array, and x.getstate() of random numbers"
        )
    built = dict(_lost(scheduler_as_built))
    for place, value in _lost(state.scheduler.state_dict()):
        if not callable(value) and not (place in built and _is_alike(value, built[place])):
            raise ConfigError(
                f"{type(state.scheduler).__name__} changes a {type(value).__name__} in state_dict(){place}, and {HELD}"
                f"; give it a state_dict with list(x) of a collection, and x.getstate() of random numbers, and a "
                f"load_state_dict that takes them"
            )


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two objects have the same state, as far as a copy of them would."""
    with suppress(Exception):
        return bool(one.__reduce_ex__(2) == other.__reduce_ex__(2) or one == other)  # an array has no one answer
    return False


def _lost(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, part) of each part of `value` that `plain_copy` would lose."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _lost(key, place)
            yield from _lost(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple | set):
        for number, item in enumerate(value):
            yield from _lost(item, f"{place}[{number}]")
    elif not (isinstance(value, (Tensor, Block)) or type(value) in PLAIN or _is_number(value)):
        yield place, value


def _is_number(value: Any) -> bool:
    """Whether it is a number of another library, such as numpy's."""
    return hasattr(value, "item") and getattr(value, "shape", None) == ()


def trained_weights(saved: dict[str, Any], averaged: bool) -> dict[str, Any]:
    """The model's state dict in a snapshot's contents. averaged: with the averaged weights if it has them."""
    averages = (saved["ema"] or {}) if averaged else {}
    weights: dict[str, Any] = whole(saved["model"] | averages)
    return weights | {name: weights[name].to(saved["model"][name].dtype) for name in averages}


def copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def plain_copy(value: Any, copy: Callable[[Tensor], Tensor] = copy_to_cpu) -> Any:
    """A copy on the CPU that training cannot change: dicts, lists, tuples, sets, tensors, blocks and plain values.

    Numbers of other libraries become Python's. Other objects become None: `weights_only` would refuse the file.
    copy: of a tensor.
    """
    if isinstance(value, Tensor):
        return copy(value)
    if isinstance(value, Block):
        return replace(value, values=plain_copy(value.values, copy))
    if isinstance(value, dict):
        return {key: plain_copy(item, copy) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain_copy(item, copy) for item in value)
    if isinstance(value, list):
        return [plain_copy(item, copy) for item in value]
    if isinstance(value, set):
        return {plain_copy(item, copy) for item in value}
    if type(value) in PLAIN:
        return value
    return value.item() if _is_number(value) else None


def _restore_optimizer_and_schedule(state: TrainState, saved: dict[str, Any]) -> None:
    """A schedule goes on from its own state. Another one, or one whose steps are of another batch size, is moved to
    the run's position instead. One that follows evaluations keeps its state."""
    scheduler, schedule = state.scheduler, saved["scheduler"]
    place, same_steps = state.schedule_place, schedule["batch_size"] == state.settings.batch_size
    goes_on = schedule["class"] == _class_name(scheduler) and (same_steps or isinstance(scheduler, FollowsObjective))
    state.trained.unfreeze(saved["optimizer"]["state"])

    indexed, names = state.optimizer.state_dict(), _parameter_names(state.strategy.model, state.optimizer)
    named = _to_layout_of_weights(state.strategy, saved["optimizer"]["state"], saved["model"])
    by_index = {index: named[name] for index, name in names.items() if name in named}
    built, saved_groups = indexed["param_groups"], saved["optimizer"]["param_groups"]
    if len(saved_groups) != len(built):
        raise ConfigError(
            f"the optimizer has {len(built)} parameter groups and the snapshot's had {len(saved_groups)}; "
            f"type the optimizer=... that it was made with"
        )
    initial, saved_initial = state.initial_hyperparameters, saved["initial_hyperparameters"]
    groups = [
        group | resumed_group(saved_groups[i], saved_initial[i], without_parameters(group), initial[i], goes_on)
        for i, group in enumerate(built)
    ]
    beside = saved.get("optimizer_beside", {"state": {}})
    state.optimizer.load_state_dict(beside | {"state": by_index | beside["state"], "param_groups": groups})
    _keep_types(state.optimizer, by_index)

    if not goes_on:
        log.info(
            "the run has had another scheduler or batch size: the schedule goes on as after %d of its own steps", place
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch misses the steps of the optimizer
            for _ in range(place):
                scheduler.step()
        return
    # What has moved away from the state before the first step is progress, and goes on. The rest is settings, such as
    # base_lrs and total_steps: these stay this run's.
    scheduler.load_state_dict(_merged(schedule["built"], schedule["state"], scheduler.state_dict()))
    if isinstance(scheduler, WithWarmup):
        scheduler.take_over_factor(schedule["state"]["factor"])  # also where it equals the one of a first step
    rates = [group["lr"] for group in state.optimizer.param_groups]
    set_last_lr(scheduler, [rate.clone() if torch.is_tensor(rate) else rate for rate in rates])
    if isinstance(scheduler, FollowsObjective) and not same_steps:
        scheduler.resume_at(place)


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS}


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """{index that the optimizer's state dict gives a parameter: the parameter's name}, matched by identity.

    Parameter groups may list the parameters in another order than the model does.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}


@torch.no_grad()
def _to_layout_of_weights(strategy: Strategy, named: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of `named`, in the device and memory layout of its parameters and buffers, in their order.

    What has the type of its weight in `saved`, the snapshot's state dict, gets the type of the weight here; other types
    stay. Fused optimizers read a parameter and its state side by side in memory. Averages are updated one after the
    other. A state dict may have other names than the model's parameters (hooks): then types are taken for the same.
    """
    weights = dict(strategy.model.named_parameters()) | dict(strategy.model.named_buffers())
    own = whole(strategy.shard_state(named))
    types = {name: saved[name].dtype if name in saved else weight.dtype for name, weight in weights.items()}
    return {name: _like(weight, own[name], types[name]) for name, weight in weights.items() if name in own}


def _like(weight: Tensor, values: Any, saved_type: torch.dtype) -> Any:
    if isinstance(values, dict):  # "step" counts; the optimizer chooses its type
        return {key: value if key == "step" else _like(weight, value, saved_type) for key, value in values.items()}

    def convert(tensor: Tensor) -> Tensor:
        if tensor.shape != weight.shape or tensor.layout != weight.layout:  # such as the momentum of sparse gradients
            return tensor
        dtype = weight.dtype if tensor.dtype == saved_type else tensor.dtype
        return torch.empty_like(weight, dtype=dtype).copy_(tensor)

    return map_only(Tensor, convert, values)


def _keep_types(optimizer: torch.optim.Optimizer, by_index: dict[int, dict[str, Any]]) -> None:
    """Put back what torch's load_state_dict has cast to the type of the weight. by_index: what was loaded."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in by_index.items():
        held = optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and key != "step" and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Hyperparameters and schedules.


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
        if _is_same(saved_initial[key], initial[key]):
            group[key] = _in_form_of(built[key], saved[key])
        elif key == "lr":
            old, now = float(saved_initial[key]), float(initial[key])
            group[key] = _in_form_of(built[key], float(saved[key]) * now / old if old else now)
    return group


def _is_same(one: Any, other: Any) -> bool:
    """Equality of nested plain values and tensors. A list equals a tuple: YAML knows only lists."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _merged(saved_built: Any, saved: Any, ours: Any) -> Any:
    """`ours`, with every nested value from `saved` that moved away from `saved_built`."""
    if _is_same(saved_built, saved):
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


def _in_form_of(like: Any, value: Any) -> Any:
    """`value` as a tensor if `like` is one, for example a capturable optimizer's lr, else as a plain value."""
    if torch.is_tensor(like):
        return torch.full_like(like, float(value))
    return value.item() if torch.is_tensor(value) else value
