"""One process, several devices: a model spread over them (model_parallel), or a copy on each (data_parallel)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import Count, Positive
from lockstep.data.partition import cut
from lockstep.data.source import count_samples, map_tensors
from lockstep.strategies.base import Strategy, layer_groups
from lockstep.strategies.ddp import DDP


@dataclass
class ModelParallel(DDP):
    """Puts the children of the model, in equal groups of neighbours, on several devices of this rank. It fits a model
    that calls its children one after another, in their order. Outputs come back to the rank's first device, where
    inputs start. With several ranks each holds a replica, averaged as by DDP."""

    devices: Count
    name = "model_parallel"
    binds_one_device = False

    def spread(self) -> None:
        world, mine = self.world, [self.world.device] * self.devices
        if world.device.type == "cuda":  # the first is `world.device`, and no two ranks share one
            mine = [torch.device("cuda", world.local_rank + n * world.local_size) for n in range(self.devices)]
        for group, device in zip(layer_groups(self.model, self.devices), mine, strict=True):
            for child in group.values():
                child.to(device)
                child.register_forward_pre_hook(partial(move, device), with_kwargs=True)
        self.model.register_forward_hook(lambda module, inputs, outputs: move(mine[0], module, outputs)[0])
        super().spread()


def move(device: torch.device, module: nn.Module, *tensors: Any) -> Any:
    """A hook that moves what a layer takes or returns."""
    return map_tensors(lambda tensor: tensor.to(device), tensors)


@dataclass
class DataParallel(Strategy):
    """Copies the model to every GPU for each batch, and sends each GPU a part of it. Without a GPU, a plain module."""

    first_share: Positive
    name = "data_parallel"
    # A copy normalises its part by itself, and a compiled one has the wrong weights.
    refused = (*Strategy.refused, "several ranks", "sync_bn=on", "trainer.compile")

    def spread(self) -> None:
        if self.world.device.type == "cuda":
            self.module = self.evaluated = UnevenDataParallel(self.module, self.first_share)


class UnevenDataParallel(nn.DataParallel[nn.Module]):
    """torch.nn.DataParallel whose first GPU, which holds the weights, takes `first_share` times as many samples as
    another, and at least one."""

    def __init__(self, module: nn.Module, first_share: float) -> None:
        super().__init__(module)
        self.first_share = first_share

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        samples, others = count_samples(inputs[0]), len(device_ids) - 1
        first = min(samples, max(1, round(samples * self.first_share / (others + self.first_share))))
        rest = [cut(samples - first, others, number) for number in range(others)]
        sizes = [first, *(stop - start for start, stop in rest if start < stop)]

        def part(tensor: Tensor, number: int) -> Any:
            return tensor.split(sizes)[number].to(device_ids[number], non_blocking=True)

        sent = [(map_tensors(partial(part, number=number), inputs[0]), *inputs[1:]) for number in range(len(sizes))]
        return sent, [kwargs or {}] * len(sent)
