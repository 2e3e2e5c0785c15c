"""The contract of a task: what is minimised, and what is measured.

Below it stands what tasks share: a loss and metrics of the user's own, and scores from counts for each class.

To add one: a class in a file of its own here, and `conf/task/<name>.yaml` with its `_target_`, its metrics and the
metric to monitor. A task that can show more than numbers returns a `Report`.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.source import count_samples, tensors_in
from lockstep.distributed.backend import float64_device
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.text import show

COUNTS = ("right", "predicted", "true")  # for each class: hits, predictions of it, and samples of it
SCORES = ("precision", "recall", "f1", "iou")

Function = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a value for each sample (N,), or several (N, ...), whose mean counts."""

ReadSample = Callable[[int], Tensor]
"""The test sample of a number, as the data set has it."""


@dataclass(frozen=True)
class Share:
    """Which samples this rank evaluates, in this order: rank, rank + size, rank + 2 size, ... below `samples`.

    split: "val" or "test", the set that they are of.
    """

    rank: int
    size: int
    samples: int
    split: str = "test"


class Report:
    """What an evaluation shows beside its means. Every rank makes a new one for each evaluation.

    `add` is called for each batch, then `reduce`, then on rank 0 perhaps `figures`. This one shows nothing.
    """

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in the next samples of this rank's share. It must not wait for the device."""

    def reduce(self, world: World) -> None:
        """Bring together what the ranks have. A collective. A rank may have had no samples."""

    def figures(self, sample: ReadSample, classes: Sequence[str]) -> dict[str, Tensor]:
        """{tag: image (3, height, width) with values from 0 to 1}. classes: their names, empty if they have none."""
        return {}


