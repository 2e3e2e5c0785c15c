"""The asynchronous parameter server: rank 0 holds the weights, workers train on the weights they last received.

A worker computes the gradient of a whole global batch, sends it and receives the newest weights. The server takes an
optimizer step for each gradient when it arrives, and no worker waits for another (Dean et al. 2012, Downpour SGD).
Other workers' gradients may have changed the weights in the meantime: a gradient is stale by that many steps. Batches,
steps and learning rates are those of any other run; with one worker the numbers are, too.

Rank 0 does not train: a training thread in the same process would delay every answer.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.schema import Count
from lockstep.data.loader import BatchLoader
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.failures import reporter
from lockstep.strategies.base import JobSpec, Strategy
from lockstep.strategies.tensor_bytes import from_bytes, to_bytes
from lockstep.training.loop import StepLoss, batches, begin_epoch, draws_of, end_steps, update
from lockstep.training.setup import autocast
from lockstep.training.state import TrainState
from lockstep.training.timing import StepTimer
from lockstep.training.watchers import Watcher


class AsyncParameterServer(Strategy):
    """Ranks hold different weights between two synchronisations: every `sync_every` steps, and at an epoch's end.

    sync_every: optimizer steps after which all ranks synchronise.
    """

    ranks_agree = False
    communicates_in_forward = True
    supports_sync_bn = False  # workers compute different batches at the same time

    def __init__(self, sync_every: Count) -> None:
        self.sync_every = sync_every
        self.staleness: list[int] = []  # of each gradient that this epoch applied

    def validate(self, job: JobSpec) -> None:
        name = "strategy=async_parameter_server"
        if job.world_size < 2:
            raise ConfigError(f"{name} has no worker in a world of 1; type launch=spawn launch.nproc_per_node=3")
        if job.sync_bn == "on":
            raise ConfigError(f"{name} computes different batches at the same time; type sync_bn=off")
        if job.deterministic:
            raise ConfigError(f"{name} applies gradients in the order they arrive; type trainer.deterministic=false")
        if job.precision == "fp16":
            raise ConfigError(f"{name} would scale each worker's fp16 loss differently; type trainer.precision=bf16")
        if job.profile:
            raise ConfigError(f"{name} has no common step to measure; type profiler.enabled=false")
        if job.save_unit == "step":
            raise ConfigError(
                f"{name} saves only when its ranks synchronise; type snapshot.every=1epochs or snapshot.every=10min"
            )

    def data_parallel_size(self, world_size: int) -> int:
        return 1  # a worker computes whole batches

    def data_parallel_rank(self, world: World) -> int:
        return 0

    def evaluation_share(self, world: World) -> tuple[int, int]:
        return world.rank, world.size

    def own_epoch(self) -> Callable[..., int]:
        return self.train_epoch

    def train_epoch(
        self, state: TrainState, loader: BatchLoader, timer: StepTimer, watchers: Sequence[Watcher] = ()
    ) -> int:
        """The rest of one epoch. Watchers are called when the ranks have synchronised.

        Only then all ranks hold the same weights, progress and counts.
        """
        self.staleness = []
        start, batch_size = state.progress.samples, state.settings.batch_size
        begin_epoch(state, watchers)
        while steps := min(self.sync_every, state.steps_left):
            if self.world.is_rank_zero:
                self._serve(state, steps)
            else:
                self._work(state, loader, steps)
            self._broadcast_weights(state)
            end_steps(state, min(steps * batch_size, len(loader) - state.progress.samples), steps, timer, watchers)
        samples = state.progress.samples - start
        state.end_epoch()
        return samples

    def _serve(self, state: TrainState, steps: int) -> None:
        """Rank 0: apply `steps` gradients as they arrive, and answer each with the new weights.

        A gradient's staleness is the number of steps taken since its worker received the weights.
        """
        parameters = list(self.model.parameters())
        has_gradient = torch.empty(len(parameters), dtype=torch.bool, device=self.world.device)
        message = to_bytes([*model_tensors(self.model), has_gradient]).cpu()
        last_sent = [0] * self.world.size
        for step in range(steps):
            # gloo, on the CPU: NCCL cannot receive from any rank.
            worker: int = dist.recv(message, group=self.world.control)
            gradients = [torch.empty_like(parameter) for parameter in parameters]
            from_bytes(message, [*gradients, *self.model.buffers(), has_gradient])
            for parameter, gradient, has in zip(parameters, gradients, has_gradient.tolist(), strict=True):
                parameter.grad = gradient if has else None
            update(state, state.progress.step + step + 1)
            self.staleness.append(step - last_sent[worker])
            last_sent[worker] = step + 1
            dist.send(to_bytes(model_tensors(self.model)).cpu(), worker, group=self.world.control)

    def _work(self, state: TrainState, loader: BatchLoader, steps: int) -> None:
        """A worker: the gradients of its turns among the next `steps` global batches.

        Running statistics travel with the gradients; the server keeps those that arrived last.
        """
        turns = slice(self.world.rank - 1, steps, self.world.size - 1)
        precision = autocast(self.world.device, state.settings.precision)
        for ahead, batch in zip(range(steps)[turns], batches(state, loader, turns), strict=True):
            step = state.progress.step + ahead + 1
            reporter.current_batch(batch)
            state.nan.begin(step, state.progress.epoch, batch)
            loss = StepLoss(state, batch, step)
            for number, part in enumerate(batch.parts, start=1):
                state.early_steps.check_inputs(part.inputs)
                with draws_of(state, loader.seed, step, batch, part):
                    self.forward_backward(part.inputs, part.targets, loss, precision, number == len(batch.parts))
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
            has_gradient = torch.tensor([p.grad is not None for p in self.model.parameters()])
            message = to_bytes([*gradients, *self.model.buffers(), has_gradient.to(self.world.device)]).cpu()
            self.model.zero_grad(set_to_none=True)
            dist.send(message, 0, group=self.world.control)
            weights = message[: -len(has_gradient)]  # the answer is as long, without the flags
            dist.recv(weights, 0, group=self.world.control)
            from_bytes(weights, model_tensors(self.model))

    def _broadcast_weights(self, state: TrainState) -> None:
        """Copy the server's weights, buffers and moving average to every rank."""
        tensors = model_tensors(self.model)
        if state.ema is not None:
            if not state.ema.averages:  # on a worker, whose own average is overwritten
                state.ema.update()
            tensors += state.ema.averages.values()
        message = to_bytes(tensors).cpu()
        dist.broadcast(message, 0, group=self.world.control)
        from_bytes(message, tensors)

    def epoch_metrics(self) -> dict[str, float]:
        if not self.staleness:
            return {}
        mean = math.fsum(self.staleness) / len(self.staleness)
        return {"async/staleness_mean": mean, "async/staleness_max": max(self.staleness)}


def model_tensors(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    return [*model.parameters(), *model.buffers()]
