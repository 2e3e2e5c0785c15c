"""The state of a run under the names that the model gave its parameters, and back.

It is the same under every strategy and at every world size, so a snapshot moves between them. The config of the run
that resumes wins. The model is in training mode whenever its state is taken or loaded: some modules keep other weights
in evaluations.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.compat import shape_and_offsets_of_part
from lockstep.distributed.old_world import gather_state
from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy, local_part
from lockstep.strategies.messages import TYPES_SENT
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.snapshots.sharded import Shard

log = logging.getLogger(__name__)

SECTIONS = ("model", "optimizer", "ema")  # of state.pt: {name of a parameter or buffer: nested tensors}
STORED = {"shard", "shape", "dtype"}  # there in the place of a tensor whose numbers are in the shards
PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))
HELD = "a snapshot holds tensors, numbers, texts and bytes, and lists, tuples, sets and dicts of them"
# How a step is computed, not what it computes. These follow the device and the strategy of each run.
IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable", "differentiable")

# Taken.


def collect(
    run: Run, totals: Tensor, memory: dict[str, Tensor]
) -> tuple[dict[str, Any] | None, "dict[str, Shard] | None"]:
    """(what rank 0 writes to state.pt, None elsewhere; what this rank writes to shards, None if no rank has parts).

    Both are copies. A collective. totals: of the meter, over all ranks. memory: where the shards before this one were,
    which are written: new memory takes three times as long. Raises ConfigError for what no snapshot holds.
    """
    run.strategy.module.train()
    weights, optimizer, step = run.model.state_dict(), run.optimizer.state_dict(), run.step.state_dict()
    names, state = _names_by_index(run), optimizer["state"]
    require_plain(weights)
    for owner, value in ((run.optimizer, optimizer | {"param_groups": None}), (run.step, step)):
        for place, found in _lost(value):
            raise ConfigError(
                f"{type(owner).__name__} keeps a {type(found).__name__} in state_dict(){place}, and {HELD}; keep "
                f"list(x) of a collection there, torch.from_numpy(x) of an array, x.getstate() of random numbers"
            )
    buffers = [name for name, _ in run.model.named_buffers(remove_duplicate=False) if name in weights]
    named = {
        "model": weights,
        "optimizer": {names[index]: values for index, values in state.items() if index in names},
        "ema": {} if run.average is None else run.average.state_dict(),
        "buffers": dict.fromkeys(buffers),
    }
    named, shards = _split(run.strategy, named, memory)
    if not run.world.is_rank_zero:
        return None, shards
    of_no_parameter = {index: values for index, values in state.items() if index not in names}
    beside = ("params", "param_names")
    groups = [{key: value for key, value in each.items() if key not in beside} for each in run.optimizer.param_groups]
    contents = {
        **named,
        "buffers": list(named["buffers"]),
        "ema": None if run.average is None else named["ema"],
        "optimizer_beside": optimizer | {"state": of_no_parameter, "param_groups": None},
        "groups": groups,
        "groups_as_built": list(run.hyperparameters),
        "schedule": run.schedule.state_dict(),
        "step": step,
        "has_drawn": run.step.draws.has_drawn,
        "scaler": run.scaler.state_dict(),
        "meter": {"names": run.meter.names, "totals": totals},
        "objective": [run.objective, run.direction],
        "skipped": [0, 0] if run.step.skip is None else [run.step.skip.skipped, run.step.skip.in_a_row],
        "progress": asdict(run.progress),
        "seconds": run.clock.seconds,
    }
    return plain_copy(contents), shards


def _names_by_index(run: Run) -> dict[int, str]:
    """{index that the optimizer's state dict gives a parameter: the parameter's name}, matched by identity.

    Parameter groups may list the parameters in another order than the model does.
    """
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}


def _split(
    strategy: Strategy, named: dict[str, Any], memory: dict[str, Tensor]
) -> tuple[dict[str, Any], "dict[str, Shard] | None"]:
    """`named` of all ranks, complete on rank 0, without what is in shards; and this rank's shards. A collective.

    A part that several ranks hold is saved by the first of them.
    """
    world, mine, flat = strategy.world, dict[str, list[int]](), dict[str, Tensor]()
    map_tensors(flat.__setitem__, named)
    parts = strategy.shards(flat)
    if not any(world.any_of([bool(parts)])):
        return named, None
    from lockstep.snapshots.sharded import Shard

    for place, tensor in parts.items():
        if tensor.dim() and tensor.layout == torch.strided and tensor.numel():
            lengths, begin = _part(tensor)
            mine[place] = list(begin) if torch.Size(lengths).numel() else []
    savers = dict[tuple[Any, ...], int]()
    for rank, held in enumerate(world.all_gather_json(mine)):
        for place, where in held.items():
            savers.setdefault((place, *where), rank)
    shards = dict[str, Shard]()
    for place, offsets in mine.items():
        if offsets and savers[place, *offsets] == world.rank:
            part, kept = local_part(flat[place]).detach(), memory.get(place)
            if kept is None or (kept.shape, kept.dtype) != (part.shape, part.dtype):
                kept = memory[place] = torch.empty(part.shape, dtype=part.dtype, device="cpu")
            shards[place] = Shard(kept.copy_(part), tuple(offsets), tuple(flat[place].shape))

    def small(place: str, tensor: Any) -> Any:
        if place in mine:
            return {"shard": place, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    named = map_tensors(small, named)
    known = world.broadcast_json({section: list(values) for section, values in named.items()})
    missing = {s: {name: v for name, v in values.items() if name not in known[s]} for s, values in named.items()}
    if any(world.any_of([any(missing.values())])):  # layers of a pipeline are on one rank each
        for other in gather_state(world, plain_copy(missing))[1:]:
            named = {section: values | other[section] for section, values in named.items()}
    return named, shards


def _part(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of what this rank holds of a tensor, and where it begins."""
    if hasattr(tensor, "to_local"):  # without the import of DTensor, which takes long
        return shape_and_offsets_of_part(tensor)
    return tuple(tensor.shape), (0,) * tensor.dim()


