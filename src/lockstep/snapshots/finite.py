"""The check before a snapshot: a loss or a weight that is not finite must not be saved."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import TrainingDiverged
from lockstep.training.state import TrainState

FindSnapshot = Callable[[], Path | None]
"""Finds the last good snapshot, for the error message."""


def require_finite_loss(state: TrainState, totals: Tensor, newest: FindSnapshot) -> None:
    """Raise TrainingDiverged, on all ranks, if the sum of losses in `totals` (see Meter.totals) is not finite."""
    loss = totals[state.meter.names.index("loss")].item()
    if not math.isfinite(loss):
        step = state.meter.first_non_finite()
        raise _diverged(f"the loss is {loss}", state.progress.step if step is None else step, newest)


def require_finite_weights(state: TrainState, newest: FindSnapshot) -> None:
    """Raise TrainingDiverged, on all ranks, if a weight is not finite: an update can break the weights one step before
    a loss shows it."""
    world = state.strategy.world
    parameters = [parameter.detach() for parameter in state.strategy.model.parameters()]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in parameters]  # of a DTensor
    broken = sum(not torch.isfinite(value).all().item() for value in local)
    if world.all_reduce_sum(torch.tensor(float(broken), device=world.device)).item():
        raise _diverged("the weights are not finite", state.progress.step, newest)


def _diverged(what: str, step: int, newest: FindSnapshot) -> TrainingDiverged:
    path = newest()
    saved = f"the last good snapshot is {path}" if path else "no snapshot was saved before"
    return TrainingDiverged(f"{what} at step {step}; {saved}; type optimizer.lr=<smaller> or trainer.max_grad_norm=1.0")
