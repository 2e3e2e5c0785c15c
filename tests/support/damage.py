"""Parts of a training that go wrong on one rank or at one step, for tests of what `watch` finds."""

import math
import os

import torch

from lockstep.data import Tensors
from lockstep.models.tutorial import mlp
from lockstep.strategies.base import local_part
from lockstep.training.callbacks import Callback
from support.digits import digits


class DamagedSGD(torch.optim.SGD):
    """SGD that damages the first value of one parameter on one rank, right after a step.

    at_step: counted from 1. parameter: its number. change: added to the value; "bit": its lowest bit is flipped.
    """

    def __init__(self, params, rank, at_step, parameter, change, **options):
        super().__init__(params, **options)
        self.rank, self.steps_left, self.parameter, self.change = rank, at_step, parameter, change

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        self.steps_left -= 1
        if self.steps_left == 0 and os.environ["RANK"] == str(self.rank):
            damage(local_part(self.param_groups[0]["params"][self.parameter]), self.change)
        return result


class Replaces(Callback):
    """Gives a weight another tensor, in the place of other values."""

    def on_step_end(self, run):
        weight = next(run.model.parameters())
        weight.data = weight.data.clone()


def damage(parameter, change):
    """Change the first value of a contiguous float32 parameter."""
    first = parameter.detach().view(-1)[:1]
    if change == "bit":
        first.view(torch.int32).bitwise_xor_(1)
    else:
        first += float(change)


def digits_of_rank(train, half, fault):
    """The digits, with a fault in one half ("train" or "test") on rank 1: "short", one sample less, or "other"."""
    data = digits(train)
    if os.environ["RANK"] != "1" or train != (half == "train"):
        return data
    if fault == "short":
        return Tensors(data.inputs[:-1], data.targets[:-1])
    return Tensors(data.inputs.flip(0), data.targets.flip(0))


class FloatDigits(torch.utils.data.Dataset):
    """The digits as floating-point images. All pixels of those numbered `broken` have this value."""

    def __init__(self, train, broken, value=math.nan):
        data = digits(train)
        self.images, self.targets = data.inputs.float() / 255, data.targets
        self.images[broken] = value

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], int(self.targets[index])


class BrokenGradient(torch.autograd.Function):
    """A gradient that is NaN for marked samples, behind a loss that is finite."""

    @staticmethod
    def forward(ctx, outputs, marked):
        ctx.save_for_backward(marked)
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        (marked,) = ctx.saved_tensors
        return torch.where(marked[:, None], torch.full_like(gradient, float("nan")), gradient), None


class MarkedMLP(torch.nn.Module):
    """An mlp with a gradient that is NaN for samples whose first pixel is negative."""

    def __init__(self, shape, classes):
        super().__init__()
        self.net = mlp(shape, classes, width=128, depth=2, dropout=0.0)

    def forward(self, inputs):
        return BrokenGradient.apply(self.net(inputs), inputs.flatten(1)[:, 0] < 0)
