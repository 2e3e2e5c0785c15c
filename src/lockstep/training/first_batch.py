"""What is checked once, with the first batch: that model and task fit together, and that the task returns sums.

With means the numbers would change with the number of ranks.
"""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.dataset import count_samples, map_tensors
from lockstep.errors import ConfigError
from lockstep.tasks.base import Task

log = logging.getLogger(__name__)

TOLERANCE = 1e-2  # relative; a mean is off by half


class FirstBatch:
    """Checks the first batch of a process that has two samples. Afterwards its methods do nothing."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model, self.is_checked = task, model, False

    def check_inputs(self, inputs: Any) -> None:
        """Raises ConfigError as `require_plain_inputs` does."""
        if not self.is_checked:
            require_plain_inputs(self.model, inputs)

    def check_outputs(self, outputs: Any, targets: Any) -> None:
        """Raises ConfigError as `require_one_tensor` and `require_sums` do."""
        if not self.is_checked:
            require_one_tensor(self.task, outputs)
            self.is_checked = require_sums(self.task, outputs, targets)


def require_plain_inputs(model: nn.Module, inputs: Any) -> None:
    """Raise ConfigError if the samples are dicts whose values `model` takes by name, as nets of transformers do."""
    if not isinstance(inputs, Mapping):
        return
    parameters = inspect.signature(model.forward).parameters
    if all(name in parameters for name in inputs):
        raise ConfigError(
            f"{_class_name(model)} takes {', '.join(inputs)} by name, and a model gets all inputs as one value, here a "
            f"dict; type model._target_=<module>.<a class that calls it with **inputs>, as in docs/language_models.md"
        )


def require_one_tensor(task: Task, outputs: Any) -> None:
    """Raise ConfigError if a task of this project gets something else than a tensor, such as the object with logits
    that a net of transformers returns. A task of the user's may take anything."""
    if isinstance(outputs, Tensor) or not _is_ours(task):
        return
    found = f"an object of {type(outputs).__name__}"
    if hasattr(outputs, "logits"):
        raise ConfigError(
            f"the model returns {found}, and {type(task).__name__} needs its logits alone; type "
            f"model._target_=<module>.<a class that returns the logits>, as in docs/language_models.md"
        )
    raise ConfigError(
        f"the model returns {found}, and {type(task).__name__} needs one tensor; type "
        f"model._target_=<module>.<a class that returns one>, or task._target_=<module>.<a task that takes it>"
    )


def require_sums(task: Task, outputs: Any, targets: Any) -> bool:
    """Compare what `task` gives for these samples with what it gives for their halves. False: one sample has none.

    Raises ConfigError for a mean, and for what is not (loss, {name: sum}). Logs a warning for what is no sum either,
    such as a loss that compares the samples of a batch with each other. The tasks of this project have tests for it: no
    step of theirs waits for a GPU.
    """
    if _is_ours(task):
        return True
    count = count_samples(targets)
    if count < 2:
        with torch.no_grad():
            _require_form(task, task(outputs, targets))
        return False
    half = count // 2
    with torch.no_grad():
        whole, first, second = (
            _values(task, _rows(outputs, part), _rows(targets, part))
            for part in (slice(None), slice(half), slice(half, None))
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
    return True


def _is_ours(task: Task) -> bool:
    return type(task).__module__.startswith("lockstep.")


def _require_form(task: Task, found: Any) -> None:
    """Raise ConfigError if `found` is not what a task returns."""
    named_sums = ", ".join(f'"{name}": <sum>' for name in task.sums)
    name, advice = _class_name(task), f"type return loss, {{{named_sums}}}"
    if not isinstance(found, tuple) or len(found) != 2:
        number = f"{len(found)} values" if isinstance(found, tuple) else f"one {type(found).__name__}"
        raise ConfigError(f"{name} returns {number}, and the loss and a dict of sums are wanted; {advice}")
    loss, sums = found
    if not isinstance(sums, Mapping) or "loss" not in sums:
        what = (
            f"a dict of {', '.join(map(str, sums)) or 'nothing'}"
            if isinstance(sums, Mapping)
            else f"a {type(sums).__name__}"
        )
        raise ConfigError(f"{name} returns {what} beside the loss, and a dict of sums is wanted; {advice}")
    for key, value in {"loss": loss, **sums}.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"{name} returns a {type(value).__name__} as its {key}, and a tensor is wanted; {advice}")
        if value.numel() != task.sums.get(key, value.numel()):
            raise ConfigError(
                f"{name} returns the shape {list(value.shape)} as its {key}, and a sum over the samples is wanted; "
                f"type {key}.sum()"
            )


def _rows(values: Any, part: slice) -> Any:
    """A 0-d tensor, such as a loss that the model adds, belongs to the whole batch."""
    return map_tensors(lambda tensor: tensor[part] if tensor.dim() else tensor, values)


def _values(task: Task, outputs: Any, targets: Any) -> dict[str, Tensor]:
    found = task(outputs, targets)
    _require_form(task, found)
    loss, sums = found
    return {"loss": loss.double()} | {name: value.double() for name, value in sums.items() if name != "loss"}


def _is_close(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= TOLERANCE * torch.maximum(one.abs(), other.abs())).all())


def _class_name(part: Task | nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
