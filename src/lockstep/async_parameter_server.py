"""The asynchronous parameter server: rank 0 keeps the weights, the other ranks train on what they last saw of them.

A worker computes the gradient of a whole global batch, sends it and gets the newest weights back; the server takes an
optimizer step for each gradient the moment it comes, and nobody waits for anybody (Dean et al. 2012, Downpour SGD). By
then other workers' gradients may have moved the weights: this one is stale by so many steps, and that is what the speed
costs. Batches, steps and learning rates are those of any other run; with one worker so is every number.

Rank 0 serves and does not train: beside a training thread in the same interpreter, every answer would wait for it.
"""

import dataclasses
import math

import torch
import torch.distributed as dist

from lockstep import loop
from lockstep.refusal import Refusal
from lockstep.strategy import bare


def async_parameter_server(module, world):
    """`module` as it is, on the server and on each worker. Raises Refusal for a world without a worker."""
    if world.size < 2:
        raise Refusal("strategy=async_parameter_server needs rank 0 to serve and at least one worker; start 2 ranks or more")
    return module


def train(run, loader, after_step, meet_every):
    """The rest of one epoch, as `loop.train` does it, but for when its ranks meet: every `meet_every` optimizer steps.

    Only there are weights, progress and counts the same on all ranks, and only there is each of `after_step` called,
    with the global count of samples since the last time. Returns the staleness of the gradients that rank 0 applied.
    """
    recipe, progress, world = run.recipe, run.progress, loader.world
    run.model.train()
    if progress.samples == 0:
        run.meter.clear()
    staleness = []
    while progress.samples < len(loader) and progress.step != recipe.max_steps:
        left = math.ceil((len(loader) - progress.samples) / recipe.batch_size)
        steps = min(left, meet_every, left if recipe.max_steps is None else recipe.max_steps - progress.step)
        staleness += serve(run, world, steps) if world.leads else work(run, loader, steps)
        share(run, world)
        samples = min(steps * recipe.batch_size, len(loader) - progress.samples)
        progress.samples, progress.step = progress.samples + samples, progress.step + steps
        for call in after_step:
            call(samples)
    if progress.samples >= len(loader):
        progress.epoch, progress.samples = progress.epoch + 1, 0
    return {"async/staleness_mean": sum(staleness) / len(staleness), "async/staleness_max": max(staleness)} if staleness else {}


def serve(run, world, steps):
    """Rank 0: take `steps` gradients from whoever comes, and answer each with the weights it has led to.

    Returns each gradient's staleness: how many steps others' gradients made after its worker last saw the weights.
    """
    net = bare(run.model)
    message, seen, staleness = flat(state(net)), [0] * world.size, []
    for step in range(steps):
        worker = dist.recv(message, group=world.control)  # gloo's, on the CPU: NCCL cannot receive from whoever comes
        for parameter in net.parameters():
            parameter.grad = torch.empty_like(parameter)
        pour(message, [*(parameter.grad for parameter in net.parameters()), *net.buffers()])
        loop.update(run)
        staleness.append(step - seen[worker])
        seen[worker] = step + 1
        dist.send(flat(state(net)), worker, group=world.control)
    return staleness


def work(run, loader, steps):
    """A worker: the gradients of its turns among the next `steps` global batches. It has no staleness to tell.

    Running statistics travel with the gradients, and the last ones to come are the server's.
    """
    net, progress, world = bare(run.model), run.progress, loader.world
    turns, alone = slice(world.rank - 1, steps, world.size - 1), dataclasses.replace(world, rank=0, size=1)
    batches = loader.epoch(progress.epoch, run.recipe.batch_size, lambda batch, _: run.recipe.cut(batch, alone), progress.samples, turns)
    for step, batch in zip(range(steps)[turns], batches, strict=True):
        loop.backward(run, loader, batch, progress.step + step)
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in net.parameters()]
        message = flat([*gradients, *net.buffers()])
        net.zero_grad(set_to_none=True)
        dist.send(message, 0, group=world.control)
        dist.recv(message, 0, group=world.control)
        pour(message, state(net))
    return []


def share(run, world):
    """The server's net, and its average where there is one, on every rank."""
    tensors = state(bare(run.model))
    if run.average is not None:
        if not run.average.values:
            run.average.update()  # a worker's first: room for the server's
        tensors += run.average.values.values()
    message = flat(tensors)
    dist.broadcast(message, 0, group=world.control)
    pour(message, tensors)


def state(net):
    return [*net.parameters(), *net.buffers()]


def flat(tensors):
    """All their values in one vector on the CPU."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()


@torch.no_grad()
def pour(vector, tensors):
    """The reverse of `flat`: into `tensors`, in place."""
    for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
