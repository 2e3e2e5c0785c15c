"""What models have in common: names of parameters by pattern, shapes of inputs, and weights that the data decides."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError


@runtime_checkable
class WeightsFromData(Protocol):
    """The contract of a model whose first weights depend on the training data.

    `set_weights_from` is called once, before the strategy takes the model, on every rank with the same inputs.
    """

    samples_wanted: int  # the first training samples, as many as there are of these

    def set_weights_from(self, inputs: Tensor) -> None:
        """inputs (N, ...): training samples as the model gets them, on its device, not augmented."""


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of layers that make sparse gradients, such as torch.nn.Embedding(..., sparse=True)."""
    weights = [module.weight for module in model.modules() if getattr(module, "sparse", False) is True]
    return [weight for weight in weights if isinstance(weight, nn.Parameter) and weight.requires_grad]


def weights_behind(starts: Iterable[Any], ends: Iterable[Any] = ()) -> list[Tensor]:
    """The weights in autograd's graph from the nodes `starts` on, up to the nodes `ends`."""
    weights, seen, nodes = list[Tensor](), set(ends), list(starts)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        weight = getattr(node, "variable", None)  # of the nodes that add to .grad
        if weight is not None:
            weights.append(weight)
        with suppress(RuntimeError):  # before torch 2.14 a function of the user's may not tell
            nodes += [following for following, _ in node.next_functions]
    return weights


def image_shape(shape: Sequence[int], model: str) -> tuple[int, int, int]:
    """(channels, height, width). Raises ConfigError if the samples are not images."""
    if len(shape) != 3:
        raise ConfigError(
            f"model={model} needs images, and the samples of this data set have shape {list(shape)}; "
            f"type model=mlp or model=linear"
        )
    channels, height, width = shape
    return channels, height, width


def has_lazy_layers(model: nn.Module) -> bool:
    """Whether weights of `model` have no shape yet, as those of torch.nn.LazyLinear."""
    return any(is_lazy(weight) for weight in [*model.parameters(), *model.buffers()])


def give_shapes(model: nn.Module, inputs: Any) -> None:
    """Let lazy layers make their weights, by a pass of `inputs`, which are as in training.

    DistributedDataParallel, the optimizer and the checks of a model need weights with shapes. The pass changes no
    statistics of batch norm. Every rank draws the same weights, as the seed says.
    """
    with torch.no_grad():
        model.eval()(inputs)
    model.train()


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """{the name of each parameter and buffer in `named_parameters()` and `named_buffers()`: all names that it has}.

    A weight that two layers share has two names in the state dict.
    """
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {of_one[0]: of_one for of_one in names.values()}


def matching_parameters(model: nn.Module, pattern: str) -> set[str]:
    """The first names of the parameters that `pattern` names, such as `bias`, `norm`, `layer1` or `blocks.*.attn`.

    bias: those whose last name is bias. norm: those of a normalisation layer (its class has Norm in its name). Any
    other pattern is compared with the parameter's name and with the names of the modules that hold it, by the rules of
    fnmatch: `layer1` is all of layer1, `*.weight` every weight. Of a shared weight any of its names counts.
    """
    names, parameters = all_names(model), dict(model.named_parameters())
    return {first for first in parameters if any(_is_match(model, name, pattern) for name in names[first])}


def _is_match(model: nn.Module, name: str, pattern: str) -> bool:
    owner, _, last = name.rpartition(".")
    if pattern == "bias":
        return last == "bias"
    if pattern == "norm":
        return "Norm" in type(model.get_submodule(owner)).__name__
    return any(fnmatchcase(candidate, pattern) for candidate in _with_modules(name))


def require_matches(key: str, patterns: Sequence[str], matched: Iterable[bool], names: Iterable[str]) -> None:
    """Raise ConfigError for the first of `patterns` that matched no parameter. names: of all parameters."""
    for pattern, has_match in zip(patterns, matched, strict=True):
        if has_match or pattern in ("bias", "norm"):
            continue
        known = list(dict.fromkeys(candidate for name in names for candidate in _with_modules(name)))
        near = difflib.get_close_matches(pattern, known, 3, 0.4) or known[:3]
        raise ConfigError(
            f"{key}: the model has no {pattern}; the nearest names are {', '.join(near)}; type one of these"
        )


def _with_modules(name: str) -> Iterator[str]:
    """ "a.b.weight" -> "a", "a.b", "a.b.weight"."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
