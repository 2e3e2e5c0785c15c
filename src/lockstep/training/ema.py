"""An exponential moving average of the weights, stored as this rank stores the weights: whole or sharded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class ExponentialMovingAverage:
    """The average of `model`'s parameters over the steps of a run (Polyak and Juditsky 1992), from the first update on.

    averages: {parameter name: tensor}. Buffers are not averaged; the latest ones are used.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.average_into = get_ema_multi_avg_fn(decay)
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Add the parameters as they are now."""
        if self.averages:
            parameters = dict(self.model.named_parameters())
            for kind in {type(average) for average in self.averages.values()}:  # torch cannot mix DTensors with others
                names = [name for name, average in self.averages.items() if type(average) is kind]
                self.average_into([self.averages[n] for n in names], [parameters[n] for n in names], None)
        else:
            self.averages = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the parameters are the average. They are copied, since a strategy may hold views of them."""
        with torch.no_grad():
            before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
            self._copy_into_model(self.averages)
        try:
            yield
        finally:
            with torch.no_grad():
                self._copy_into_model(before)

    def _copy_into_model(self, values: dict[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in values.items():
            parameters[name].copy_(value)
