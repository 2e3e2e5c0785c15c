"""The state of a run as the whole model's, under the names that the model gave its parameters.

It is the same under every strategy and at every world size, so a snapshot moves between them.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.errors import ConfigError
from lockstep.snapshots.hyperparameters import log_changes, move_scheduler, restore_scheduler, resumed_group
from lockstep.strategies.base import Strategy
from lockstep.strategies.stored_tensor import Block, whole
from lockstep.training.schedulers import Plateau
from lockstep.training.state import TrainState

log = logging.getLogger(__name__)

Spread = Callable[[dict[str, Any]], dict[str, Any]]

NOT_HYPERPARAMETERS = ("params", "param_names")


def model_state(strategy: Strategy) -> dict[str, Any]:
    """The state dict of the whole model, on rank 0. A collective."""
    return strategy.full_state(strategy.model.state_dict())


def collect_state(
    state: TrainState, meter_totals: Tensor, scheduler_as_built: dict[str, Any], spread: Spread
) -> dict[str, Any]:
    """What `restore_state` takes, complete on rank 0. A collective.

    meter_totals: `state.meter.totals()`. scheduler_as_built: the scheduler's state dict before the first step.
    spread: the strategy's `full_state`, or its `own_blocks` for this rank's part of a sharded snapshot.
    """
    scheduler = {"class": _class_name(state.scheduler), "built": scheduler_as_built}
    return {
        "model": spread(state.strategy.model.state_dict()),
        "optimizer": _optimizer_state(state, spread),
        "ema": None if state.ema is None else spread(state.ema.averages),
        "initial_hyperparameters": state.initial_hyperparameters,
        "scheduler": scheduler | {"state": state.scheduler.state_dict()},
        "scaler": state.scaler.state_dict(),
        "meter": {"names": state.meter.names, "totals": meter_totals},
        "monitor": state.task.monitor,
        "objective": state.objective and list(state.objective),
        "skipped": [state.nan.skipped, state.nan.skipped_in_a_row],
        "progress": asdict(state.progress),
    }


def restore_state(state: TrainState, saved: dict[str, Any], epoch_samples: int | None = None) -> None:
    """Bring `state`, which has not trained yet, to what `collect_state` gave. Every rank passes all of it.

    The world and the strategy may be others than the snapshot's. What the config of this run changes stays changed.
    epoch_samples: global samples in an epoch; None if the snapshot was made with this run's batch size.
    Raises ConfigError if the optimizer has another number of parameter groups.
    """
    restore_weights(state, saved)
    for name, value in saved["progress"].items():  # in place: a rollback happens while others hold it
        setattr(state.progress, name, value)
    _restore_optimizer_and_schedule(state, saved, epoch_samples)
    if saved["scaler"]:  # empty after a run without loss scaling
        state.scaler.load_state_dict(saved["scaler"])
    _restore_measurements(state, saved)


def restore_weights(state: TrainState, saved: dict[str, Any]) -> None:
    """The part of `restore_state` that an evaluation needs: weights, buffers and the average of the weights."""
    strategy = state.strategy
    strategy.model.load_state_dict(whole(strategy.shard_state(saved["model"])))
    if state.ema is not None:
        state.ema.averages = _to_layout_of_weights(strategy, saved["ema"] or {})


def copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def plain_copy(value: Any, copy: Callable[[Tensor], Tensor] = copy_to_cpu) -> Any:
    """A copy on the CPU that training cannot change: dicts, lists, tuples, tensors, blocks and plain values.

    Numbers of other libraries become Python's. Other objects become None: `weights_only` would refuse the file.
    copy: of a tensor.
    """
    if isinstance(value, Tensor):
        return copy(value)
    if isinstance(value, Block):
        return replace(value, values=plain_copy(value.values, copy))
    if isinstance(value, dict):
        return {key: plain_copy(item, copy) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain_copy(item, copy) for item in value)
    if isinstance(value, list):
        return [plain_copy(item, copy) for item in value]
    if type(value) in (bool, int, float, str, type(None)):
        return value
    return value.item() if hasattr(value, "item") else None


class CopyMemory:
    """`plain_copy` into the memory of the copy before, which is overwritten: new memory takes four times as long."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def plain_copy(self, value: Any) -> Any:
        before, self.tensors = self.tensors[::-1], []

        def copy(tensor: Tensor) -> Tensor:
            kept = before.pop() if before else None
            if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                self.tensors.append(kept.copy_(tensor.detach()))
            else:
                self.tensors.append(copy_to_cpu(tensor))
            return self.tensors[-1]

        return plain_copy(value, copy)


def _optimizer_state(state: TrainState, spread: Spread) -> dict[str, Any]:
    names = _parameter_names(state.strategy.model, state.optimizer)
    indexed = state.optimizer.state_dict()
    named = {names[index]: values for index, values in indexed["state"].items()}
    groups = [without_parameters(group) for group in indexed["param_groups"]]
    return {"state": spread(named), "param_groups": groups}


