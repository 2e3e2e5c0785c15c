"""The state of a run as the whole model's, under the names that the model gave its parameters, and back.

It is the same under every strategy and at every world size, so a snapshot moves between them. The config of the run
that resumes wins. The model is in training mode whenever its state is taken or loaded: some modules keep other weights
in evaluations.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy
from lockstep.strategies.tensor_bytes import Block, map_only, whole
from lockstep.training.run import Run

log = logging.getLogger(__name__)

Spread = Callable[[dict[str, Any]], dict[str, Any]]

PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))
HELD = "a snapshot holds tensors, numbers, texts and bytes, and lists, tuples, sets and dicts of them"
# How a step is computed, not what it computes. These follow the device and the strategy of each run.
IMPLEMENTATION_FLAGS = frozenset({"fused", "foreach", "capturable", "differentiable"})


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each parameter group."""
    kept = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return [dict(group) for group in kept]


def model_state(strategy: Strategy) -> dict[str, Any]:
    """The state dict of the whole model, on rank 0. A collective."""
    return strategy.full_state(strategy.model.state_dict())


def collect_state(run: Run, meter_totals: Tensor, spread: Spread) -> dict[str, Any]:
    """What `restore_state` takes, complete on rank 0. A collective.

    meter_totals: over all ranks. spread: the strategy's `full_state`, or its `own_blocks` for this rank's part of a
    sharded snapshot. Raises ConfigError for what a snapshot cannot hold.
    """
    run.strategy.module.train()
    model, optimizer, names = run.model, run.optimizer.state_dict(), _parameter_names(run.model, run.optimizer)
    weights, step = model.state_dict(), run.step.state_dict()
    require_plain(weights)
    for what, value in ((run.optimizer, optimizer | {"param_groups": None}), (run.step, step)):
        for place, found in _lost(value):
            kind, owner = type(found).__name__, type(what).__name__
            advice = (
                "keep list(x) of a collection there, torch.from_numpy(x) of an array, x.getstate() of random numbers"
            )
            raise ConfigError(f"{owner} keeps a {kind} in state_dict(){place}, and {HELD}; {advice}")
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in weights]
    states = {key: values for key, values in optimizer["state"].items() if key not in names}
    return {
        "model": spread(weights),
        "buffers": list(spread(dict.fromkeys(buffers))),
        "optimizer": spread({names[key]: values for key, values in optimizer["state"].items() if key in names}),
        "optimizer_beside": optimizer | {"state": states, "param_groups": None},  # what is of no parameter
        "groups": hyperparameters(run.optimizer),
        "groups_as_built": list(run.hyperparameters),
        "ema": None if run.average is None else spread(run.average.state_dict()),
        "schedule": run.schedule.state_dict(),
        "step": step,
        "has_drawn": run.step.draws.has_drawn,
        "scaler": run.scaler.state_dict(),
        "meter": {"names": run.meter.names, "totals": meter_totals},
        "objective": [run.objective, run.direction],
        "skipped": [0, 0] if run.step.skip is None else [run.step.skip.skipped, run.step.skip.in_a_row],
        "progress": asdict(run.progress),
        "seconds": run.clock.seconds,
    }


def restore_state(run: Run, saved: dict[str, Any]) -> None:
    """Bring `run` to what `collect_state` gave. Every rank passes all of it.

    The world and the strategy may be others than the snapshot's. What the config of this run changes stays changed.
    """
    restore_weights(run, saved)
    for name, value in saved["progress"].items():  # in place: others hold it
        setattr(run.progress, name, value)
    run.clock.start(saved["seconds"], run.progress.step)
    _restore_optimizer(run, saved)
    if saved["schedule"]:
        run.schedule.load_state_dict(saved["schedule"])
    run.progress.ahead = run.place - run.progress.step  # with another batch size
    run.schedule(run.place)
    if saved["scaler"]:  # empty after a run without loss scaling
        run.scaler.load_state_dict(saved["scaler"])
    if run.step.skip is not None:
        run.step.skip.restore(*saved["skipped"])
    run.step.load_state_dict(saved["step"])
    run.step.draws.restore(saved["has_drawn"])
    # The sums of the epoch and the best evaluation go on, unless something else is measured now.
    step = run.progress.step
    if saved["meter"]["names"] == run.meter.names:
        run.meter.restore(saved["meter"]["totals"])
    else:
        log.info("the task's metrics changed: this epoch's training metrics begin at step %d", step)
    changed = [
        name
        for name, (one, other) in {
            "the monitor": (saved["objective"], [run.objective, run.direction]),
            "trainer.ema": (saved["ema"] is None, run.average is None),
        }.items()
        if one != other
    ]
    if changed:
        log.info("%s changed: the best evaluation before step %d does not count", changed[0], step)
        run.forget_best()


def restore_weights(run: Run, saved: dict[str, Any]) -> None:
    """The part of `restore_state` that an evaluation needs: weights, buffers and the average of the weights."""
    strategy = run.strategy
    strategy.module.train()
    weights = whole(strategy.shard_state(saved["model"]))
    strategy.model.load_state_dict(with_buffers(strategy.model, weights, saved["buffers"]))
    if run.average is not None:
        run.average.load_state_dict(_to_layout_of_weights(strategy, saved["ema"] or {}, saved["model"]))


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


def _restore_optimizer(run: Run, saved: dict[str, Any]) -> None:
    """What the config has changed of the hyperparameters stays; of others, what the run has made of them."""
    indexed, names = run.optimizer.state_dict(), _parameter_names(run.model, run.optimizer)
    named = _to_layout_of_weights(run.strategy, saved["optimizer"], saved["model"])
    by_index = {index: named[name] for index, name in names.items() if name in named}
    groups = [dict(group) for group in indexed["param_groups"]]
    if len(groups) == len(saved["groups"]):
        for group, before, then, now in zip(
            groups, saved["groups"], saved["groups_as_built"], run.hyperparameters, strict=True
        ):
            same = [key for key in before.keys() & then.keys() & now.keys() if _is_same(then[key], now[key])]
            group |= {key: _in_form_of(group[key], before[key]) for key in same if key not in IMPLEMENTATION_FLAGS}
    beside = saved["optimizer_beside"]
    run.optimizer.load_state_dict(beside | {"state": by_index | beside["state"], "param_groups": groups})
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    for index, values in by_index.items():  # torch has cast all to the type of the weight
        held = run.optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and key != "step" and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


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


def _is_same(one: Any, other: Any) -> bool:
    """Equality of nested plain values and tensors. A list equals a tuple: YAML knows only lists."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _in_form_of(like: Any, value: Any) -> Any:
    """`value` as a tensor if `like` is one, for example a capturable optimizer's lr, else as a plain value."""
    if torch.is_tensor(like):
        return torch.full_like(like, float(value))
    return value.item() if torch.is_tensor(value) else value
