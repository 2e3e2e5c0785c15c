"""Cuts a model's layers into groups of neighbours, for strategies that place them on several devices or ranks."""

import torch
from torch import nn

from lockstep.errors import ConfigError


def layer_groups(module: nn.Module, count: int) -> list[dict[str, nn.Module]]:
    """The children of `module` in `count` groups of neighbours, [{name: child}, ...].

    Groups have about equally many layers with parameters. A layer without parameters stays with the one before it.
    Raises ConfigError if there are fewer layers with parameters than groups.
    """
    children = list(module.named_children())
    with_parameters = [index for index, (_, child) in enumerate(children) if any(True for _ in child.parameters())]
    if len(with_parameters) < count:
        raise ConfigError(
            f"this model has {len(with_parameters)} layers with parameters, too few for {count} places; "
            f"type model=mlp model.depth={count - 1}"
        )
    first_of_group = [int(group[0]) for group in torch.tensor(with_parameters).tensor_split(count)]
    starts = [0, *first_of_group[1:], len(children)]
    return [dict(children[start:end]) for start, end in zip(starts, starts[1:], strict=False)]
