"""One process, several devices: a model spread over them (model_parallel), or a copy on each (data_parallel)."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep import compat
from lockstep.config.schema import Count, Positive
from lockstep.data.partition import fold_in
from lockstep.data.source import count_samples, map_tensors
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Outputs, Strategy, autocast, layer_groups, refuse_scripted
from lockstep.strategies.ddp import DDP
from lockstep.strategies.gradient_sync import GradientSync

log = logging.getLogger(__name__)
tree_map = compat.tree_map()


class ModelParallel(DDP):
    """Puts the children of the model, in equal groups of neighbours, on several devices of this rank.

    It fits a model that calls its children one after another, in their order. Outputs come back to the rank's first
    device, where inputs start. With several ranks each holds a replica, averaged as by DDP.

    devices: devices of each rank. options: those of DDP.
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
    """A forward pre-hook that moves a layer's inputs to its device: tensors, and objects such as a PackedSequence."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        def can_move(value: Any) -> bool:
            return hasattr(value, "to")

        return tree_map(lambda v: v.to(self.device) if can_move(v) else v, (inputs, keywords), is_leaf=can_move)


def rank_devices(world: World, count: int) -> list[torch.device]:
    """The `count` devices of this rank. On GPUs the first is `world.device`, and no two ranks share one."""
    if world.device.type != "cuda":
        return [world.device] * count
    gpus = torch.cuda.device_count()
    if world.local_size * count > gpus:
        what = f"strategy=model_parallel needs {count} GPUs for each of {world.local_size} ranks and this machine has"
        advice = f"type strategy.devices={max(1, gpus // world.local_size)}, fewer ranks, or backend=gloo"
        raise ConfigError(f"{what} {gpus}; {advice}")
    return [torch.device("cuda", world.local_rank + number * world.local_size) for number in range(count)]


class DataParallel(Strategy):
    """Copies the model to every GPU for each batch, and sends each GPU a part of it. Without a GPU, a plain module.

    first_share: the first GPU's samples relative to another's; it also gathers outputs and gradients.
    """

    supports_sync_bn = False

    def __init__(self, first_share: Positive) -> None:
        self.first_share = first_share

    def binds_one_device(self) -> bool:
        return False

    def validate(self, job: JobSpec) -> None:
        name = "strategy=data_parallel"
        if job.world_size > 1:
            what = f"{name} is one process that feeds several GPUs, and {job.world_size} ranks were asked for"
            raise ConfigError(f"{what}; type strategy=ddp, or start one process")
        if job.sync_bn == "on":
            raise ConfigError(f"{name} normalises each GPU's part by itself; type sync_bn=off, or strategy=ddp")
        if job.compile:
            what = f"{name} copies the model for every batch, and a compiled copy has the wrong weights"
            raise ConfigError(f"{what}; type trainer.compile=false")

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        if world.device.type == "cuda":
            self.module = UnevenDataParallel(self.module, self.first_share, precision)
        else:
            log.info("strategy=data_parallel finds no GPU: the model trains as a plain module on %s", world.device)


class UnevenDataParallel(nn.DataParallel[nn.Module]):
    """torch.nn.DataParallel whose first GPU may take a smaller part of each batch. precision: as trainer.precision."""

    def __init__(self, module: nn.Module, first_share: float, precision: str = "fp32") -> None:
        super().__init__(_OnOneGPU(module, precision))
        self.first_share = first_share

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        batch, start, sent = inputs[0], 0, list[tuple[Any]]()
        for size, device in zip(
            part_sizes(count_samples(batch), len(device_ids), self.first_share), device_ids, strict=True
        ):
            if size or not sent:
                part = slice(start, start + size)
                sent.append((map_tensors(lambda t, p=part, d=device: t[p].to(d, non_blocking=True), batch),))  # type: ignore[misc]
            start += size
        return sent, [kwargs or {}] * len(sent)


class _OnOneGPU(nn.Module):
    """What a GPU computes, in a thread. In a new thread autocast would be fp16, and GPUs with one seed would draw the
    same dropout mask."""

    def __init__(self, module: nn.Module, precision: str) -> None:
        super().__init__()
        self.module, self.precision = module, precision

    def forward(self, *inputs: Any, **options: Any) -> Any:
        number = torch.cuda.current_device()
        if torch.cuda.device_count() > 1:
            torch.cuda.default_generators[number].manual_seed(fold_in(torch.initial_seed(), number))
        with autocast(torch.device("cuda"), self.precision):
            return self.module(*inputs, **options)


def part_sizes(samples: int, devices: int, first_share: float) -> list[int]:
    """How many samples each device gets: the first about `first_share` times as many as another, the others alike.

    The first device, which holds the weights, gets at least one.
    """
    if devices == 1:
        return [samples]
    first = min(samples, max(1, round(samples * first_share / (devices - 1 + first_share))))
    each, remainder = divmod(samples - first, devices - 1)
    return [first] + [each + (number < remainder) for number in range(devices - 1)]
