"""Fine-tuning: weights of another run or file to start from, and parameters that are not trained."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, first_of
from lockstep.models.base import all_names, matching_parameters, require_matches
from lockstep.snapshots.files import load_state, load_tensors, require_safetensors
from lockstep.snapshots.find import named_snapshots
from lockstep.snapshots.state import trained_weights
from lockstep.text import first_line

log = logging.getLogger(__name__)

WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before names
NAMED = 8  # names in a line of the report


def freeze(model: nn.Module, patterns: Sequence[object]) -> None:
    """Train no parameter that `patterns` name: it gets no gradient and no optimizer state.

    Raises ConfigError for a pattern without a parameter, and if no parameter is left.
    """
    found = _matching("freeze", model, patterns)
    for name, parameter in model.named_parameters():
        if name in found:
            parameter.requires_grad_(False)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not trained:
        typed = ",".join(map(str, patterns))
        raise ConfigError(f"parameters.freeze=[{typed}] leaves no parameter to train; type parameters.freeze=[<fewer>]")
    if found:
        everything = sum(parameter.numel() for parameter in model.parameters())
        which = first_of(sorted(found), NAMED)
        log.info("freeze: %d of %d weights are not trained: %s", everything - trained, everything, which)


@torch.no_grad()
def load_initial_weights(model: nn.Module, where: str | None, new_layers: Sequence[object]) -> None:
    """Copy the weights of `where` into `model`, and log what matched.

    where: a state dict's file (of torch.save, or .safetensors), a snapshot (its averaged weights, if it has any), or a
    run folder (its model.pt, else its newest snapshot). new_layers: patterns of parameters that keep their random
    weights. Raises ConfigError if another parameter is missing in the file, or has another shape there.
    """
    matched = _matching("new_layers", model, new_layers)
    if where is None:
        return
    path = next((file for file in (Path(where), Path(where) / "model.pt") if file.is_file()), None)
    path = path or named_snapshots(where, "parameters.init")[0]
    saved = _state_dict(path, where)
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    names = all_names(model)
    new = {name for first in matched for name in names[first]}
    for shared in names.values():  # safetensors' save_model keeps one of the names
        there = [name for name in shared if name in saved and name not in new]
        for name in there[1:]:
            if not torch.equal(saved[there[0]], saved[name]):
                raise ConfigError(
                    f"parameters.init={where} has another {there[0]} than {name}, and this model has one tensor for "
                    f"both; type parameters.new_layers=[{name}], or model.tied=false if model=gpt"
                )
        saved |= {name: saved[there[0]] for name in shared if there}
    wanted = {name: value for name, value in own.items() if name not in new}
    taken = [name for name, value in wanted.items() if name in saved and saved[name].shape == value.shape]
    left = [name for name, value in sorted(wanted.items()) if name not in taken and isinstance(value, nn.Parameter)]
    if left:
        shapes = {name: list(saved[name].shape) if name in saved else "missing" for name in left}
        described = first_of(
            [f"{name} is {list(own[name].shape)} here and {shapes[name]} there" for name in left], NAMED
        )
        layers = ",".join(sorted({name.rpartition(".")[0] or name for name in left}))
        raise ConfigError(
            f"parameters.init={where} does not fit the model: {described}; to train from random weights type "
            f"parameters.new_layers=[{layers}]"
        )
    if not taken:
        raise ConfigError(f"parameters.init={where} has no weight of this model; type parameters.init=<another file>")
    for name in taken:
        own[name].copy_(saved[name])
    numbers = sum(own[name].numel() for name in taken)
    log.info("init: %d of %d tensors (%d numbers) are those of %s", len(taken), len(own), numbers, path)
    for what, others in (("keep their first values", own.keys() - set(taken)), ("not used", saved.keys() - set(taken))):
        if others:
            log.info("init: %s: %s", what, first_of(sorted(others), NAMED))


def _matching(key: str, model: nn.Module, patterns: Sequence[object]) -> set[str]:
    words = [str(pattern) for pattern in patterns]  # a layer's name may be a number
    found = [matching_parameters(model, word) for word in words]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    require_matches(key, words, map(bool, found), names)
    return set().union(*found)


def _state_dict(path: Path, where: str) -> dict[str, Tensor]:
    """{name: tensor} of a file or a snapshot, without the names of wrappers."""
    if path.suffix == ".safetensors":
        require_safetensors(f"parameters.init={where}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            contents: Any = load_file(path)
        elif path.is_dir():
            contents = trained_weights(load_state(path), path, averaged=True)
        else:
            contents = load_tensors(path)
        for key in ("model", "state_dict"):  # of many people's files
            if isinstance(contents.get(key), dict):
                contents = contents[key]
        tensors = {name: value for name, value in contents.items() if isinstance(value, Tensor)}
    except ConfigError:
        raise
    except Exception as error:  # torch.load raises many types
        raise ConfigError(
            f"parameters.init={where}: {path} cannot be read as a state dict ({first_line(error)}); "
            "type parameters.init=<a file of torch.save(net.state_dict())>"
        ) from None
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors
