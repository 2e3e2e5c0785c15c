"""Fine-tuning: weights of another run or file to start from, and parameters that are not trained."""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, first_of
from lockstep.models.base import all_names, matching_parameters, require_matches
from lockstep.snapshots.files import list_snapshots, load_plain, open_parts
from lockstep.strategies.tensor_bytes import StoredTensor, whole
from lockstep.text import first_line

log = logging.getLogger(__name__)

WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before names
TENSORS = (Tensor, StoredTensor)
NAMED = 8  # names in a line of the report


def freeze(model: nn.Module, patterns: Sequence[object]) -> None:
    """Train no parameter that `patterns` name: it gets no gradient and no optimizer state.

    Raises ConfigError for a pattern without a parameter, and if no parameter is left.
    """
    found = _matching("freeze", model, patterns)
    for name, parameter in model.named_parameters():
        if name in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if not found:
            raise ConfigError("the model has no parameter to train; type model=<an option in conf/model>")
        raise ConfigError(
            f"parameters.freeze=[{','.join(map(str, patterns))}] leaves no parameter to train; "
            "type parameters.freeze=[<fewer names>]"
        )
    if found:
        frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        everything = sum(parameter.numel() for parameter in model.parameters())
        log.info("freeze: %d of %d weights are not trained: %s", frozen, everything, first_of(sorted(found), NAMED))


@torch.no_grad()
def load_initial_weights(model: nn.Module, where: str | None, new_layers: Sequence[object]) -> None:
    """Copy the weights of `where` into `model`, and log what matched.

    where: a state dict's file (of torch.save, or .safetensors), a snapshot (its averaged weights, if it has any), or a
    run folder (its model.pt, else its newest snapshot). new_layers: patterns of parameters that keep their random
    weights. Raises ConfigError if another parameter is missing in the file, or has another shape there.
    """
    new = _matching("new_layers", model, new_layers)
    if where is None:
        return
    path = file_of_weights(where)
    saved: dict[str, Any] = _state_dict(path, where)
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in saved):
            saved = {name.removeprefix(prefix): value for name, value in saved.items()}
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    names = all_names(model)
    new = {name for first in new for name in names[first]}
    for shared in names.values():
        if len(shared) > 1 and shared[0] not in new:
            saved |= _under_all_names(where, shared, saved)
    wanted = {name: value for name, value in own.items() if name not in new}
    taken = [name for name, value in wanted.items() if name in saved and saved[name].shape == value.shape]
    _refuse_differences(where, {name: value for name, value in wanted.items() if name not in taken}, saved)
    if not taken:
        raise ConfigError(
            f"parameters.init={where} has no weight of this model; it has {first_of(list(saved), NAMED)}; "
            "type model=..."
        )
    for name in taken:
        own[name].copy_(whole(saved[name]))
    weights = sum(own[name].numel() for name in taken)
    log.info("init: %d of %d tensors (%d numbers) are those of %s", len(taken), len(own), weights, path)
    for what, others in (("keep their first values", own.keys() - set(taken)), ("not used", saved.keys() - set(taken))):
        if others:
            log.info("init: %s: %s", what, first_of(sorted(others), NAMED))


def _under_all_names(where: str, shared: Sequence[str], saved: dict[str, Any]) -> dict[str, Any]:
    """{name: value} for each of the names `shared` of one tensor, if the file has it under any of them.

    Raises ConfigError if the file has several values for it.
    """
    there = [name for name in shared if name in saved]
    for name in there[1:]:
        if not torch.equal(whole(saved[there[0]]), whole(saved[name])):
            raise ConfigError(
                f"parameters.init={where} has another {there[0]} than {name}, and this model has one tensor for both; "
                f"type parameters.new_layers=[{name}], or model.tied=false if model=gpt"
            )
    return {name: saved[there[0]] for name in shared if there}


def _matching(key: str, model: nn.Module, patterns: Sequence[object]) -> set[str]:
    words = [str(pattern) for pattern in patterns]  # a layer's name may be a number
    found = [matching_parameters(model, word) for word in words]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    require_matches(key, words, map(bool, found), names)
    return set().union(*found)


def file_of_weights(where: str) -> Path:
    """The file that `where`, the value of `init`, stands for. Raises ConfigError if there is none."""
    path = Path(where)
    if path.is_dir():
        snapshots = list_snapshots(path / "snapshots") or list_snapshots(path)
        candidates = [path / "model.pt", *snapshots]
        path = next((candidate for candidate in candidates if candidate.is_file()), path)
    if not path.is_file():
        what = "holds neither model.pt nor a snapshot" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"parameters.init={where} {what}; type parameters.init=<a file of weights, a snapshot or a run folder>"
        )
    return path


def _state_dict(path: Path, where: str) -> dict[str, Any]:
    if path.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ConfigError(f"parameters.init={where} needs safetensors; type pip install safetensors")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            contents: Any = load_file(path)
        else:
            contents = load_plain(path)
        if isinstance(contents, dict):
            contents = open_parts(path, contents, check=False)
    except Exception as error:  # torch.load raises many types
        reason = first_line(error)
        raise ConfigError(
            f"parameters.init={where}: {path} cannot be read ({reason}); type parameters.init=<another file>"
        ) from None
    if isinstance(contents, dict) and isinstance(contents.get("model"), dict):  # a snapshot, or many people's files
        contents = contents["model"] | (contents.get("ema") or {})
    elif isinstance(contents, dict) and isinstance(contents.get("state_dict"), dict):
        contents = contents["state_dict"]
    if not isinstance(contents, dict) or not any(isinstance(value, TENSORS) for value in contents.values()):
        raise ConfigError(
            f"parameters.init={where}: {path} holds no state dict; "
            "type parameters.init=<a file of torch.save(net.state_dict())>"
        )
    return {name: value for name, value in contents.items() if isinstance(value, TENSORS)}


def _refuse_differences(where: str, left: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Raise ConfigError if one of the tensors that were not taken is a parameter."""
    left = {name: value for name, value in left.items() if isinstance(value, nn.Parameter)}
    if not left:
        return
    described = [
        f"{name} is {list(value.shape)} here and {list(saved[name].shape) if name in saved else 'missing'} there"
        for name, value in sorted(left.items())
    ]
    layers = sorted({name.rpartition(".")[0] or name for name in left})
    raise ConfigError(
        f"parameters.init={where} does not fit the model: {first_of(described, NAMED)}; "
        f"to train {'it' if len(layers) == 1 else 'them'} from random weights type "
        f"parameters.new_layers=[{','.join(layers)}]"
    )
