"""What models have in common: names of parameters by pattern, and first weights that the data decides."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError


@runtime_checkable
class WeightsFromData(Protocol):
    """The contract of a model whose first weights depend on the training data. `set_weights_from` is called once,
    before the strategy takes the model, on every rank with the same inputs."""

    samples_wanted: int  # the first training samples, as many as there are of these

    def set_weights_from(self, inputs: Tensor) -> None:
        """inputs (N, ...): training samples as the model gets them, on its device, not augmented."""


def has_lazy_layers(model: nn.Module) -> bool:
    """Whether weights of `model` have no shape yet, as those of torch.nn.LazyLinear: `give_shapes` makes them."""
    return any(is_lazy(weight) for weight in [*model.parameters(), *model.buffers()])


@torch.no_grad()
def give_shapes(model: nn.Module, inputs: Any) -> None:
    """Make the weights of lazy layers, by a pass of `inputs` that changes no statistics of batch norm."""
    model.eval()(inputs)
    model.train()


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of layers that make sparse gradients, such as torch.nn.Embedding(..., sparse=True)."""
    weights = [module.weight for module in model.modules() if getattr(module, "sparse", False) is True]
    return [weight for weight in weights if isinstance(weight, nn.Parameter) and weight.requires_grad]


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """{the first name of each parameter and buffer: all its names}: a weight that two layers share has two."""
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {of_one[0]: of_one for of_one in names.values()}


def matching_parameters(model: nn.Module, pattern: str) -> set[str]:
    """The first names of the parameters that `pattern` names, such as `bias`, `norm`, `layer1` or `blocks.*.attn`.
    bias: those whose last name is bias. norm: those of a normalisation layer (its class has Norm in its name). Any
    other pattern is compared with the parameter's name and with the names of the modules that hold it, by the rules of
    fnmatch: `layer1` is all of layer1, `*.weight` every weight. Of a shared weight any of its names counts."""

    def is_named(name: str) -> bool:
        owner, _, last = name.rpartition(".")
        if pattern in ("bias", "norm"):
            return last == "bias" if pattern == "bias" else "Norm" in type(model.get_submodule(owner)).__name__
        return any(fnmatchcase(candidate, pattern) for candidate in _with_modules(name))

    names = all_names(model)
    return {first for first, _ in model.named_parameters() if any(map(is_named, names[first]))}


def _with_modules(name: str) -> Iterator[str]:
    """ "a.b.weight" -> "a", "a.b", "a.b.weight"."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def require_matches(key: str, patterns: Sequence[str], matched: Iterable[bool], names: Iterable[str]) -> None:
    """Raise ConfigError for the first of `patterns` that matched no parameter. names: of all parameters."""
    for pattern, has_match in zip(patterns, matched, strict=True):
        if not has_match and pattern not in ("bias", "norm"):
            known = list(dict.fromkeys(candidate for name in names for candidate in _with_modules(name)))
            near = ", ".join(difflib.get_close_matches(pattern, known, 3, 0.4) or known[:3])
            raise ConfigError(f"{key}: the model has no {pattern}; the nearest names are {near}; type one of these")