def _restore_optimizer_and_schedule(state: TrainState, saved: dict[str, Any], epoch_samples: int | None) -> None:
    """A schedule goes on from its own state. Another one, or one whose steps are of another batch size, is moved to
    the run's position instead. Plateau keeps its state, which evaluations have made."""
    place, schedule = state.progress.step, saved["scheduler"]
    if epoch_samples is not None:
        place = state.schedule_place(epoch_samples)
    goes_on = schedule["class"] == _class_name(state.scheduler)
    goes_on &= place == state.progress.step or isinstance(state.scheduler, Plateau)
    _restore_optimizer(state, saved, goes_on)
    if not goes_on:
        log.info(
            "the run has had another scheduler or batch size: the schedule goes on as after %d of its own steps", place
        )
        move_scheduler(state.scheduler, place)
        return
    restore_scheduler(state.scheduler, schedule["built"], schedule["state"])
    if isinstance(state.scheduler, Plateau) and epoch_samples is not None:
        state.scheduler.number = place


def _restore_optimizer(state: TrainState, saved: dict[str, Any], same_schedule: bool) -> None:
    indexed = state.optimizer.state_dict()
    named = _to_layout_of_weights(state.strategy, saved["optimizer"]["state"])
    names = _parameter_names(state.strategy.model, state.optimizer)
    groups = _resumed_groups(state, saved, indexed["param_groups"], same_schedule)
    by_index = {index: named[name] for index, name in names.items() if name in named}
    state.optimizer.load_state_dict({"state": by_index, "param_groups": groups})
    log_changes(saved["initial_hyperparameters"], state.initial_hyperparameters)


def _resumed_groups(
    state: TrainState, saved: dict[str, Any], built: list[dict[str, Any]], same_schedule: bool
) -> list[dict[str, Any]]:
    """This run's parameter groups, `built`, with the hyperparameters to go on with."""
    saved_groups, saved_initial = saved["optimizer"]["param_groups"], saved["initial_hyperparameters"]
    if len(saved_groups) != len(built):
        raise ConfigError(
            f"the optimizer has {len(built)} parameter groups and the snapshot's had {len(saved_groups)}; "
            f"type the optimizer=... that it was made with"
        )
    resumed = []
    for number, group in enumerate(built):
        initial = state.initial_hyperparameters[number]
        values = resumed_group(
            saved_groups[number], saved_initial[number], without_parameters(group), initial, same_schedule
        )
        resumed.append(group | values)
    return resumed


def _restore_measurements(state: TrainState, saved: dict[str, Any]) -> None:
    """Go on with the sums of the epoch and the best evaluation, unless something else is measured now."""
    if saved["meter"]["names"] == state.meter.names and len(saved["meter"]["totals"]) == len(state.meter.sums):
        state.meter.restore(saved["meter"]["totals"])
    else:
        log.info("the task's metrics changed: this epoch's training metrics begin at step %d", state.progress.step)
    state.nan.skipped, state.nan.skipped_in_a_row = saved.get("skipped", (0, 0))
    if not _has_same_objective(state, saved):
        log.info("the objective changed: the best evaluation before step %d does not count", state.progress.step)
        state.forget_best()
    elif (state.ema is None) != (saved["ema"] is None):
        log.info("trainer.ema changed: the best evaluation before step %d does not count", state.progress.step)
        state.forget_best()


def _has_same_objective(state: TrainState, saved: dict[str, Any]) -> bool:
    """Snapshots of earlier versions have the task's monitor alone."""
    if saved.get("objective") is None or state.objective is None:
        return bool(saved["monitor"] == state.task.monitor)
    return tuple(saved["objective"]) == state.objective


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS}


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """{index that the optimizer's state dict gives a parameter: the parameter's name}, matched by identity.

    Parameter groups may list the parameters in another order than the model does.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}


@torch.no_grad()
def _to_layout_of_weights(strategy: Strategy, named: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of `named`, in the type, device and memory layout of its parameters and buffers, in their order.

    Fused optimizers read a parameter and its state side by side in memory. Averages are updated one after the other.
    """
    weights = dict(strategy.model.named_parameters()) | dict(strategy.model.named_buffers())
    own = whole(strategy.shard_state(named))
    return {name: _like(weight, own[name]) for name, weight in weights.items() if name in own}


def _like(weight: Tensor, values: Any) -> Any:
    if isinstance(values, dict):  # "step" counts; the optimizer chooses its type
        return {key: value if key == "step" else _like(weight, value) for key, value in values.items()}

    def convert(tensor: Tensor) -> Tensor:
        return torch.empty_like(weight).copy_(tensor) if tensor.shape == weight.shape else tensor

    return tree_map_only(Tensor, convert, values)


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
