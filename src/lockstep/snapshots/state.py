"""The state of a run under the names that the model gave its parameters, and back.

It is the same under every strategy and at every world size, so a snapshot moves between them. The config of the run
that resumes wins. The model is in training mode whenever its state is taken or loaded: some modules keep other weights
in evaluations.
"""

import copy
import io
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.compat import shape_and_offsets_of_part
from lockstep.errors import ConfigError
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.snapshots.sharded import Shards

log = logging.getLogger(__name__)

SECTIONS = ("model", "optimizer", "ema")  # of state.pt: {name of a parameter or buffer: nested tensors}

# Taken.


def collect(run: Run, totals: Tensor) -> tuple[dict[str, Any] | None, "Shards"]:
    """(what this rank writes by torch.save, its parts of tensors that are cut). A collective.

    Rank 0 writes all that is not cut, and another rank the layers that rank 0 has not, None if there are none. All are
    copies. totals: of the meter, over all ranks. Raises ConfigError, on all ranks, for what no snapshot holds.
    """
    run.strategy.module.train()
    weights, optimizer, step = run.model.state_dict(), run.optimizer.state_dict(), run.step.state_dict()
    names, state, shards = _names_by_index(run), optimizer["state"], dict[str, Any]()
    beside = optimizer | {"state": {key: each for key, each in state.items() if key not in names}, "param_groups": None}
    groups, built = ([_of_group(each) for each in of] for of in (run.optimizer.param_groups, run.hyperparameters))
    schedule, progress = run.schedule.state_dict(), asdict(run.progress)
    require_loadable([weights, state, beside, groups, built, step, schedule, progress])
    buffers = [name for name, _ in run.model.named_buffers(remove_duplicate=False) if name in weights]
    sections: dict[str, Any] = {
        "model": weights,
        "optimizer": {names[index]: values for index, values in state.items() if index in names},
        "ema": {} if run.average is None else run.average.state_dict(),
        "buffers": dict.fromkeys(buffers),
    }
    sections = map_tensors(partial(_without_parts, shards), sections)
    known = run.world.broadcast_json({section: list(named) for section, named in sections.items()})
    if not run.world.is_rank_zero:
        own = {s: {name: each for name, each in named.items() if name not in known[s]} for s, named in sections.items()}
        return copied({section: named for section, named in own.items() if named}) or None, shards
    contents = {
        **sections,
        "ema": None if run.average is None else sections["ema"],
        "optimizer_beside": beside,
        "groups": groups,
        "groups_as_built": built,
        "schedule": schedule,
        "step": step,
        "has_drawn": run.step.draws.has_drawn,
        "scaler": run.scaler.state_dict(),
        "meter": {"names": run.meter.names, "totals": totals},
        "objective": [run.objective, run.direction],
        "skipped": [0, 0] if run.step.skip is None else [run.step.skip.skipped, run.step.skip.in_a_row],
        "progress": progress,
        "seconds": run.clock.seconds,
    }
    return copied(contents), shards


def _names_by_index(run: Run) -> dict[int, str]:
    """{index that the optimizer's state dict gives a parameter: the parameter's name}, matched by identity.

    Parameter groups may list the parameters in another order than the model does.
    """
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, without functions."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names") and not callable(v)}


def _without_parts(shards: "Shards", place: str, tensor: Any) -> Tensor:
    """`tensor`, or, if it is cut, one without numbers that stands for it. `shards` gets this rank's part of that, if it
    is the first that has it. A collective."""
    if not hasattr(tensor, "to_local"):  # without the import of DTensor, which takes long
        whole: Tensor = tensor
        return whole
    if not tensor.dim() or not tensor.numel():
        whole = tensor.full_tensor()
        return whole
    mesh = tensor.device_mesh
    of_copies = zip(mesh.get_coordinate(), tensor.placements, strict=True)
    is_first = 0 in mesh.mesh and not any(at for at, placement in of_copies if placement.is_replicate())
    part = tensor.to_local().detach()
    if part.numel() and is_first:
        _, offsets = shape_and_offsets_of_part(tensor)
        shards[place] = part.to("cpu", copy=True, memory_format=torch.contiguous_format), offsets
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def copied(value: Any) -> Any:
    """A copy on the CPU that training cannot change."""
    tensors = dict[int, Any]()

    def keep(_: str, tensor: Tensor) -> None:
        tensors[id(tensor)] = tensor if tensor.is_meta else tensor.detach().to("cpu", copy=True)

    map_tensors(keep, value)
    return copy.deepcopy(value, tensors)