class Task:
    """A loss and its metrics, as sums over samples: sums add up over any split of the data, means do not.

    A mean is a sum over a whole global batch or data set, divided by its `count`: of samples, or of what a task says.

    metrics: min or max for each metric: whether lower or higher is better. loss is the first.
    monitor: the metric of the default objective, which decides which weights are the best.

    Attributes:
    sums: {name: number of values} of what a call returns. By default one value for each metric. A task whose metrics
        are no means, such as F1, returns counts instead, and makes metrics of their totals in `finish`.
    counts: what `count` counts, in the plural.
    """

    counts = "samples"

    def __init__(self, metrics: dict[str, str], monitor: str) -> None:
        if monitor not in metrics:
            names = " or ".join(f"task.monitor={name}" for name in metrics)
            raise ConfigError(f"task.monitor={monitor} is not a metric of this task; type {names}")
        self.metrics, self.monitor = metrics, monitor
        self.sums = dict.fromkeys(metrics, 1)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(outputs of the model, targets) -> (the summed loss, which has a gradient; {name: sum}).

        The sums have the names and numbers of values of `self.sums`; one value is a 0-d tensor. "loss" is one of them.
        """
        raise NotImplementedError

    def count(self, targets: Any) -> float | Tensor:
        """What these targets, a tensor (N, ...) or a tuple or dict of such, add to what a mean is divided by: N.

        A task that counts something else, such as tokens, boxes or the weights of samples, returns a number or, where
        it depends on values, a 0-d tensor on their device. The ranks then add up their counts before each step.
        """
        return count_samples(targets)

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        """Raise ConfigError for targets that this task does not take. It is called where samples are read.

        numbers: of their samples. classes: as dataset.classes. Here: as many targets as samples, if these are counted.
        """
        rows = next((len(tensor) for tensor in tensors_in(targets) if tensor.dim()), 1)
        if self.counts_samples and rows != len(numbers):
            what = (
                f"loader.collate_fn makes {rows} targets of {len(numbers)} samples, and a step takes the mean over all"
            )
            raise ConfigError(f"{what}; type task._target_=<module>.<a task whose count says what it counts>")

    @property
    def counts_samples(self) -> bool:
        """Whether `count` is the number of samples, which all ranks know without asking each other."""
        return type(self).count is Task.count

    def finish(self, totals: dict[str, Tensor], count: float) -> dict[str, float]:
        """{metric: value} from the sums over all ranks (float64, on the CPU) and the count that is behind them."""
        return {name: total.item() / (count or 1) for name, total in totals.items()}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """{column: (N,) or (N, values, ...)}: what mode=predict writes of the outputs (N, ...)."""
        return {"output": outputs}

    def report(self, share: Share, images: int) -> Report | None:
        """What an evaluation shall show. images: how many test samples at most. None: nothing but the metrics."""
        return None

    def mode(self, objective: str) -> str:
        """ "min" or "max" for an objective such as "val/accuracy". Raises ConfigError if no evaluation measures it."""
        split, _, name = objective.partition("/")
        if name not in self.metrics:
            names = " or ".join(f"monitor={split}/{name}" for name in self.metrics)
            raise ConfigError(f"monitor={objective} is not measured; type {names}")
        return self.metrics[name]


def check_class_numbers(targets: Any, numbers: Any, classes: int | None, ignored: int | None) -> None:
    """Raise ConfigError for the first whole number that is no class from 0 to `classes` - 1, nor `ignored`.

    targets: (N,), or (N, ...) for a class at each place. numbers: of the samples.
    """
    if classes is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return
    values = targets.long()  # the number of classes may be more than a small type holds
    wrong = (values < 0) | (values >= classes)
    if ignored is not None:
        wrong &= values != ignored
    for row, *place in wrong.nonzero().tolist()[:1]:
        label, where = int(values[(row, *place)]), f" at {place}" if place else ""
        advice = f"dataset.classes={label + 1}" if label >= 0 else f"its target as 0 to {classes - 1}"
        advice += f", or task.ignored_label={label} if it counts nowhere" if place else ""
        what = f"sample {numbers[row]} has the target {label}{where}, and the classes are 0 to {classes - 1}"
        raise ConfigError(f"{what}; type {advice}")


def counted(task: Task, targets: Any) -> int | Tensor:
    """What `task` counts: samples, whose number all ranks know; or what it says itself, as a 0-d float64 tensor."""
    count = task.count(targets)
    if task.counts_samples:
        return int(count)
    count = as_float64(count) if isinstance(count, Tensor) else count
    device = float64_device(next(tensors_in(targets)).device)
    return torch.as_tensor(count, dtype=torch.float64, device=device)


def as_float64(tensor: Tensor) -> Tensor:
    """In float64, on the CPU if its device has none."""
    return tensor.to(float64_device(tensor.device)).double()


def at_least_float32(outputs: Tensor) -> Tensor:
    """Half-precision outputs as float32: a loss is a sum of many small numbers."""
    return outputs.float() if outputs.dtype.itemsize < 4 else outputs


def modules_of(task: Task) -> list[nn.Module]:
    """The modules that a task computes with, such as a loss with class weights."""
    own = getattr(task, "own", None)
    parts = [own.loss, *own.measures.values()] if isinstance(own, OwnParts) else []
    return [part for part in [*vars(task).values(), *parts] if isinstance(part, nn.Module)]


class CrossEntropy(nn.CrossEntropyLoss):
    """torch's, with a weight for each class in float64: a call takes them in the type of its logits.

    class_weights: None, or "balanced", which the training data replaces before a run: all classes weigh the same.
    """

    def __init__(self, class_weights: list[float] | Literal["balanced"] | None, **options: Any) -> None:
        weight = None
        if class_weights is not None and class_weights != "balanced":
            if not any(class_weights):
                raise ConfigError(
                    f"task.class_weights={show(list(class_weights))} has no weight above 0, so no sample counts; "
                    f"type task.class_weights=balanced"
                )
            weight = torch.tensor(class_weights, dtype=torch.float64)
        super().__init__(weight, **options)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits,
            targets,
            None if self.weight is None else self.weight.to(logits.dtype),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class OwnParts:
    """A loss in place of a task's, and metrics beside its metrics.

    A class or function of torch that has `reduction` gets reduction="none": the ranks add up samples, and a mean over a
    rank's samples could not be added. One that is given tensors becomes a module, see `WithTensors`.

    loss: a loss of your own in place of the task's.
    measures: metrics of your own, by name.
    """

    def __init__(self, loss: Function | None, measures: Mapping[str, Function]) -> None:
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            names = ", ".join(name for name, _ in loss.named_parameters())
            raise ConfigError(
                f"task.loss has weights of its own ({names}), and only the model's are trained and saved; keep them in "
                f"the model, and type task._target_=<module>.<a task that takes what the model returns>"
            )
        self.loss = None if loss is None else _prepared("task.loss", loss)
        self.measures = {name: _prepared(f"task.measures.{name}", function) for name, function in measures.items()}

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


class WithTensors(nn.Module):
    """A function with some arguments, whose tensors are buffers: they get the type and the device of the run."""

    def __init__(self, function: partial[Tensor]) -> None:
        super().__init__()
        self.function, self.names = function, [name for name, v in function.keywords.items() if isinstance(v, Tensor)]
        for name in self.names:
            self.register_buffer(name, function.keywords[name])

    def forward(self, *arguments: Any) -> Tensor:
        return self.function(*arguments, **{name: self.get_buffer(name) for name in self.names})


def _prepared(key: str, function: Function) -> Function:
    """`function` without its reduction. Raises ConfigError for a sum over the batch."""
    typed = getattr(function, "reduction", None) or getattr(function, "keywords", {}).get("reduction")
    if typed == "sum":
        raise ConfigError(
            f"{key} has reduction=sum, which grows with the batch, and a loss here is a mean over its samples; "
            f"type ++{key}.reduction=mean"
        )
    if hasattr(function, "reduction"):
        function.reduction = "none"
    else:
        with suppress(TypeError, ValueError):  # written in C
            if "reduction" in inspect.signature(function).parameters:
                function = partial(function, reduction="none")  # type: ignore[call-arg]
    if isinstance(function, partial) and any(isinstance(value, Tensor) for value in function.keywords.values()):
        function = WithTensors(function)
    return function if typed != "batchmean" else lambda *values: function(*values).flatten(1).sum(1)


def _sum(key: str, values: Any, count: int) -> Tensor:
    if not isinstance(values, Tensor):
        raise ConfigError(
            f"{key} gives a {type(values).__name__}, and a tensor with a value for each sample is wanted; "
            f"return the shape {[count]} there"
        )
    if not values.is_floating_point():
        values = as_float64(values)
    if values.dim() == 0 or len(values) != count:
        raise ConfigError(
            f"{key} gives the shape {list(values.shape)} for {count} samples, and a value for each sample is wanted, "
            f"since the ranks add them up; return {[count]}, or type +{key}.reduction=none"
        )
    summed: Tensor = values.flatten(1).mean(1).sum() if values.dim() > 1 else values.sum()
    return summed


def class_counts(predictions: Tensor, targets: Tensor, classes: int) -> dict[str, Tensor]:
    """{count: (classes,) whole numbers} of class numbers of one shape. Targets that are no class are left out.

    Counts add up over ranks and batches; scores do not.
    """

    def count(numbers: Tensor, where: Tensor) -> Tensor:
        """How often each class is in `numbers`. bincount would wait for a GPU."""
        places = torch.where(where & (numbers < classes), numbers, classes).flatten()
        counts = torch.zeros(classes + 1, dtype=torch.int64, device=numbers.device)
        return counts.scatter_add_(0, places, torch.ones_like(places))[:classes]

    is_class = (targets >= 0) & (targets < classes)
    is_right = is_class & (predictions == targets)
    return {
        "right": count(targets, is_right),
        "predicted": count(predictions, is_class),
        "true": count(targets, is_class),
    }


def class_scores(totals: dict[str, Tensor]) -> dict[str, float]:
    """{"f1": mean over the classes, "f1_0": of class 0, ...} for each of SCORES, from the totals of COUNTS.

    A class that is neither predicted nor true is left out of the mean, as in scikit-learn, and has the score 0 itself.
    """
    right, predicted, true = (totals[name].double() for name in COUNTS)
    per_class = {
        "precision": right / predicted.clamp(min=1),
        "recall": right / true.clamp(min=1),
        "f1": 2 * right / (predicted + true).clamp(min=1),
        "iou": right / (predicted + true - right).clamp(min=1),
    }
    occurs = predicted + true > 0
    scores = {}
    for name, values in per_class.items():
        scores[name] = values[occurs].mean().item() if occurs.any() else math.nan
        scores |= {f"{name}_{number}": value for number, value in enumerate(values.tolist())}
    return scores


def require_known(metrics: dict[str, str], means: tuple[str, ...], classes: int | None) -> None:
    """Raise ConfigError for a metric that is neither one of `means` nor a score, of all classes or of one.

    classes: None if it is not known yet how many there are.
    """
    for name in metrics:
        score = re.fullmatch(rf"({'|'.join(SCORES)})(?:_(\d+))?", name)
        if name in means or (score and (classes is None or int(score[2] or 0) < classes)):
            continue
        known = ", ".join([*means, *SCORES])
        numbers = "" if classes is None else f" with a class from 0 to {classes - 1}"
        raise ConfigError(
            f"task.metrics.{name} is not measured by this task; type one of {known}, or f1_<class>{numbers}"
        )
