"""The contract of a task: what is minimised, and what is measured.

To add one: a class in a file of its own here or of yours, and `conf/task/<name>.yaml` with its `_target_`. A task that
can show more than numbers has `figures`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.data.loader import Position
from lockstep.data.source import count_samples, tensors_in
from lockstep.distributed.backend import float64_device
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

Function = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a loss for each sample (N,), or one for each target, in the shape of the targets."""

ReadSample = Callable[[int], Tensor]
"""The sample of a number, as the data set has it."""

Samples = Mapping[str, Tensor]
"""{"number", "loss", "right", "target", "prediction": (n,) float64}: a row for each sample that an evaluation counted.
NaN where a sample has no such value, or several."""


class Sums(NamedTuple):
    """What some samples add to the means of a task, name by name.

    loss: 0-d, with its gradient, in float32 at least. values: 0-d, without. counts: what each is divided by in the end.
    """

    loss: Tensor
    values: list[Tensor]
    counts: list[int | Tensor]


class Task:
    """A loss, and what else is measured: values of samples or tokens, of which a mean over all of them is shown.

    better: whether "min" or "max" is better, of each value by its name. loss is the first.
    monitor: the value that chooses the best weights, if the config says auto.
    derived: those that `finish` computes from the others.
    counts: what is counted, in the plural.
    ignored: the target that counts nowhere, if there is one.
    draws: whether `figures` shows something.
    """

    better: Mapping[str, str] = {"loss": "min"}
    derived: Sequence[str] = ()
    monitor = "loss"
    counts = "samples"
    ignored: int | None = None
    draws = False

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """What the model computes of `inputs` for a loss. All that is called in here is synchronised over the ranks."""
        return model(inputs)

    def __call__(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """{name of `names`: its values}: one for each sample (N,), or for each target, in the shape of `targets`.

        "loss" is one of them, and has a gradient.
        """
        raise NotImplementedError

    def count(self, targets: Any) -> int | Tensor:
        """What these targets add to what the sum of the loss is divided by: the samples, which all ranks know.

        A task that counts something else, such as tokens or the weights of classes, returns a 0-d tensor. The ranks
        then add up their counts in each step.
        """
        return count_samples(targets)

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """The means of an epoch or an evaluation, perhaps with others that follow from them."""
        return means

    def scores(self, outputs: Any) -> Any:
        """What metrics of torchmetrics get of the outputs, such as probabilities (N, classes, ...)."""
        return outputs

    def predictions(self, outputs: Any) -> dict[str, Tensor]:
        """{column: (N,) or (N, values, ...)}: what mode=predict writes of the outputs (N, ...)."""
        return {"output": outputs}

    def figures(self, samples: Samples, read: ReadSample, classes: Sequence[str], images: int) -> dict[str, Tensor]:
        """{name: image (3, height, width) with values from 0 to 1} of an evaluation, where `draws` says so.

        classes: their names, empty if they have none. images: how many samples are shown at most.
        """
        return {}

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        """Raise ConfigError for targets that this task does not take. It is called where samples are read.

        numbers: of their samples. classes: as dataset.classes. Here: as many targets as samples.
        """
        rows = next((len(tensor) for tensor in tensors_in(targets) if tensor.dim()), 1)
        if self.counts_samples and rows != len(numbers):
            what = f"loader.collate_fn makes {rows} targets of {len(numbers)} samples, and a step takes the mean of all"
            raise ConfigError(f"{what}; type task._target_=<module>.<a task whose count says what it counts>")

    @cached_property
    def names(self) -> list[str]:
        """Of the values that a call gives."""
        return [name for name in self.better if name not in self.derived]

    def start(self, world: World, progress: Position, dtype: torch.dtype, has_whole_batches: bool = True) -> None:
        """Called once, before anything is computed: `self.world` and `self.progress` are these from here on, and the
        tensors and modules among its attributes, such as a teacher, are on the rank's device.

        progress: `epoch` and `step` say how far the training is. dtype: of the model. Tensors of floats keep their own,
        but where the device lacks it. has_whole_batches: whether all ranks together pass a whole batch forward at once.
        """
        self.world, self.progress, self.has_whole_batches = world, progress, has_whole_batches
        device = world.device
        for name, part in vars(self).items():
            if isinstance(part, nn.Module):
                setattr(self, name, part.to(device, dtype))
            elif isinstance(part, Tensor):
                lacks = device.type == "mps" and part.dtype == torch.float64
                setattr(self, name, part.to(device, torch.float32 if lacks else part.dtype))

    def all_gather_samples(self, tensor: Tensor) -> tuple[Tensor, int]:
        """As `World.all_gather_samples`, for a loss that compares the samples of a batch. Raises ConfigError where a
        forward pass has a part of the batch."""
        if not self.has_whole_batches:
            what = f"{name_of(self)} compares the samples of a batch, and a forward pass would have a part of them"
            raise ConfigError(f"{what}; type trainer.gradient_accumulation_steps=1 strategy=ddp")
        return self.world.all_gather_samples(tensor)

    def counts_by_value(self, targets: Any, ignores: bool) -> bool:
        """Whether ranks have to add up what `count` gives of such targets. Else samples count, whose number all know.

        ignores: whether some of them may be `self.ignored`.
        """
        return not self.counts_samples

    @property
    def counts_samples(self) -> bool:
        """Whether `count` is that of this class."""
        return type(self).count is Task.count

    def sums(self, outputs: Any, targets: Any, ignores: bool = True, found: Any = None) -> Sums:
        """What these samples add to each mean. ignores: whether some targets may be `self.ignored`. found: what a call
        gave, if there was one.

        Where no target is, values of the shape of the targets are first averaged over each sample, and samples count.
        """
        found = self(outputs, targets) if found is None else found
        rows = count_samples(targets)
        ignored = self.ignored if ignores else None
        by_target = isinstance(targets, Tensor) and targets.dim() > 1
        values, counts = list[Tensor](), list[int | Tensor]()
        for name in self.names:
            try:
                value = found[name]
            except (KeyError, IndexError, TypeError):
                raise _missing(self, name, found) from None
            if not isinstance(value, Tensor):
                raise self._of_wrong_shape(name, value, rows, targets)
            if value.shape == (rows,):
                count: int | Tensor = rows
            elif by_target and value.shape == targets.shape:
                count = rows if ignored is None else (targets != ignored).sum()
                value = value.flatten(1).to(_wide(value)).mean(1) if ignored is None else value
            else:
                raise self._of_wrong_shape(name, value, rows, targets)
            if name == "loss":
                count = self.count(targets) if self.counts_by_value(targets, ignores) else rows
            values.append(value.sum(dtype=_wide(value)) if value.is_floating_point() else value.count_nonzero())
            counts.append(count)
        return Sums(values[0], [value.detach() for value in values], counts)

    def _of_wrong_shape(self, name: str, value: Any, rows: int, targets: Any) -> ConfigError:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        of_targets = f", or {list(targets.shape)}" if isinstance(targets, Tensor) and targets.dim() > 1 else ""
        what = f"{name_of(self)} gives {name} as {shape}, and a value for each sample is wanted, {[rows]}{of_targets}"
        advice = 'reduction="none" where it calls a loss of torch' if shape == [] else f"{name} with a value a sample"
        return ConfigError(f"{what}: the ranks add them up; type {advice}")

    def mode(self, objective: str) -> str:
        """ "min" or "max" for an objective such as "val/accuracy". Raises ConfigError if it is not measured."""
        split, _, name = objective.partition("/")
        if name not in self.better:
            names = " or ".join(f"monitor={split}/{name}" for name in self.better)
            raise ConfigError(f"monitor={objective} is not measured; type {names}")
        return self.better[name]


def _missing(task: Task, name: str, found: Any) -> ConfigError:
    given = ", ".join(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
    return ConfigError(
        f"{name_of(task)} gives {given}, and no {name}; return a dict that has it, as docs/tasks.md shows"
    )


def _wide(value: Tensor) -> torch.dtype:
    """In float16 and bfloat16 a sum of many small numbers is far off."""
    return torch.float32 if value.dtype.itemsize < 4 else value.dtype


def name_of(part: object) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def as_float64(tensor: Tensor) -> Tensor:
    """In float64, on the CPU if its device has none."""
    return tensor.to(float64_device(tensor.device)).double()


def at_least_float32(outputs: Tensor) -> Tensor:
    """Half-precision outputs as float32."""
    return outputs.to(_wide(outputs))


def misfit(task: Task, wanted: str, outputs: Any, targets: Any) -> ConfigError:
    """For outputs and targets that a task of this project does not take."""
    found = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (outputs, targets)]
    kind = f", {str(targets.dtype).removeprefix('torch.')}" if isinstance(targets, Tensor) else ""
    what = f"{type(task).__name__} takes {wanted}, and these are {found[0]} and {found[1]}{kind}"
    advice = "task=regression for targets that are numbers, classification for class numbers, multi_label for labels "
    advice += "of 0 and 1, language_modelling for a class number at each place of a text; or return one such "
    return ConfigError(f"{what}; type {advice}tensor, of one of transformers its logits")
