"""The state of a run under the names that the model gave its parameters, and back.

It is the same under every strategy and at every world size, so a snapshot moves between them. The config of the run
that resumes wins. The model is in training mode whenever its state is taken or loaded: some modules keep other weights
in evaluations.
"""

import copy
import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.compat import offsets_of_part, with_versions
from lockstep.data.source import tensors_in
from lockstep.errors import ConfigError
from lockstep.files import write_whole
from lockstep.training.run import Run

log = logging.getLogger(__name__)

SECTIONS = ("model", "optimizer", "ema")  # of state.pt: {name of a parameter or buffer: nested tensors}
FILE_BYTES = 2**25  # of a file with parts of tensors, at least: it is put together in memory
FILES = 16  # of a rank, at most

Part = tuple[Tensor, tuple[int, ...]]  # (a part of a tensor, where it begins in the whole)
Shards = dict[str, Part]  # {place of a tensor: this rank's part of it, contiguous on the CPU}


def collect(run: Run, totals: Tensor) -> tuple[dict[str, Any] | None, Shards]:
    """(what this rank writes by torch.save, its parts of tensors that are cut), all copies. A collective. Rank 0 writes
    all that is not cut, and another rank the layers that rank 0 has not, None if there are none. totals: of the meter,
    over all ranks. Raises ConfigError, on all ranks, for what no snapshot holds."""
    run.strategy.module.train()
    weights, optimizer, shards = run.model.state_dict(), run.optimizer.state_dict(), Shards()
    names = dict(enumerate(name for name, _ in optimized(run)))
    state, others = ({k: v for k, v in optimizer["state"].items() if (k in names) == own} for own in (True, False))
    sections: dict[str, Any] = {
        "model": weights,
        "optimizer": {names[key]: values for key, values in state.items()},
        "ema": {} if run.average is None else run.average.state_dict(),
        "buffers": {name: None for name, _ in run.model.named_buffers(remove_duplicate=False) if name in weights},
    }
    beside = {
        "optimizer_beside": optimizer | {"state": others, "param_groups": None},
        "groups": [hyperparameters_of(group) for group in run.optimizer.param_groups],
        "groups_as_built": [hyperparameters_of(group) for group in run.hyperparameters],
        "schedule": run.schedule.state_dict(),
        "step": run.step.state_dict(),
        "scaler": run.scaler.state_dict(),
        "meter": {"names": run.meter.names, "totals": totals, "logged": run.meter.logged},
        "measured": [run.objective, run.direction, run.average is not None],
        "progress": asdict(run.progress),
        "seconds": run.clock.seconds,
    }
    require_loadable([sections, beside])

    def without_part(place: str, tensor: Any) -> Any:
        """`tensor`, or, if it is cut, one without numbers that stands for it. `shards` gets this rank's part of that,
        if it is the first that has it. A collective."""
        if not hasattr(tensor, "to_local"):  # without the import of DTensor, which takes long
            return tensor
        if not tensor.dim() or not tensor.numel():
            return tensor.full_tensor()
        part, mesh = tensor.to_local().detach(), tensor.device_mesh
        of_copies = zip(mesh.get_coordinate(), tensor.placements, strict=True)
        if part.numel() and 0 in mesh.mesh and not any(at for at, placement in of_copies if placement.is_replicate()):
            own_part = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
            shards[place] = own_part, offsets_of_part(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    sections = map_tensors(without_part, sections)
    known = run.world.broadcast_json({section: list(named) for section, named in sections.items()})
    if not run.world.is_rank_zero:
        own = {s: {name: each for name, each in named.items() if name not in known[s]} for s, named in sections.items()}
        return copied({section: named for section, named in own.items() if named}) or None, shards
    return copied(sections | beside), shards


def optimized(run: Run) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter), as the optimizer's state dict counts them. Groups may have another order than the model."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    return [(names[id(one)], one) for group in run.optimizer.param_groups for one in group["params"]]


def hyperparameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Without functions. A step may hold a rate in a tensor."""
    plain = {k: v for k, v in group.items() if k not in ("params", "param_names") and not callable(v)}
    return {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in plain.items()}


def copied(value: Any) -> Any:
    """A copy on the CPU that training cannot change."""
    copies = {id(one): one if one.is_meta else one.detach().to("cpu", copy=True) for one in tensors_in(value)}
    return copy.deepcopy(value, copies)


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


def restore(run: Run, saved: dict[str, Any], path: Path) -> None:
    """Bring `run` to the snapshot `path`, of which every rank has all. What the config of this run changes stays so."""
    restore_weights(run, saved, path)
    own = copied({key: value for key, value in saved.items() if key not in SECTIONS})  # no longer of the file
    progress = run.progress
    vars(progress).update(own["progress"])  # in place: others hold it
    run.clock.start(own["seconds"], progress.step)
    # The state of each parameter; of the groups, what the run has made of a value, unless the config changes it.
    named, beside = _like_weights(run, "optimizer", saved, path), own["optimizer_beside"]
    by_index = {index: named[name] for index, (name, _) in enumerate(optimized(run)) if name in named}
    groups = [dict(group) for group in run.optimizer.state_dict()["param_groups"]]
    if len(groups) == len(own["groups"]):
        built = map(hyperparameters_of, run.hyperparameters)
        for group, before, then, now in zip(groups, own["groups"], own["groups_as_built"], built, strict=True):
            for key, value in before.items():
                is_own = key == "capturable" or (key in group and key not in now)  # by the step; by a schedule: max_lr
                if not is_own and then.get(key) == now.get(key):
                    like = group.get(key)
                    group[key] = torch.full_like(like, value) if isinstance(like, Tensor) else value
    run.optimizer.load_state_dict(beside | {"state": by_index | beside["state"], "param_groups": groups})
    for name, parameter in optimized(run):  # torch has cast all to the type of the weight
        for key, value in named.get(name, {}).items():
            held = run.optimizer.state[parameter]
            if isinstance(value, Tensor) and key != "step" and held[key].dtype != value.dtype:
                held[key] = value
    if own["measured"] != [run.objective, run.direction, run.average is not None]:  # a plateau begins anew, too
        log.info("the monitor or trainer.ema changed: no evaluation before step %d is the best one", progress.step)
        vars(progress).update(best=None, best_step=None, evals_since_best=0)
    elif own["schedule"]:
        run.schedule.load_state_dict(own["schedule"])
    progress.ahead = run.place - progress.step  # with another batch size
    run.schedule(run.place)
    run.scaler.load_state_dict(own["scaler"] or run.scaler.state_dict())  # empty after a run without loss scaling
    run.step.load_state_dict(own["step"])
    if own["meter"]["names"] == run.meter.names:  # else the epoch's training metrics begin here
        run.meter.restore(**own["meter"])


def restore_weights(run: Run, saved: dict[str, Any], path: Path) -> None:
    """The part of `restore` that an evaluation needs: weights, buffers and the average of the weights. A collective."""
    run.strategy.module.train()
    own = run.model.state_dict()
    elsewhere = set().union(*run.world.all_gather_json(list(own))) - own.keys()  # the layers of other ranks
    cut = {name: value for name, value in own.items() if hasattr(value, "to_local")}
    weights = as_held(saved, "model", path, (name for name in saved["model"] if name not in elsewhere), cut)
    load_weights(run.model, weights, saved["buffers"])
    if run.average is not None:
        run.average.load_state_dict(_like_weights(run, "ema", saved, path))


def load_weights(model: nn.Module, weights: Mapping[str, Any], buffers: Mapping[str, None]) -> None:
    """Give `model` the `weights`, and first those of its `buffers`, by their names, that it lacks or that have another
    shape there: some modules make or enlarge them in their forward pass."""
    own = dict(model.named_buffers(remove_duplicate=False))
    for name in buffers.keys() & weights.keys():
        if name not in own or not (is_lazy(own[name]) or own[name].shape == weights[name].shape):
            owner, _, last = name.rpartition(".")
            with suppress(AttributeError, KeyError):  # the model has another form, which load_state_dict explains
                device = next(model.parameters()).device
                model.get_submodule(owner).register_buffer(last, torch.empty_like(weights[name], device=device))
    model.load_state_dict(with_versions(weights, model))


def trained_weights(saved: dict[str, Any], path: Path, averaged: bool = True) -> dict[str, Any]:
    """The whole model's state dict in the snapshot `path`. averaged: with the averaged weights if it has them."""
    weights: dict[str, Any] = as_held(saved, "model", path, saved["model"], {})
    averages = as_held(saved, "ema", path, saved["ema"] if averaged else (), {})
    return weights | {name: value.to(weights[name].dtype) for name, value in averages.items()}


