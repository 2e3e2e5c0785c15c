"""An exponential moving average of the weights, stored as this rank stores the weights: whole or in parts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lockstep.config.schema import Fraction
from lockstep.errors import ConfigError
from lockstep.models.base import all_names
from lockstep.strategies.base import local_part

RUNNING_STATISTICS = ("running_mean", "running_var")  # what torch's norms call them


class Average:
    """The average of a model's weights over the steps of a run (Polyak and Juditsky 1992), from the first update on. It
    is evaluated, exported and sampled in their place.

    Of its floating-point and complex parameters, and of the buffers that are called running_mean or running_var and
    saved with them: averaged weights give other activations than the latest ones. All other buffers keep their latest
    values: the mean of two unit vectors, counters or codes is none. The average of a type of fewer than 32 bits is kept
    in float32.

    decay: such as 0.999: of the last 1000 steps or so.
    """

    def __init__(self, model: nn.Module, decay: Fraction) -> None:
        self.model, self.average_into, saved = model, get_ema_multi_avg_fn(decay), model.state_dict().keys()
        named: dict[str, Tensor] = dict(model.named_parameters())
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
        named |= {name: buffer for name, buffer in buffers if name.rpartition(".")[2] in RUNNING_STATISTICS}
        self.weights = {name: w.detach() for name, w in named.items() if w.is_floating_point() or w.is_complex()}
        self.averages: dict[str, Tensor] = {}  # empty before the first update
        self.groups: list[tuple[list[Tensor], list[Tensor]]] = []  # torch cannot mix types, or DTensors with others

    @torch.no_grad()
    def update(self) -> None:
        """After each step."""
        if not self.averages:
            self.load_state_dict(self.weights)
            return
        for averages, weights in self.groups:
            dtype = averages[0].dtype
            same = weights if dtype == weights[0].dtype else [weight.to(dtype) for weight in weights]
            self.average_into(averages, same, None)

    def state_dict(self) -> dict[str, Tensor]:
        """{name: average} of this rank's part, under all names that a tensor has."""
        names = all_names(self.model)
        return {name: average for first, average in self.averages.items() for name in names[first]}

    def load_state_dict(self, averages: Mapping[str, Tensor]) -> None:
        """The average is what `averages` has of the names. bfloat16 would round small changes away."""
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in self.weights.items():
            if name in averages:
                dtype = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
                average = self.averages[name] = averages[name].to(dtype, copy=True)
                kind = type(average), getattr(average, "device_mesh", None), weight.dtype
                ours, theirs = groups.setdefault(kind, ([], []))
                ours.append(average)
                theirs.append(weight)
        self.groups = [*groups.values()]

    def check(self) -> None:
        """Raise ConfigError if the model has other tensors now than those that are averaged."""
        now = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, weight in self.weights.items():
            if name not in now or local_part(now[name]).data_ptr() != local_part(weight).data_ptr():
                what = f"{name} is another tensor now than when trainer.ema began to average it"
                raise ConfigError(f"{what}; change it in place, or type trainer.ema=null")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the weights are the average: copies, since a strategy may hold views of them. Begin it in
        training mode: some modules keep other weights in evaluations."""
        before = {name: weight.clone() for name, weight in self.weights.items()}
        self._copy(self.averages)
        try:
            yield
        finally:
            self.model.train()
            self._copy(before)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.weights[name].copy_(value)
