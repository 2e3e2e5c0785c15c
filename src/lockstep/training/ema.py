"""An exponential moving average of the weights, stored as this rank stores the weights: whole or sharded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lockstep.errors import ConfigError
from lockstep.models.base import all_names
from lockstep.strategies.base import Strategy

RUNNING_STATISTICS = ("running_mean", "running_var")  # what torch's norms call them


class ExponentialMovingAverage:
    """The average of `model`'s weights over the steps of a run (Polyak and Juditsky 1992), from the first update on.

    averages: {name: tensor} of the floating-point and complex parameters, and of the buffers that are called
    running_mean or running_var and saved with them. Averaged weights give other activations than the latest ones, so a
    norm needs the average of its statistics, too. All other buffers keep their latest values: the mean of two unit
    vectors, counters or codes is none. The average of a type of fewer than 32 bits is kept in float32.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.average_into = get_ema_multi_avg_fn(decay)
        self.averages: dict[str, Tensor] = {}
        saved = model.state_dict().keys()
        self.statistics = [
            name
            for name, buffer in model.named_buffers()
            if name in saved and name.rpartition(".")[2] in RUNNING_STATISTICS and buffer.is_floating_point()
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights as they are now."""
        weights = self._weights()
        if not self.averages:
            self.averages = {name: weight.to(average_type(weight), copy=True) for name, weight in weights.items()}
            return
        kinds = {name: (type(average), average.dtype) for name, average in self.averages.items()}
        for kind in dict.fromkeys(kinds.values()):  # torch cannot mix DTensors or types with others
            names = [name for name in kinds if kinds[name] == kind]
            self.average_into([self.averages[n] for n in names], [weights[n].to(kind[1]) for n in names], None)

    def state(self) -> dict[str, Tensor]:
        """The averages under all names that a tensor has."""
        names = all_names(self.model)
        return {name: average for first, average in self.averages.items() for name in names[first]}

    @torch.no_grad()
    def restore(self, averages: dict[str, Tensor]) -> None:
        """Go on from the averages of a snapshot, which are laid out as the weights are. Empty: from the next update."""
        weights = self._weights()
        self.averages = {
            name: averages[name].to(average_type(weight)) for name, weight in weights.items() if name in averages
        }

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
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        weights = {name: p for name, p in parameters.items() if p.is_floating_point() or p.is_complex()}
        buffers = dict(self.model.named_buffers()) if self.statistics else {}
        return weights | {name: buffers[name] for name in self.statistics}

    def _copy_into_model(self, values: dict[str, Tensor]) -> None:
        weights = self._weights()
        for name, value in values.items():
            weights[name].copy_(value)


class OptimizersAverage(ExponentialMovingAverage):
    """The average that an optimizer keeps itself, as those without a schedule do (Defazio et al. 2024).

    Its method `eval` puts the average into the model, and `train` the weights that are trained.

    averages: those of a snapshot until the next step, since an evaluation alone restores no optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, 1.0)
        self.optimizer = optimizer
        self.optimizer.train()

    def update(self) -> None:
        self.averages = {}

    def state(self) -> dict[str, Tensor]:
        with self.applied():
            self.averages = {name: weight.clone() for name, weight in self._weights().items()}
        return super().state()

    @contextmanager
    def applied(self) -> Iterator[None]:
        if self.averages:
            with super().applied():
                yield
            return
        before = {name: weight.clone() for name, weight in self._weights().items()}
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            with torch.no_grad():
                self._copy_into_model(before)  # the way back is rounded


def average_of(strategy: Strategy, optimizer: Optimizer, decay: float | None) -> ExponentialMovingAverage | None:
    """What is evaluated and exported in the place of the trained weights; None: nothing is.

    Raises ConfigError for an average of weights that an optimizer averages itself, and where one rank alone does.
    """
    model, name = strategy.model, type(optimizer).__name__
    has_own = all(callable(getattr(optimizer, method, None)) for method in ("train", "eval"))
    if has_own and decay is not None:
        raise ConfigError(f"{name} averages the weights itself; type trainer.ema=null")
    if has_own and strategy.own_epoch() is not None:
        raise ConfigError(f"{name} averages the weights on rank 0 alone, and all ranks evaluate; type strategy=ddp")
    if has_own:
        return OptimizersAverage(model, optimizer)
    return None if decay is None else ExponentialMovingAverage(model, decay)


def average_type(weight: Tensor) -> torch.dtype:
    """The type in which `weight` is averaged: bfloat16 would round small changes away."""
    return torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