def whole_model(strategy: Strategy) -> dict[str, Any]:
    """The state dict of the whole model, on rank 0. A collective."""
    strategy.module.train()
    held, world = dict(strategy.model.state_dict()), strategy.world
    for name, tensor in held.items():
        if hasattr(tensor, "full_tensor"):  # gloo knows few types: others travel in one that holds them
            wide = torch.float32 if tensor.dtype.is_floating_point else torch.int32
            full = tensor.to(tensor.dtype if tensor.dtype in TYPES_SENT else wide).full_tensor().to(tensor.dtype)
            held[name] = full.cpu() if world.is_rank_zero else None
    if _is_in_pieces(strategy):
        pieces = gather_state(world, map_tensors(lambda _, tensor: tensor.cpu(), held))
        held = {name: value for piece in pieces for name, value in piece.items()}
    return held


def _is_in_pieces(strategy: Strategy) -> bool:
    """Whether ranks hold whole tensors that others have not, as the layers of a pipeline. A collective."""
    held = {name: value for name, value in strategy.model.state_dict().items() if isinstance(value, Tensor)}
    mine = any(not hasattr(tensor, "to_local") for tensor in strategy.shards(held).values())
    return any(strategy.world.any_of([mine]))


# Brought back.


def restore(run: Run, saved: dict[str, Any], path: Path) -> None:
    """Bring `run` to what `collect` gave. Every rank passes all of it. path: of the snapshot.

    The world and the strategy may be others than the snapshot's. What the config of this run changes stays changed.
    """
    restore_weights(run, saved, path)
    own = plain_copy({key: value for key, value in saved.items() if key not in SECTIONS})  # no longer of the file
    for name, value in own["progress"].items():  # in place: others hold it
        setattr(run.progress, name, value)
    step = run.progress.step
    run.clock.start(own["seconds"], step)
    _restore_optimizer(run, saved, own, path)
    if own["schedule"]:
        run.schedule.load_state_dict(own["schedule"])
    run.progress.ahead = run.place - step  # with another batch size
    run.schedule(run.place)
    if own["scaler"]:  # empty after a run without loss scaling
        run.scaler.load_state_dict(own["scaler"])
    if run.step.skip is not None:
        run.step.skip.restore(*own["skipped"])
    run.step.load_state_dict(own["step"])
    run.step.draws.restore(own["has_drawn"])
    # The sums of the epoch and the best evaluation go on, unless something else is measured now.
    if own["meter"]["names"] == run.meter.names:
        run.meter.restore(own["meter"]["totals"])
    else:
        log.info("the task's metrics changed: this epoch's training metrics begin at step %d", step)
    other_monitor = own["objective"] != [run.objective, run.direction]
    if other_monitor or (saved["ema"] is None) != (run.average is None):
        what = "the monitor" if other_monitor else "trainer.ema"
        log.info("%s changed: the best evaluation before step %d does not count", what, step)
        run.forget_best()


