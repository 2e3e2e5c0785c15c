"""Layers that learn the shape of their inputs from the first samples, such as torch.nn.LazyLinear."""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def has_lazy_layers(model: nn.Module) -> bool:
    """Whether weights of `model` have no shape yet."""
    return any(is_lazy(weight) for weight in [*model.parameters(), *model.buffers()])


def give_shapes(model: nn.Module, inputs: Any) -> None:
    """Let lazy layers make their weights, by a pass of `inputs`, which are as in training.

    DistributedDataParallel, the optimizer and the checks of a model want weights with shapes. The pass changes no
    statistics of batch norm. Every rank draws the same weights, as the seed says.
    """
    with torch.no_grad():
        model.eval()(inputs)
    model.train()
