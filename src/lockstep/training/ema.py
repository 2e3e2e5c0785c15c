"""An exponential moving average of the weights, stored as this rank stores the weights: whole or in parts."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lockstep.config.schema import Fraction
from lockstep.errors import ConfigError
from lockstep.models.base import all_names

RUNNING_STATISTICS = ("running_mean", "running_var")  # what torch's norms call them


class WeightAverage:
    """The contract: what is evaluated, exported and sampled in the place of the trained weights."""

    def update(self) -> None:
        """After each step."""

    def applied(self) -> AbstractContextManager[None]:
        """Inside the block the weights are the average. Begin it in training mode: some modules keep other weights in
        evaluations."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ConfigError if the model has other tensors now than those that are averaged."""

    def state_dict(self) -> dict[str, Tensor]:
        """{name: average} of this rank's part, under all names that a tensor has; empty before the first update."""
        raise NotImplementedError

    def load_state_dict(self, averages: Mapping[str, Tensor]) -> None:
        """The reverse. Empty: from the next update on."""
        raise NotImplementedError


class Average(WeightAverage):
    """The average of a model's weights over the steps of a run (Polyak and Juditsky 1992), from the first update on.

    Of its floating-point and complex parameters, and of the buffers that are called running_mean or running_var and
    saved with them. Averaged weights give other activations than the latest ones, so a norm needs the average of its
    statistics, too. All other buffers keep their latest values: the mean of two unit vectors, counters or codes is
    none. The average of a type of fewer than 32 bits is kept in float32.

    decay: such as 0.999: of the last 1000 steps or so.
    """

    def __init__(self, model: nn.Module, decay: Fraction) -> None:
        self.model, self.average_into = model, get_ema_multi_avg_fn(decay)
        saved = model.state_dict().keys()
        named: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()
        }
        for name, buffer in model.named_buffers():
            is_statistic = name.rpartition(".")[2] in RUNNING_STATISTICS and buffer.is_floating_point()
            named |= {name: buffer} if is_statistic and name in saved else {}
        self.weights: dict[str, Tensor] = {name: tensor.detach() for name, tensor in named.items()}
        self.averages: dict[str, Tensor] = {}
        self.groups: list[tuple[list[Tensor], list[Tensor]]] = []  # torch cannot mix types, or DTensors with others

    @torch.no_grad()
    def update(self) -> None:
        if not self.averages:
            self._keep({name: weight.to(_average_type(weight), copy=True) for name, weight in self.weights.items()})
            return
        for averages, weights in self.groups:
            narrow = averages[0].dtype != weights[0].dtype
            self.average_into(averages, [w.to(averages[0].dtype) for w in weights] if narrow else weights, None)

    def _keep(self, averages: dict[str, Tensor]) -> None:
        self.averages = averages
        kinds = {
            name: (type(average), getattr(average, "device_mesh", None), self.weights[name].dtype)
            for name, average in averages.items()
        }
        groups = [[name for name in kinds if kinds[name] == kind] for kind in dict.fromkeys(kinds.values())]
        self.groups = [([averages[n] for n in names], [self.weights[n] for n in names]) for names in groups]

    def check(self) -> None:
        now = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        others = [name for name, weight in self.weights.items() if _place(now.get(name)) != _place(weight)]
        if others:
            what = f"{others[0]} is another tensor now than when trainer.ema began to average it"
            raise ConfigError(f"{what}; change it in place, or type trainer.ema=null")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """They are copied, since a strategy may hold views of them."""
        with torch.no_grad():
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

    def state_dict(self) -> dict[str, Tensor]:
        names = all_names(self.model)
        return {name: average for first, average in self.averages.items() for name in names[first]}

    def load_state_dict(self, averages: Mapping[str, Tensor]) -> None:
        known = {name: weight for name, weight in self.weights.items() if name in averages}
        self._keep({name: averages[name].to(_average_type(weight)) for name, weight in known.items()})


class OptimizersAverage(WeightAverage):
    """The average that an optimizer keeps itself, as those without a schedule do (Defazio et al. 2024).

    Its method `eval` puts the average into the model, and `train` the weights that are trained. A snapshot has both.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.optimizer.train()
        self.loaded: dict[str, Tensor] = {}  # of a snapshot until the next step: an evaluation restores no optimizer

    def update(self) -> None:
        self.loaded = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        weights = dict(self.model.named_parameters())
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        if self.loaded:
            self._copy(weights, self.loaded)
        else:
            self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            self._copy(weights, before)  # the way back is rounded

    @torch.no_grad()
    def _copy(self, weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name in weights.keys() & values.keys():
            weights[name].copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        with self.applied():
            return {
                name: weight.detach().clone() for name, weight in self.model.named_parameters(remove_duplicate=False)
            }

    def load_state_dict(self, averages: Mapping[str, Tensor]) -> None:
        self.loaded = dict(averages)


def own_average(model: nn.Module, optimizer: Optimizer, has_other: bool) -> OptimizersAverage | None:
    """What an optimizer averages itself; None if it does not. has_other: whether trainer.ema asks for an average."""
    if not all(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        return None
    if has_other:
        raise ConfigError(f"{type(optimizer).__name__} averages the weights itself; type trainer.ema=null")
    return OptimizersAverage(model, optimizer)


def _average_type(weight: Tensor) -> torch.dtype:
    """bfloat16 would round small changes away."""
    return torch.float32 if weight.dtype.itemsize < 4 else weight.dtype


def _place(tensor: Any) -> Any:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return None if local is None else local.data_ptr()
