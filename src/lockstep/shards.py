"""The bitwise mode: the same weights to the last bit at every world size that divides the number of shards.

DDP agrees with one process to rounding, because a sum's order changes with the number of ranks. Here a global batch is
always cut into the same `shards` parts, virtual ranks; each is computed on its own, with its own randomness and batch
statistics, on one thread; and what they leave is added up in one tree, whoever computed which part.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lockstep.refusal import Refusal
from lockstep.strategy import bare, part


def shards(module, world, shards):
    """Train `module` as `shards` virtual ranks, a multiple of the world size. Raises Refusal where it is none."""
    return Shards(module, world, per_rank(shards, world.size))


def per_rank(shards, world_size):
    """How many virtual ranks a rank computes, one after the other."""
    if shards is None or shards % world_size:
        fitting = world_size * -(-(shards or 4) // world_size)
        raise Refusal(f"trainer.shards={shards} cannot be shared by {world_size} ranks; try trainer.shards={fitting}")
    return shards // world_size


class Shards(nn.Module):
    """A net whose gradients and buffers are combined over virtual ranks. `shard()` surrounds each one's forward and backward."""

    def __init__(self, module, world, here):
        super().__init__()
        self.module, self.world, self.here = module, world, here
        self.left = []  # of each shard computed in this step: its gradients and, weighted by its samples, its buffers
        torch.set_num_threads(1)  # with more, a convolution's sums depend on how many there are

    def forward(self, inputs):
        self.samples = len(inputs)
        return self.module(inputs)

    def _floating_buffers(self):
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    @contextmanager
    def shard(self):
        """One virtual rank's forward and backward pass; after this rank's last one, `.grad` holds the whole batch's gradient."""
        parameters, buffers = list(self.module.parameters()), self._floating_buffers()
        before = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        yield
        with torch.no_grad():
            weight = self.samples > 0  # an empty share has no statistics, whatever the layers made of it
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            statistics = [buffer * self.samples if weight else torch.zeros_like(buffer) for buffer in buffers]
            share = torch.tensor([float(self.samples)], device=parameters[0].device, dtype=parameters[0].dtype)
            self.left.append(torch.cat([part.flatten() for part in (*gradients, *statistics, share)]))
            self.module.zero_grad(set_to_none=True)
            if len(self.left) == self.here:
                self._combine(parameters, buffers)  # counters stay as the last shard left them: one step, one count
            else:
                for buffer, value in before:
                    buffer.copy_(value)

    def _combine(self, parameters, buffers):
        mine = torch.stack(self.left)
        everyones = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(everyones, mine)
        total = tree_sum(torch.cat(everyones))
        sizes = [part.numel() for part in (*parameters, *buffers)]
        *sums, samples = total.split([*sizes, 1])
        for parameter, summed in zip(parameters, sums, strict=False):
            parameter.grad = summed.view(parameter.shape).clone(memory_format=torch.preserve_format)
        for buffer, summed in zip(buffers, sums[len(parameters) :], strict=True):
            buffer.copy_(summed.view(buffer.shape) / samples)
        self.left.clear()


@bare.register
def _(module: Shards):
    return module.module


@part.register
def _(module: Shards, last):
    return module.shard()


def tree_sum(rows):
    """The sum of `rows` (V, n) over V, always in the same order: neighbours in pairs, then pairs of pairs."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[0:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]
