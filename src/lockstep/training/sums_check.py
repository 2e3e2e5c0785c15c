"""The check that a task returns sums over samples: with means, the numbers would change with the number of ranks."""

import logging

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.tasks.base import Task

log = logging.getLogger(__name__)

TOLERANCE = 1e-2  # relative; a mean is off by half


def require_sums(task: Task, outputs: Tensor, targets: Tensor) -> None:
    """Compare what `task` gives for these samples with what it gives for their halves.

    Raises ConfigError for a mean. Logs a warning for what is no sum either, such as a loss that compares the samples
    of a batch with each other. The tasks of this project have tests for it: no step of theirs waits for a GPU.
    """
    count, half = len(targets), len(targets) // 2
    if half == 0 or type(task).__module__.startswith("lockstep."):
        return
    with torch.no_grad():
        whole, first, second = (
            _values(task, outputs[part], targets[part]) for part in (slice(None), slice(half), slice(half, None))
        )
    for name, value in whole.items():
        if _is_close(value, first[name] + second[name]):
            continue
        if _is_close(value, (half * first[name] + (count - half) * second[name]) / count):
            raise ConfigError(
                f"{_class_name(task)} returns a mean as its {name}, and the number of ranks would change it; return a "
                f'sum over samples instead, and type reduction="sum" where it calls a loss of torch'
            )
        log.warning(
            "%s of %s does not add up over the samples of a batch: it will be another number at another number of "
            "ranks or another gradient accumulation",
            name,
            _class_name(task),
        )


def _values(task: Task, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    loss, sums = task(outputs, targets)
    return {"loss": loss.double()} | {name: value.double() for name, value in sums.items() if name != "loss"}


def _is_close(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= TOLERANCE * torch.maximum(one.abs(), other.abs())).all())


def _class_name(task: Task) -> str:
    return f"{type(task).__module__}.{type(task).__qualname__}"