def restore_weights(run: Run, saved: dict[str, Any], path: Path) -> None:
    """The part of `restore` that an evaluation needs: weights, buffers and the average of the weights. A collective."""
    run.strategy.module.train()
    own, in_pieces = run.model.state_dict(), _is_in_pieces(run.strategy)
    named = {name: value for name, value in saved["model"].items() if name in own or not in_pieces}
    weights = as_held(named, own, path)
    give_buffers(run.model, weights, saved["buffers"])
    run.model.load_state_dict(weights)
    if run.average is not None:
        run.average.load_state_dict(_like_weights(run, saved["ema"] or {}, saved["model"], path))


def give_buffers(model: nn.Module, weights: Mapping[str, Any], names: list[str]) -> None:
    """Give `model` the buffers `names` of a snapshot's `weights` that it lacks, or that have another shape there.

    Some modules make or enlarge a buffer in their forward pass, so a new model has not the form of a trained one.
    """
    own = dict(model.named_buffers(remove_duplicate=False))
    for name in names:
        if name not in weights or (name in own and is_lazy(own[name])):
            continue  # another rank's, or torch gives it its shape when it is loaded
        if name not in own or own[name].shape != weights[name].shape:
            owner, _, last = name.rpartition(".")
            with suppress(AttributeError, KeyError):  # the model has another form, which load_state_dict explains
                device = next(model.parameters()).device
                model.get_submodule(owner).register_buffer(last, torch.empty_like(weights[name], device=device))


def trained_weights(saved: dict[str, Any], path: Path, averaged: bool) -> dict[str, Any]:
    """The whole model's state dict in the snapshot `path`. averaged: with the averaged weights if it has them."""
    weights = as_held(saved["model"], {}, path)
    averages = as_held(saved["ema"] or {}, {}, path) if averaged else {}
    return weights | {name: value.to(weights[name].dtype) for name, value in averages.items()}


