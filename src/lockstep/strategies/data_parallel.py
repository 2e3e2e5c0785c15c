"""One process that feeds several GPUs (torch.nn.DataParallel)."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.config.schema import Positive
from lockstep.data.partition import fold_in
from lockstep.data.source import count_samples, map_tensors
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import JobSpec, Outputs, Strategy
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

    def setup(
        self, model: nn.Module, outputs: Outputs, world: World, gradient_sync: GradientSync, precision: str = "fp32"
    ) -> None:
        super().setup(model, outputs, world, gradient_sync, precision)
        if world.device.type == "cuda":
            self.module = UnevenDataParallel(self.module, self.first_share)
        else:
            log.info("strategy=data_parallel finds no GPU: the model trains as a plain module on %s", world.device)


class UnevenDataParallel(nn.DataParallel[nn.Module]):
    """torch.nn.DataParallel whose first GPU may take a smaller part of each batch."""

    def __init__(self, module: nn.Module, first_share: float) -> None:
        super().__init__(module)
        self.first_share = first_share

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        batch, start = inputs[0], 0
        sent: list[tuple[Any]] = []
        for size, device in zip(
            part_sizes(count_samples(batch), len(device_ids), self.first_share), device_ids, strict=True
        ):
            if size or not sent:
                part = slice(start, start + size)
                sent.append((map_tensors(lambda t, p=part, d=device: t[p].to(d, non_blocking=True), batch),))  # type: ignore[misc]
            start += size
        return sent, [kwargs or {}] * len(sent)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        """Each GPU computes in a thread. A new thread's autocast would be fp16, and GPUs with one seed would draw the
        same dropout mask."""
        dtype, enabled, seed = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), torch.initial_seed()

        def computed(replica: Any, number: int, *inputs: Any, **options: Any) -> Any:
            torch.cuda.default_generators[self.device_ids[number]].manual_seed(fold_in(seed, number))
            with torch.autocast("cuda", dtype, enabled):
                return replica(*inputs, **options)

        calls: Any = [partial(computed, replica, number) for number, replica in enumerate(replicas)]
        return super().parallel_apply(calls, inputs, kwargs)


def part_sizes(samples: int, devices: int, first_share: float) -> list[int]:
    """How many samples each device gets: the first about `first_share` times as many as another, the others alike.

    The first device, which holds the weights, gets at least one.
    """
    if devices == 1:
        return [samples]
    first = min(samples, max(1, round(samples * first_share / (devices - 1 + first_share))))
    each, remainder = divmod(samples - first, devices - 1)
    return [first] + [each + (number < remainder) for number in range(devices - 1)]