def _like_weights(run: Run, section: str, saved: dict[str, Any], path: Path) -> Any:
    """A section, in the order of this rank's weights: averages are updated one after the other."""
    weights = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
    return as_held(saved, section, path, weights, weights)


@torch.no_grad()
def as_held(saved: dict[str, Any], section: str, path: Path, names: Iterable[str], like: Mapping[str, Any]) -> Any:
    """Of a section of the snapshot `path`, {name: nested tensors} for those `names` that it has. With a tensor in
    `like` they are copied to its device. Those of its shape get its layout, since fused optimizers read both side by
    side; its type, if they had the type of the weight; and of one that is cut, this rank's part. Without it whole
    tensors of state.pt stay in the file: copy them. Raises ValueError if a shard lacks something."""
    wanted = Shards()

    def held(name: str, place: str, value: Tensor) -> Any:
        other, is_step = like.get(name), place.endswith("/step")  # whose place and type the optimizer chooses
        device = "cpu" if other is None or is_step else other.device
        # The momentum of sparse gradients has another layout. Hooks give other names: types are taken for the same.
        if other is not None and not is_step and (other.shape, other.layout) == (value.shape, value.layout):
            has_its_type = value.dtype == saved["model"].get(name, other).dtype
            result: Any = torch.empty_like(other, dtype=other.dtype if has_its_type else value.dtype)
        elif not value.is_meta:
            return value if other is None else value.to(device, copy=True)
        else:
            result = torch.empty(value.shape, dtype=value.dtype, device=device)
        is_cut = hasattr(result, "to_local")
        part, begins = (result.to_local(), offsets_of_part(result)) if is_cut else (result, (0,) * result.dim())
        if value.is_meta:
            wanted[place] = part, begins
        else:
            sides = zip(begins, part.shape, strict=True)
            part.copy_(value[tuple(slice(begin, begin + length) for begin, length in sides)])
        return result

    chosen = {name: saved[section][name] for name in names if name in saved[section]}
    found = {name: map_tensors(partial(held, name), value, f"{section}/{name}") for name, value in chosen.items()}
    if wanted:
        load_shards(path, wanted)
    return found


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


# Tensors of which each rank has a part, in safetensors files such as torch.distributed.checkpoint writes. Its own
# description of a checkpoint is a pickle, and its collectives unpickle what other ranks send. Here each rank writes its
# own files, and any number of ranks reads what it needs, without the others.


def save_shards(shards: Shards, folder: Path, rank: int) -> list[str]:
    """Write this rank's parts, which must not overlap with those of others, to files in `folder`. Returns their names.
    Raises OSError."""
    from safetensors.torch import save

    stored = [(name, *_real(part)) for name, part in shards.items()]
    count = min(FILES, sum(part.nbytes for _, part, _ in stored) // FILE_BYTES + 1, len(stored))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"shard-{rank + 1:05d}-model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        places = {key: {"saved_offsets": offsets} for key, _, offsets in stored[number::count]}
        header = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        write_whole(folder / name, save({key: part for key, part, _ in stored[number::count]}, header))
    return names


def load_shards(folder: Path, wanted: Mapping[str, Part]) -> None:
    """Read the values of the tensors in `wanted`, on any device, from the files in `folder`, in place. Nothing else is
    read. Raises ValueError if one is not there, or not all of it."""
    from safetensors import safe_open

    parts = {name: _real(part) for name, part in wanted.items()}
    missing = {name: part.numel() for name, (part, _) in parts.items()}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in places.keys() & parts.keys():
                (part, begins), firsts, stored = parts[name], places[name]["saved_offsets"], file.get_slice(name)
                of_each = zip(begins, part.shape, firsts, stored.get_shape(), strict=True)
                both = [(max(begin, first), min(begin + size, first + count)) for begin, size, first, count in of_each]
                if all(low < high for low, high in both):
                    ours, theirs = (
                        tuple(slice(low - start, high - start) for (low, high), start in zip(both, starts, strict=True))
                        for starts in (begins, firsts)
                    )
                    missing[name] -= part[ours].copy_(stored[theirs]).numel()
    if lost := [name for name, count in missing.items() if count]:
        raise ValueError(f"{folder} has not all of {lost[0]}")


def _real(part: Part) -> Part:
    """Complex numbers as pairs of real ones, which is how the files hold them."""
    return (torch.view_as_real(part[0]), (*part[1], 0)) if part[0].is_complex() else part