def as_held(named: Mapping[str, Any], like: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`named` of the snapshot `path`, {name: nested tensors}, as this rank holds those of the same name in `like`: of a
    tensor that has the shape of one that is cut, a part. Only parts are read from shards. Whole tensors of state.pt
    stay in the file: copy them.

    Raises OSError and ValueError for shards that cannot be read.
    """
    wanted = dict[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]]()

    def held(other: Any, _: str, value: Any) -> Tensor:
        shape = tuple(value["shape"] if is_stored(value) else value.shape)
        cut = other if hasattr(other, "to_local") and tuple(other.shape) == shape else None
        lengths, offsets = (shape, (0,) * len(shape)) if cut is None else _part(cut)
        if is_stored(value):
            device = torch.device("cpu") if cut is None else cut.device
            local = torch.empty(lengths, dtype=getattr(torch, value["dtype"]), device=device)
            wanted[value["shard"]] = local, offsets, shape
        else:
            local = value
            for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
                local = local if cut is None else local.narrow(dim, start, length)
        if cut is None:
            return local
        from torch.distributed.tensor import DTensor

        layout = {"run_check": False, "shape": cut.shape, "stride": cut.stride()}
        return DTensor.from_local(local.to(cut.device), cut.device_mesh, cut.placements, **layout)

    result = {name: map_tensors(partial(held, like.get(name)), value) for name, value in named.items()}
    if wanted:
        from lockstep.snapshots.sharded import Shard, load_shards

        load_shards(path, {place: Shard(*found) for place, found in wanted.items()})
    return result


def _restore_optimizer(run: Run, saved: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """The state of each parameter; of the groups, what the run has made of a value, unless the config changes it."""
    named = _like_weights(run, saved["optimizer"], saved["model"], path)
    by_index = {index: named[name] for index, name in _names_by_index(run).items() if name in named}
    groups = [dict(group) for group in run.optimizer.state_dict()["param_groups"]]
    if len(groups) == len(own["groups"]):
        of_each = zip(groups, own["groups"], own["groups_as_built"], run.hyperparameters, strict=True)
        for group, before, then, now in of_each:
            for key in before.keys() - set(IMPLEMENTATION_FLAGS):
                like, value = group.get(key), before[key]
                if value is None or _comparable(then.get(key)) != _comparable(now.get(key)):
                    continue  # None: perhaps of a function, which no snapshot holds
                value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                group[key] = torch.full_like(like, value) if isinstance(like, Tensor) else value
    beside = own["optimizer_beside"]
    run.optimizer.load_state_dict(beside | {"state": by_index | beside["state"], "param_groups": groups})
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    for index, values in by_index.items():  # torch has cast all to the type of the weight
        held = run.optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and key != "step" and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


def _comparable(value: Any) -> Any:
    """Nested plain values and tensors as what can be compared. A list equals a tuple: YAML knows only lists."""
    if isinstance(value, dict):
        return {key: _comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    return value.tolist() if isinstance(value, Tensor) else value


@torch.no_grad()
def _like_weights(run: Run, named: dict[str, Any], saved: dict[str, Any], path: Path) -> dict[str, Any]:
    """This rank's part of `named`, copied to the device and layout of its parameters and buffers, in their order.

    What has the type of its weight in `saved`, the snapshot's state dict, gets the type of the weight here; other types
    stay. Fused optimizers read a parameter and its state side by side in memory. Averages are updated one after the
    other. A state dict may have other names than the model's parameters (hooks): then types are taken for the same.
    """
    weights = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
    own = as_held({name: value for name, value in named.items() if name in weights}, weights, path)

    def copied(weight: Tensor, before: str, place: str, tensor: Tensor) -> Tensor:
        # The optimizer chooses the type of "step". The momentum of sparse gradients has another layout.
        if place == "step" or tensor.shape != weight.shape or tensor.layout != weight.layout:
            return tensor.clone()
        dtype = weight.dtype if str(tensor.dtype) == before else tensor.dtype
        return torch.empty_like(weight, dtype=dtype).copy_(tensor)

    result = {}
    for name, weight in weights.items():
        if name in own:
            kept = saved.get(name, weight)
            before = f"torch.{kept['dtype']}" if is_stored(kept) else str(kept.dtype)
            result[name] = map_tensors(partial(copied, weight, before), own[name])
    return result


# Nested values.


def map_tensors(function: Callable[[str, Any], Any], value: Any, place: str = "") -> Any:
    """`value`, nested in dicts, lists and tuples, with function(place, tensor) for each tensor, and for what stands for
    one in a snapshot. A place is such as optimizer/1.weight/exp_avg."""
    if isinstance(value, Tensor) or is_stored(value):
        return function(place, value)
    if isinstance(value, dict):
        return {key: map_tensors(function, each, f"{place}/{key}" if place else key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, each, f"{place}/{key}") for key, each in enumerate(value)])
    return value


def is_stored(value: Any) -> bool:
    """Whether it stands for a tensor whose numbers are in the shards."""
    return isinstance(value, dict) and value.keys() == STORED


def as_saved(tensor: Tensor) -> Tensor:
    """`tensor` as files of weights hold it: on the CPU and, if it is dense, contiguous."""
    return tensor.cpu().contiguous() if tensor.layout == torch.strided else tensor.cpu()


def plain_copy(value: Any) -> Any:
    """A copy on the CPU that training cannot change: dicts, lists, tuples, sets, tensors and plain values.

    Numbers of other libraries become Python's. Other objects become None: `weights_only` would refuse the file.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(plain_copy, value))
    if type(value) in PLAIN:
        return value
    return value.item() if _is_number(value) else None


def require_plain(weights: Mapping[str, Any]) -> None:
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
    elif not (isinstance(value, Tensor) or type(value) in PLAIN or _is_number(value)):
        yield place, value


def _is_number(value: Any) -> bool:
    """Whether it is a number of another library, such as numpy's."""
    return hasattr(value, "item") and getattr(value, "shape", None) == ()
