"""An exponential moving average of the weights, stored as this rank stores the weights: whole or sharded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class ExponentialMovingAverage:
    """The average of `model`'s weights over the steps of a run (Polyak and Juditsky 1992), from the first update on.

    averages: {name: tensor} of the parameters, and of the floating-point buffers that are saved with them. Averaged
    weights give other activations than the latest ones, so batch norm needs the average of its statistics, too. Buffers
    that begin with infinite values, such as an attention's mask or a running minimum, are taken as they are.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.average_into = get_ema_multi_avg_fn(decay)
        self.averages: dict[str, Tensor] = {}
        saved = model.state_dict().keys()
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point() and name in saved}
        self.buffers = set(buffers)
        self.copied = {name for name, buffer in buffers.items() if not buffer.isfinite().all()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights as they are now."""
        if self.averages:
            weights = self._weights()
            averaged = {name: average for name, average in self.averages.items() if name not in self.copied}
            for kind in {type(average) for average in averaged.values()}:  # torch cannot mix DTensors with others
                names = [name for name, average in averaged.items() if type(average) is kind]
                self.average_into([self.averages[n] for n in names], [weights[n] for n in names], None)
            for name in self.copied:  # the way from one infinity to another is no number
                self.averages[name].copy_(weights[name])
        else:
            self.averages = {name: weight.clone() for name, weight in self._weights().items()}

    def restore(self, averages: dict[str, Tensor]) -> None:
        """Go on from the averages of a snapshot, which are laid out as the weights are. Empty: from the next update."""
        self.averages = averages

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the weights are the average. They are copied, since a strategy may hold views of them."""
        with torch.no_grad():
            before = {name: weight.clone() for name, weight in self._weights().items()}
            self._copy_into_model(self.averages)
        try:
            yield
        finally:
            with torch.no_grad():
                self._copy_into_model(before)

    def _weights(self) -> dict[str, Tensor]:
        """{name: tensor} of what is averaged, as the model holds it now."""
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return weights | {name: buffer for name, buffer in self.model.named_buffers() if name in self.buffers}

    def _copy_into_model(self, values: dict[str, Tensor]) -> None:
        weights = self._weights()
        for name, value in values.items():
            weights[name].copy_(value)
