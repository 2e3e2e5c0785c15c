"""One process that feeds several GPUs (torch.nn.DataParallel)."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import Positive
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Strategy
from lockstep.strategies.gradient_sync import GradientSync

log = logging.getLogger(__name__)


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
        if job.world_size > 1:
            raise ConfigError(
                f"strategy=data_parallel is one process that feeds several GPUs, and {job.world_size} ranks were asked "
                f"for; type strategy=ddp, or start one process"
            )
        if job.sync_bn == "on":
            raise ConfigError(
                "strategy=data_parallel normalises each GPU's part by itself; type sync_bn=off, or strategy=ddp"
            )
        if job.compile:
            raise ConfigError(
                "strategy=data_parallel copies the model for every batch, and a compiled copy has the wrong weights; "
                "type trainer.compile=false"
            )

    def setup(self, model: nn.Module, world: World, gradient_sync: GradientSync) -> None:
        super().setup(model, world, gradient_sync)
        if world.device.type == "cuda":
            self.module = UnevenDataParallel(model, self.first_share)
        else:
            log.info("strategy=data_parallel finds no GPU: the model trains as a plain module on %s", world.device)


class UnevenDataParallel(nn.DataParallel[nn.Module]):
    """torch.nn.DataParallel whose first GPU may take a smaller part of each batch."""

    def __init__(self, module: nn.Module, first_share: float) -> None:
        super().__init__(module)
        self.first_share = first_share

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        batch: Tensor = inputs[0]
        sizes = part_sizes(len(batch), len(device_ids), self.first_share)
        sent = []
        for number, (part, device) in enumerate(zip(batch.split(sizes), device_ids, strict=True)):
            if number == 0 or len(part):
                sent.append((part.to(device, non_blocking=True),))
        return sent, [kwargs or {}] * len(sent)


def part_sizes(samples: int, devices: int, first_share: float) -> list[int]:
    """How many samples each device gets: the first about `first_share` times as many as another, the others alike.

    The first device, which holds the weights, gets at least one.
    """
    if devices == 1:
        return [samples]
    first = min(samples, max(1, round(samples * first_share / (devices - 1 + first_share))))
    each, remainder = divmod(samples - first, devices - 1)
    return [first] + [each + (number < remainder) for number in range(devices - 1)]
