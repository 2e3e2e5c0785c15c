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
        self.model, self.average_into = model, get_ema_multi_avg_fn(decay)
        named: dict[str, Tensor] = dict(model.named_parameters())
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in saved and name.rpartition(".")[2] in RUNNING_STATISTICS:
                named[name] = buffer
        self.weights = {name: w.detach() for name, w in named.items() if w.is_floating_point() or w.is_complex()}
        self.averages: dict[str, Tensor] = {}  # empty before the first update
        self.groups: list[tuple[list[Tensor], list[Tensor]]] = []  # torch cannot mix types, or DTensors with others

    @torch.no_grad()
    def update(self) -> None:
        """After each step."""
        if not self.averages:
            self._keep({name: weight.to(_average_type(weight), copy=True) for name, weight in self.weights.items()})
            return
        for averages, weights in self.groups:
            narrow = averages[0].dtype != weights[0].dtype
            self.average_into(averages, [w.to(averages[0].dtype) for w in weights] if narrow else weights, None)

    def _keep(self, averages: dict[str, Tensor]) -> None:
        self.averages = averages
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, average in averages.items():
            kind = type(average), getattr(average, "device_mesh", None), self.weights[name].dtype
            ours, theirs = groups.setdefault(kind, ([], []))
            ours.append(average)
            theirs.append(self.weights[name])
        self.groups = [*groups.values()]

    def check(self) -> None:
        """Raise ConfigError if the model has other tensors now than those that are averaged."""
        now = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        others = [name for name, weight in self.weights.items() if _place(now.get(name)) != _place(weight)]
        if others:
            what = f"{others[0]} is another tensor now than when trainer.ema began to average it"
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

    def state_dict(self) -> dict[str, Tensor]:
        """{name: average} of this rank's part, under all names that a tensor has."""
        names = all_names(self.model)
        return {name: average for first, average in self.averages.items() for name in names[first]}

    def load_state_dict(self, averages: Mapping[str, Tensor]) -> None:
        known = {name: weight for name, weight in self.weights.items() if name in averages}
        self._keep({name: averages[name].to(_average_type(weight)) for name, weight in known.items()})


def _average_type(weight: Tensor) -> torch.dtype:
    """bfloat16 would round small changes away."""
    return torch.float32 if weight.dtype.itemsize < 4 else weight.dtype


def _place(tensor: Any) -> Any:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return None if local is None else local.data_ptr()
