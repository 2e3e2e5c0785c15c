"""A training that records what the model sees: shapes, types and layouts of every layer's inputs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from support.worlds import train


class Call(NamedTuple):
    """One forward pass of one layer."""

    layer: str
    training: bool
    shape: tuple[int, ...]
    input_type: torch.dtype
    output_type: torch.dtype
    weight_type: torch.dtype
    channels_last_input: bool
    channels_last_weight: bool
    deterministic: bool


def record_training(cfg: Any) -> list[Call]:
    """A whole training in this rank -> the forward passes of its linear layers and convolutions, in order."""
    calls: list[Call] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            calls.append(_call(module, inputs[0], output))

    handle = nn.modules.module.register_module_forward_hook(record)
    try:
        train(cfg)
    finally:
        handle.remove()
    return calls


def record_trainings(configs: list[Any]) -> list[list[Call]]:
    """Several trainings, one after the other, in one world."""
    return [record_training(cfg) for cfg in configs]


def _call(module: nn.Linear | nn.Conv2d, inputs: Tensor, output: Tensor) -> Call:
    return Call(
        layer=type(module).__name__,
        training=module.training,
        shape=tuple(inputs.shape),
        input_type=inputs.dtype,
        output_type=output.dtype,
        weight_type=module.weight.dtype,
        channels_last_input=_is_channels_last(inputs),
        channels_last_weight=_is_channels_last(module.weight),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