def require_loadable(value: Any) -> None:
    """Raise ConfigError for what a file of tensors and plain values does not give back."""
    file = io.BytesIO()
    try:
        torch.save(map_tensors(lambda _, tensor: None, value), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:  # of any type
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"the state of the model, the optimizer, the schedule or the step has {found[1] if found else error}"
        raise ConfigError(f"{what}; keep tensors, numbers, texts, lists, tuples, sets and dicts there") from None


# Brought back.


def restore(run: Run, saved: dict[str, Any], path: Path) -> None:
    """Bring `run` to what `collect` gave. Every rank passes all of it. path: of the snapshot.

    The world and the strategy may be others than the snapshot's. What the config of this run changes stays changed.
    """
    restore_weights(run, saved, path)
    own = copied({key: value for key, value in saved.items() if key not in SECTIONS})  # no longer of the file
    for name, value in own["progress"].items():  # in place: others hold it
        setattr(run.progress, name, value)
    step = run.progress.step
    run.clock.start(own["seconds"], step)
    _restore_optimizer(run, saved, own, path)
    other_monitor = own["objective"] != [run.objective, run.direction]
    measures_another = other_monitor or (saved["ema"] is None) != (run.average is None)
    if own["schedule"] and not measures_another:  # else a plateau begins anew
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
    if measures_another:
        what = "the monitor" if other_monitor else "trainer.ema"
        log.info("%s changed: the best evaluation before step %d does not count", what, step)
        run.forget_best()


def restore_weights(run: Run, saved: dict[str, Any], path: Path) -> None:
    """The part of `restore` that an evaluation needs: weights, buffers and the average of the weights. A collective."""
    run.strategy.module.train()
    own = run.model.state_dict()
    elsewhere = set().union(*run.world.all_gather_json(list(own))) - own.keys()  # the layers of other ranks
    named = {name: value for name, value in saved["model"].items() if name not in elsewhere}
    weights = as_held("model", named, own, path)
    give_buffers(run.model, weights, saved["buffers"])
    run.model.load_state_dict(weights)
    if run.average is not None:
        run.average.load_state_dict(_like_weights(run, "ema", saved, path))


def give_buffers(model: nn.Module, weights: Mapping[str, Any], names: Mapping[str, None]) -> None:
    """Give `model` the buffers `names` of a snapshot's `weights` that it lacks, or that have another shape there.

    Some modules make or enlarge a buffer in their forward pass, so a new model has not the form of a trained one.
    """
    own = dict(model.named_buffers(remove_duplicate=False))
    for name in names.keys() & weights.keys():
        if name in own and (is_lazy(own[name]) or own[name].shape == weights[name].shape):
            continue
        owner, _, last = name.rpartition(".")
        with suppress(AttributeError, KeyError):  # the model has another form, which load_state_dict explains
            device = next(model.parameters()).device
            model.get_submodule(owner).register_buffer(last, torch.empty_like(weights[name], device=device))


def trained_weights(saved: dict[str, Any], path: Path, averaged: bool) -> dict[str, Any]:
    """The whole model's state dict in the snapshot `path`. averaged: with the averaged weights if it has them."""
    weights = as_held("model", saved["model"], {}, path)
    averages = as_held("ema", saved["ema"] or {}, {}, path) if averaged else {}
    return weights | {name: value.to(weights[name].dtype) for name, value in averages.items()}


def as_held(section: str, named: Mapping[str, Any], like: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`named` of a section of the snapshot `path`, {name: nested tensors}, as this rank holds those of the same name in
    `like`: of a tensor that has the shape of one that is cut, a part. Only parts are read from shards. Whole tensors of
    state.pt stay in the file: copy them. Raises ValueError for shards that cannot be read.
    """
    wanted = dict[str, Tensor]()

    def held(other: Any, place: str, value: Tensor) -> Any:
        is_cut = hasattr(other, "to_local") and other.shape == value.shape
        if not is_cut and not value.is_meta:
            return value
        if is_cut:
            result: Any = torch.empty_like(other, dtype=value.dtype)
        else:
            result = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        if value.is_meta:
            wanted[place] = result
        else:
            shape, offsets = shape_and_offsets_of_part(other)
            window = tuple(slice(begin, begin + length) for begin, length in zip(offsets, shape, strict=True))
            result.to_local().copy_(value[window])
        return result

    with torch.no_grad():
        whole = {
            name: map_tensors(partial(held, like.get(name)), value, f"{section}/{name}")
            for name, value in named.items()
        }
        if wanted:
            from lockstep.snapshots.sharded import load_shards

            load_shards(path, wanted)
    return whole


def _restore_optimizer(run: Run, saved: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """The state of each parameter; of the groups, what the run has made of a value, unless the config changes it."""
    named = _like_weights(run, "optimizer", saved, path)
    by_index = {index: named[name] for index, name in _names_by_index(run).items() if name in named}
    groups = [dict(group) for group in run.optimizer.state_dict()["param_groups"]]
    if len(groups) == len(own["groups"]):
        of_each = zip(groups, own["groups"], own["groups_as_built"], run.hyperparameters, strict=True)
        for group, before, then, now in of_each:
            for key, value in before.items():
                if key == "capturable" or then.get(key) != now.get(key):  # which the step decides
                    continue
                value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                like = group.get(key)
                group[key] = torch.full_like(like, value) if isinstance(like, Tensor) else value
    beside = own["optimizer_beside"]
    run.optimizer.load_state_dict(beside | {"state": by_index | beside["state"], "param_groups": groups})
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    for index, values in by_index.items():  # torch has cast all to the type of the weight
        held = run.optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and key != "step" and held[key].dtype != value.dtype:
                held[key] = value


@torch.no_grad()
def _like_weights(run: Run, section: str, saved: dict[str, Any], path: Path) -> dict[str, Any]:
    """This rank's part of a section, copied to the device and layout of its parameters and buffers, in their order.

    What has the type of its weight in the snapshot gets the type of the weight here; other types stay. Fused optimizers
    read a parameter and its state side by side in memory. Averages are updated one after the other. A state dict may
    have other names than the model's parameters (hooks): then types are taken for the same.
    """
    weights = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
    named = {name: value for name, value in (saved[section] or {}).items() if name in weights}
    own = as_held(section, named, weights, path)

    def copied_like(weight: Tensor, before: torch.dtype, place: str, tensor: Tensor) -> Tensor:
        # The optimizer chooses the type of "step". The momentum of sparse gradients has another layout.
        if place.endswith("/step") or tensor.shape != weight.shape or tensor.layout != weight.layout:
            return tensor.clone() if place.endswith("/step") else tensor.to(weight.device, copy=True)
        return torch.empty_like(weight, dtype=weight.dtype if tensor.dtype == before else tensor.dtype).copy_(tensor)

    return {
        name: map_tensors(partial(copied_like, weight, saved["model"].get(name, weight).dtype), own[name], name)
        for name, weight in weights.items()
        if name in own
    }


def map_tensors(function: Callable[[str, Any], Any], value: Any, place: str = "") -> Any:
    """`value`, nested in dicts, lists and tuples, with function(place, tensor) for each tensor. A place is such as
    optimizer/1.weight/exp_avg."""
    if isinstance(value, Tensor):
        return function(place, value)
    if isinstance(value, dict):
        return {key: map_tensors(function, each, f"{place}/{key}" if place else key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, each, f"{place}/{key}") for key, each in enumerate(value)])
    return value


def as_saved(tensor: Tensor) -> Tensor:
    """`tensor` as files of weights hold it: on the CPU and, if it is dense, contiguous."""
    return tensor.cpu().contiguous() if tensor.layout == torch.strided else tensor.cpu()
