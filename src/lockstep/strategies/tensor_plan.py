"""The plan of strategy=tensor_parallel: which layers are cut, and how."""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from lockstep.errors import ConfigError

STYLES = ("colwise", "rowwise", "gathered")
EXAMPLE = "strategy.plan=[{<module>:colwise},{<the next one>:rowwise}]"


class TensorPlan:
    """Styles of layers by patterns of their names, such as `*.widen`; where several match, the last one wins.

    colwise cuts the outputs of a linear layer or an embedding, rowwise its inputs and adds up what the ranks found, and
    gathered is colwise with whole outputs on every rank. Other styles are ParallelStyle objects of torch. Raises
    ConfigError for a style of another name.
    """

    def __init__(self, entries: Sequence[Mapping[Any, str | ParallelStyle]]) -> None:
        self.entries = [(str(pattern), style) for entry in entries for pattern, style in entry.items()]
        for pattern, style in self.entries:
            if style not in STYLES and not isinstance(style, ParallelStyle):
                raise ConfigError(
                    f"strategy.plan: {style} is none of the styles {', '.join(STYLES)}; "
                    f"type strategy.plan=[{{{pattern}:colwise}}]"
                )

    def styles(self, model: nn.Module) -> dict[str, ParallelStyle]:
        """{name of a layer: how it is cut}, as torch's parallelize_module takes it."""
        return {name: _parallel_style(style, model.get_submodule(name)) for name, style in self._named(model).items()}

    def validate(self, model: nn.Module, size: int) -> None:
        """Raise ConfigError if a pattern names no layer, or one that cannot be cut into `size` parts, or if cut outputs
        are nowhere put together."""
        named = self._named(model)
        for name, style in named.items():
            if not isinstance(style, ParallelStyle):
                _require_whole_parts(name, model, style, size)
                _require_whole_heads(name, model, size)
                _require_own_weight(name, model)
        if size > 1:
            _require_both_halves(model, named)

    def _named(self, model: nn.Module) -> dict[str, str | ParallelStyle]:
        modules = [name for name, _ in model.named_modules()]
        found: dict[str, str | ParallelStyle] = {}
        for pattern, style in self.entries:
            matched = [name for name in modules if fnmatchcase(name, pattern)]
            if not matched:
                raise ConfigError(
                    f"strategy.plan: the model has no {pattern}{_nearest(pattern, modules[1:])}; "
                    f"type model=gpt, or {EXAMPLE}"
                )
            found |= dict.fromkeys(matched, style)
        return found


def _nearest(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern, names, 3, 0.0)
    return f"; the nearest names are {', '.join(near)}" if near else ", as it is one layer"


def _parallel_style(style: str | ParallelStyle, layer: nn.Module) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style == "rowwise" and isinstance(layer, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())  # every rank has all token numbers
    if style == "rowwise":
        return RowwiseParallel()
    return ColwiseParallel(output_layouts=Replicate()) if style == "gathered" else ColwiseParallel()


def _require_whole_parts(name: str, model: nn.Module, style: str, size: int) -> None:
    layer = model.get_submodule(name)
    if not isinstance(layer, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"strategy.plan: {name} is a {type(layer).__name__}, and {style} is for torch.nn.Linear and "
            f"torch.nn.Embedding; type {EXAMPLE}"
        )
    outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
    length = inputs if style == "rowwise" else outputs
    if length % size:
        ranks = max(part for part in range(1, size) if length % part == 0)
        raise ConfigError(
            f"strategy.plan: {style} cannot cut the {length} {'inputs' if style == 'rowwise' else 'outputs'} of {name} "
            f"into {size} equal parts; type --nproc_per_node={ranks} or launch.nproc_per_node={ranks}"
        )


def _require_whole_heads(name: str, model: nn.Module, size: int) -> None:
    """Raise ConfigError if a rank would get a part of a head. An attention says by `heads` how many it has."""
    parent = name.rpartition(".")[0]
    heads = getattr(model.get_submodule(parent), "heads", size)
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"strategy=tensor_parallel cannot share the {heads} heads of {parent} among {size} ranks; "
            f"type model.heads={size}, or another number of ranks"
        )


def _require_own_weight(name: str, model: nn.Module) -> None:
    """Raise ConfigError if another layer uses the same weight: only one of them would be cut."""
    mine = model.get_submodule(name).weight
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is mine and other != f"{name}.weight":
            raise ConfigError(
                f"strategy.plan cuts {name}.weight, which is also {other}; type model.tied=false if model=gpt, or "
                f"strategy.plan=[...] without it"
            )


def _require_both_halves(model: nn.Module, named: Mapping[str, str | ParallelStyle]) -> None:
    """Raise ConfigError for colwise layers without any rowwise one, whose ranks would compute with parts as if they
    were the whole, and for the reverse. Styles of torch may do the other half."""
    if any(isinstance(style, ParallelStyle) for style in named.values()):
        return
    colwise = [name for name, style in named.items() if style == "colwise"]
    rowwise = [name for name, style in named.items() if style == "rowwise"]
    linear = [name for name in rowwise if isinstance(model.get_submodule(name), nn.Linear)]
    if colwise and not linear:
        raise ConfigError(
            f"strategy.plan cuts the outputs of {colwise[0]}, and no rowwise layer adds them up again; "
            f"type {EXAMPLE}, or strategy.plan=[{{{colwise[0]}:gathered}}]"
        )
    if linear and not colwise:
        raise ConfigError(
            f"strategy.plan wants the inputs of {linear[0]} in parts, and no colwise layer makes them; type {EXAMPLE}"
        )
