"""An exponential moving average of the weights, held as this rank holds the weights, whole or in parts."""

from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """The average of `net`'s parameters over the steps of a run (Polyak and Juditsky 1992); it begins at the first update.

    Buffers are not averaged: who uses the average uses the latest.
    """

    def __init__(self, net, decay):
        self.net, self.mix, self.values = net, get_ema_multi_avg_fn(decay), {}

    @torch.no_grad()
    def update(self):
        """Take in the parameters as they are now."""
        if self.values:
            self.mix(list(self.values.values()), list(self.net.parameters()), None)
        else:
            self.values = {name: parameter.detach().clone() for name, parameter in self.net.named_parameters()}

    @contextmanager
    @torch.no_grad()
    def in_place(self):
        """Inside the block the net's parameters are the average; they are copied, since a strategy may hold views of them."""
        before = {name: parameter.detach().clone() for name, parameter in self.net.named_parameters()} if self.values else {}
        self._set(self.values)
        try:
            yield
        finally:
            self._set(before)

    @torch.no_grad()
    def _set(self, values):
        parameters = dict(self.net.named_parameters())
        for name, value in values.items():
            parameters[name].copy_(value)
