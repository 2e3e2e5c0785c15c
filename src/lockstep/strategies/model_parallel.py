"""One model over several devices of a rank: neighbouring layers share a device, and activations travel."""

from typing import Any

import torch
from torch import nn

from lockstep import compat
from lockstep.config.schema import Count
from lockstep.data.source import map_tensors
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import Outputs, refuse_scripted
from lockstep.strategies.ddp import DDP
from lockstep.strategies.gradient_sync import GradientSync

tree_map = compat.tree_map()


class ModelParallel(DDP):
    """Puts the children of the model, in equal groups of neighbours, on several devices of this rank.

    It fits a model that calls its children one after another, in their order. Outputs come back to the rank's first
    device, where inputs start. With several ranks each holds a replica, averaged as by DDP.

    devices: devices of each rank.
    options: those of DDP.
    """

    def __init__(self, devices: Count, **options: Any) -> None:
        super().__init__(**options)
        self.devices = devices

    def binds_one_device(self) -> bool:
        return False

    def validate_model(self, model: nn.Module, world_size: int) -> None:
        super().validate_model(model, world_size)
        refuse_scripted(model, "model_parallel")
        layer_groups(model, self.devices)

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        mine = rank_devices(world, self.devices)
        for group, device in zip(layer_groups(model, self.devices), mine, strict=True):
            for child in group.values():
                child.to(device)
                child.register_forward_pre_hook(_MoveInputs(device), with_kwargs=True)
        model.register_forward_hook(lambda module, inputs, outputs: map_tensors(lambda t: t.to(mine[0]), outputs))
        super().setup(model, outputs, world, gradient_sync, precision)


class _MoveInputs:
    """A forward pre-hook that moves a layer's inputs to its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        def moved(value: Any) -> Any:
            return value.to(self.device) if _can_move(value) else value

        return tree_map(moved, (inputs, keywords), is_leaf=_can_move)


def _can_move(value: Any) -> bool:
    """A tensor, or an object such as a PackedSequence."""
    return hasattr(value, "to")


def rank_devices(world: World, count: int) -> list[torch.device]:
    """The `count` devices of this rank. On GPUs the first is `world.device`, and no two ranks share one."""
    if world.device.type != "cuda":
        return [world.device] * count
    gpus = torch.cuda.device_count()
    if world.local_size * count > gpus:
        raise ConfigError(
            f"strategy=model_parallel needs {count} GPUs for each of {world.local_size} ranks and this machine has "
            f"{gpus}; type strategy.devices={max(1, gpus // world.local_size)}, fewer ranks, or backend=gloo"
        )
    return [torch.device("cuda", world.local_rank + number * world.local_size) for number in range(count)]


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
