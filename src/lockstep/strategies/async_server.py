"""The asynchronous parameter server: rank 0 holds the weights, workers train on the weights they last received.

A worker computes the gradient of a whole global batch, sends it and receives the newest weights. The server takes an
optimizer step for each gradient when it arrives, and no worker waits for another (Dean et al. 2012, Downpour SGD).
Other workers' gradients may have changed the weights in the meantime. Batches, steps and learning rates are those of
any other run; with one worker the numbers are, too. Rank 0 does not train, which would delay every answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.schema import Count
from lockstep.data import partition
from lockstep.data.loader import Batch
from lockstep.data.partition import Part
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy, from_bytes, to_bytes
from lockstep.training.step import Step


@dataclass
class AsyncParameterServer(Strategy):
    """Ranks hold different weights between two synchronisations: every `sync_every` steps, and at an epoch's end."""

    sync_every: Count
    name = "async_parameter_server"
    # Workers compute different batches at the same time, and no rank knows all gradients.
    refused = (*Strategy.refused, "one rank", "snapshot.every=<n>steps", "sync_bn=on", "trainer.deterministic=true")
    refused += ("trainer.precision=fp16", "watch.nan=skip")
    replicas_equal = False

    def data_share_of(self, world_size: int) -> int:
        return 1  # a worker computes whole batches

    def data_share(self, world: World) -> tuple[int, int]:
        return world.rank, world.size  # of an evaluation

    def parts(self, number: int, count: int, micro_batches: int) -> Sequence[Part]:
        """Workers take turns. The server has no work."""
        turn = number % (self.world.size - 1) + 1
        return partition.parts(count, micro_batches, 0, 1) if turn == self.world.rank else []

    def sum_counts(self, counts: Tensor) -> tuple[Any, Tensor]:
        return (lambda: None), counts.sum().double()  # this rank has the whole batch


class ServedStep(Step):
    """A step of the server, which takes the next gradient, or of a worker, whose turn it may be. Running statistics
    travel with the gradients; the server keeps those that arrived last."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        if not isinstance(self.strategy, AsyncParameterServer):
            raise ConfigError("this step needs its server; type strategy=async_parameter_server, or step=default")
        self.world, self.unit = self.strategy.world, self.strategy.sync_every
        self.model, self.trained = self.strategy.model, list(self.strategy.model.parameters())

    def __call__(self, batch: Batch) -> None:
        if self.world.is_rank_zero:
            self._serve()
        elif batch.parts:
            self.optimizer.zero_grad()
            self.forward_backward(batch)
            self._ask()
        if (self.progress.step + 1) % self.unit == 0:
            self._bring_weights(self.progress.step + 1)

    # Messages go over gloo, on the CPU: NCCL cannot receive from any rank.

    def _serve(self) -> None:
        gradients = [torch.empty_like(parameter) for parameter in self.trained]
        has = torch.empty(len(gradients), dtype=torch.bool, device=self.world.device)
        message = to_bytes([*gradients, *self.model.buffers(), has]).cpu()
        worker: int = dist.recv(message, group=self.world.control)
        from_bytes(message, [*gradients, *self.model.buffers(), has])
        for parameter, gradient, sent in zip(self.trained, gradients, has.tolist(), strict=True):
            parameter.grad = gradient if sent else None
        self.update()
        dist.send(to_bytes([*self.trained, *self.model.buffers()]).cpu(), worker, group=self.world.control)

    def _ask(self) -> None:
        has = torch.tensor([p.grad is not None for p in self.trained], device=self.world.device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
        message = to_bytes([*gradients, *self.model.buffers(), has]).cpu()
        dist.send(message, 0, group=self.world.control)
        weights = message[: -len(has)]  # the answer is as long, without the flags
        dist.recv(weights, 0, group=self.world.control)
        from_bytes(weights, [*self.trained, *self.model.buffers()])

    def synchronise(self) -> None:
        self._bring_weights(self.progress.step)

    def _bring_weights(self, step: int) -> None:
        """Copy the server's weights, buffers and average, after `step` steps, to every rank. A collective."""
        tensors = [*self.trained, *self.model.buffers()]
        if self.average is not None:
            if not self.average.averages:  # of a worker, whose own average is overwritten
                self.average.update()
            tensors += self.average.averages.values()
        message = to_bytes(tensors).cpu()
        dist.broadcast(message, 0, group=self.world.control)
        from_bytes(message, tensors)
        self.schedule(step + self.progress.ahead)
