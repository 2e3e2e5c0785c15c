"""Fine-tuning: weights of another run or file to start from, and parameters that are not trained."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.compat import with_versions
from lockstep.errors import ConfigError, first_of
from lockstep.models.base import all_names, matching_parameters, require_matches
from lockstep.snapshots.files import load_first_good, load_tensors, named_snapshots, require_safetensors
from lockstep.snapshots.state import trained_weights

log = logging.getLogger(__name__)

WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before names
NAMED = 8  # names in a line of the report


def freeze(model: nn.Module, patterns: Sequence[object]) -> None:
    """Train no parameter that `patterns` name: it gets no gradient and no optimizer state. Raises ConfigError."""
    found = _matching("freeze", model, patterns)
    frozen = [parameter.requires_grad_(False) for name, parameter in model.named_parameters() if name in found]
    if found:
        numbers, everything = (sum(map(torch.numel, of)) for of in (frozen, model.parameters()))
        which = first_of(sorted(found), NAMED)
        log.info("freeze: %d of %d weights are not trained: %s", numbers, everything, which)


def load_initial_weights(model: nn.Module, where: str | None, new_layers: Sequence[object]) -> None:
    """Copy the weights of `where` into `model`, and log what matched.
    where: a state dict's file (of torch.save, or .safetensors), a snapshot (its averaged weights, if it has any), or a
    run folder (its model.pt, else its newest snapshot). new_layers: patterns of parameters that keep their random
    weights. Raises ConfigError if another parameter is missing in the file, or has another shape there."""
    matched = _matching("new_layers", model, new_layers)
    if where is None:
        return
    path = next((file for file in (Path(where), Path(where) / "model.pt") if file.is_file()), Path(where))
    saved, own, names = _state_dict(path), model.state_dict(), all_names(model)
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
    taken = {name: value for name, value in saved.items() if name in own and name not in new}
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)} - new
    kept = {name: value for name, value in own.items() if name not in taken and name not in needed}
    try:
        model.load_state_dict(with_versions(kept | taken, model))
    except RuntimeError as error:
        what = f"parameters.init={where} does not fit the model: {' '.join(str(error).split())}"
        advice = "parameters.new_layers=[<the layers that shall begin with random weights>]"
        raise ConfigError(f"{what}; type {advice}") from None
    numbers = sum(map(torch.numel, taken.values()))
    log.info("init: %d of %d tensors (%d numbers) are those of %s", len(taken), len(own), numbers, path)
    for what, others in (("keep their first values", kept.keys()), ("not used", saved.keys() - taken.keys())):
        if others:
            log.info("init: %s: %s", what, first_of(sorted(others), NAMED))


def _matching(key: str, model: nn.Module, patterns: Sequence[object]) -> set[str]:
    words = [str(pattern) for pattern in patterns]  # a layer's name may be a number
    found = [matching_parameters(model, word) for word in words]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    require_matches(key, words, map(bool, found), names)
    return set().union(*found)


def _state_dict(path: Path) -> dict[str, Tensor]:
    """{name: tensor} of a file or a snapshot, without the names of wrappers."""
    if path.suffix == ".safetensors":
        require_safetensors(f"parameters.init={path}")
        from safetensors.torch import load_file

        contents = load_file(path)
    elif path.is_file():
        contents = load_tensors(path)
        for key in ("model", "state_dict"):  # of many people's files
            contents = contents[key] if isinstance(contents.get(key), dict) else contents
    else:
        contents = trained_weights(*load_first_good(named_snapshots(path)))
    found = {name: value for name, value in contents.items() if isinstance(value, Tensor)}
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found
