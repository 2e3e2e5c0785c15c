"""Training written out in plain torch, in one process. Lockstep's runs are compared with it."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.data.partition import generator


@dataclass
class Reference:
    """What a training left: the model, and of each step its loss, its gradient's norm and the weights after it."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # before clipping
    trajectory: list[Tensor] = field(default_factory=list)  # all parameters in one vector

    @property
    def weights(self):
        return self.trajectory[-1]


def train_reference(
    model,
    data,
    loss_function,
    make_optimizer,
    *,
    epochs,
    batch_size,
    seed=0,
    max_steps=math.inf,
    max_grad_norm=math.inf,
    lr_factor=lambda step: 1.0,
):
    """Train `model` on `data`. loss_function: a mean over samples. lr_factor: of each step, numbered from 0."""
    samples, targets = data
    result, optimizer = Reference(model), make_optimizer(model.parameters())
    peak = optimizer.param_groups[0]["lr"]
    for epoch in range(epochs):
        for batch in torch.randperm(len(samples), generator=generator(seed, epoch)).split(batch_size):
            if len(result.losses) >= max_steps:
                return result
            optimizer.param_groups[0]["lr"] = peak * lr_factor(len(result.losses))
            loss = loss_function(model(samples[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)))
            optimizer.step()
            result.losses.append(loss.item())
            result.trajectory.append(parameter_vector(model))
    return result


def parameter_vector(model):
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def saved_parameters(folder, model):
    """The parameters of a run's model.pt in one vector, in the order of `model`'s."""
    saved = torch.load(folder / "model.pt", weights_only=True)
    return torch.cat([saved[name].flatten() for name, _ in model.named_parameters()])
