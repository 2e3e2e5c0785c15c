"""A loss and metrics of the user's own, in place of a task's loss and beside its metrics."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.errors import ConfigError

Function = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a value for each sample (N,), or several (N, ...), whose mean counts."""


class OwnParts:
    """loss: None for the task's own. measures: {metric: function}.

    A class or function of torch that has `reduction` gets reduction="none": the ranks add up samples, and a mean over a
    rank's samples could not be added.
    """

    def __init__(self, loss: Function | None, measures: Mapping[str, Function]) -> None:
        self.loss = None if loss is None else _unreduced(loss)
        self.measures = {name: _unreduced(function) for name, function in measures.items()}

    def replace(
        self, outputs: Tensor, targets: Tensor, loss: Tensor, sums: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What a task returns, with the user's parts. loss, sums: the task's own."""
        if self.loss is not None:
            loss = _sum("task.loss", self.loss(outputs, targets), len(outputs))
        measured = {
            name: _sum(f"task.measures.{name}", function(outputs, targets), len(outputs))
            for name, function in self.measures.items()
        }
        return loss, sums | {"loss": loss} | measured


def _unreduced(function: Function) -> Function:
    if hasattr(function, "reduction"):
        function.reduction = "none"
        return function
    try:
        has_reduction = "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return function
    return partial(function, reduction="none") if has_reduction else function  # type: ignore[call-arg]


def _sum(key: str, values: Any, count: int) -> Tensor:
    if not isinstance(values, Tensor):
        raise ConfigError(
            f"{key} gives a {type(values).__name__}, and a tensor with a value for each sample is wanted; "
            f"return the shape {[count]} there"
        )
    if not values.is_floating_point():
        values = values.double()
    if values.dim() == 0 or len(values) != count:
        raise ConfigError(
            f"{key} gives the shape {list(values.shape)} for {count} samples, and a value for each sample is wanted, "
            f"since the ranks add them up; return {[count]}, or type +{key}.reduction=none"
        )
    summed: Tensor = values.flatten(1).mean(1).sum() if values.dim() > 1 else values.sum()
    return summed
