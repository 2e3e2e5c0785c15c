"""Regression: mean squared error."""

import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.tasks.base import Function, OwnParts, Report, Share, Task, at_least_float32


class Regression(Task):
    """Squared error over outputs and targets (N, values), averaged over the values of a sample.

    Where a sample has one value, either may be (N,).

    loss: a loss of your own in place of the task's, see `OwnParts`.
    measures: metrics of your own, by name.
    """

    def __init__(
        self,
        metrics: dict[str, str],
        monitor: str,
        loss: Function | None,
        measures: dict[str, Function],
    ) -> None:
        super().__init__(metrics, monitor)
        self.own = OwnParts(loss, measures)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if _is_one_value(outputs) and _is_one_value(targets):
            outputs, targets = outputs.reshape(-1, 1), targets.reshape(-1, 1)
        if outputs.shape != targets.shape:  # torch would broadcast them, and compare each with each
            advice = "task=classification for targets that are classes"
            if targets.is_floating_point():
                advice = f"model._target_=<a net with outputs [{', '.join(map(str, ['N', *targets.shape[1:]]))}]>"
            raise ConfigError(
                f"{type(self).__name__} compares outputs and targets of one shape, and these have "
                f"{list(outputs.shape)} and {list(targets.shape)}; type {advice}"
            )
        values = at_least_float32(outputs)
        loss = F.mse_loss(values, targets.to(values.dtype), reduction="none").flatten(1).mean(1).sum()
        return self.own.replace(values, targets, loss, {"loss": loss})

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": at_least_float32(outputs)}

    def report(self, share: Share, images: int) -> Report | None:
        from lockstep.tasks.reports import ValueReport  # imports Pillow

        return ValueReport(share)


def _is_one_value(values: Tensor) -> bool:
    """Whether these are one value a sample: (N,) or (N, 1)."""
    return values.dim() in (1, 2) and values.shape[1:].numel() == 1
