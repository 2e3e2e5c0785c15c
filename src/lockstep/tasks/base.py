"""The contract of a task: what is minimised, and what is measured.

To add one: a class in a file of its own here or of yours, and `conf/task/<name>.yaml` with its `_target_`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.data.loader import Progress
from lockstep.data.source import count_samples, tensors_in
from lockstep.distributed.world import World, float64_device
from lockstep.errors import ConfigError

Function = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a loss for each sample (N,), or one for each target, in the shape of the targets."""

ReadSample = Callable[[int], Tensor]
"""The sample of a number, as the data set has it."""

Samples = Mapping[str, Tensor]
"""{"number", "loss", "right", "target", "prediction": (n,) float64}: a row for each sample that an evaluation counted.
NaN where a sample has no such value, or several."""


class Sums(NamedTuple):
    """What some samples add to the means of a task, name by name."""

    loss: Tensor  # 0-d, with its gradient, in float32 at least
    values: list[Tensor]  # 0-d, without
    counts: list[int | Tensor]  # what each is divided by in the end


class Task:
    """A loss, and what else is measured: values of samples or tokens, of which a mean over all of them is shown."""

    better: Mapping[str, str] = {"loss": "min"}  # or "max", of each value by its name; loss is the first
    derived: Sequence[str] = ()  # those that `finish` computes from the others
    monitor = "loss"  # the value that chooses the best weights, if the config says auto
    counts = "samples"  # what is counted, in the plural
    ignored: int | None = None  # the target that counts nowhere
    target_weights: Tensor | None = None  # (classes,) how much a target of each class counts in the loss
    draws = False  # whether `figures` shows something

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """What the model computes of `inputs` for a loss. All that is called in here is synchronised over the ranks."""
        return model(inputs)

    def __call__(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """{name of `names`: its values}: one for each sample (N,), or for each target, in the shape of `targets`."""
        raise NotImplementedError

    def count(self, targets: Any) -> int | Tensor:
        """What these targets add to what the sum of the loss is divided by: the samples, which all ranks know; else a
        0-d tensor, of tokens that are not ignored or of weights. The ranks then add up their counts in each step."""
        is_soft = not isinstance(targets, Tensor) or targets.is_floating_point()
        if self.target_weights is not None and not is_soft:
            is_counted = torch.ne(targets, -1 if self.ignored is None else self.ignored)
            return as_float64(self.target_weights[targets.where(is_counted, 0)] * is_counted).sum()
        if self.ignored is None or is_soft or targets.dim() == 1:
            return count_samples(targets)
        return torch.ne(targets, self.ignored).sum()

    def counts_by_value(self, targets: Any, ignores: bool) -> bool:
        """Whether ranks have to add up what `count` gives of such targets, some of which may be `self.ignored` if
        `ignores` says so. Else samples count, whose number all know."""
        is_of_classes = isinstance(targets, Tensor) and targets.dim() > 1 and not targets.is_floating_point()
        may_be_ignored = ignores and self.ignored is not None and is_of_classes
        return may_be_ignored or self.target_weights is not None or type(self).count is not Task.count

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """The means of an epoch or an evaluation, perhaps with others that follow from them."""
        return means

    def scores(self, outputs: Any) -> Any:
        """What metrics of torchmetrics get of the outputs, such as probabilities (N, classes, ...)."""
        return outputs

    def predictions(self, outputs: Any) -> dict[str, Tensor]:
        """{column: (N,) or (N, values, ...)}: what mode=predict writes of the outputs (N, ...)."""
        return {"prediction": outputs}

    def figures(self, samples: Samples, read: ReadSample, classes: Sequence[str], images: int) -> dict[str, Tensor]:
        """{name: image (3, height, width) from 0 to 1} of an evaluation, where `draws` says so. images: of so many
        samples at most. classes: their names, if they have any."""
        return {}

    def check_targets(self, targets: Any, numbers: Any, classes: int | None) -> None:
        """Raise ConfigError where targets of the samples `numbers` are read that this task does not take. Here: another
        number of them. classes: as dataset.classes."""
        rows = next((len(tensor) for tensor in tensors_in(targets) if tensor.dim()), len(numbers))
        if type(self).count is Task.count and rows != len(numbers):
            what = f"loader.collate_fn makes {rows} targets of {len(numbers)} samples, and a step takes the mean of all"
            raise ConfigError(f"{what}; type task._target_=<module>.<a task whose count says what it counts>")

    @cached_property
    def names(self) -> list[str]:
        """Of the values that a call gives."""
        return [name for name in self.better if name not in self.derived]

    def start(self, world: World, progress: Progress, dtype: torch.dtype, has_whole_batches: bool = True) -> None:
        """Called once, before anything is computed: tensors and modules among the attributes, such as a teacher, go to
        the rank's device, modules in the type of the model, `dtype`; float64 only where the device has it.
        has_whole_batches: whether all ranks together pass a whole batch forward at once."""
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
            what = f"{type(self).__name__} compares the samples of a batch, of which a forward pass would have a part"
            raise ConfigError(f"{what}; type trainer.gradient_accumulation_steps=1 strategy=ddp")
        return self.world.all_gather_samples(tensor)

    def sums(self, outputs: Any, targets: Any, ignores: bool = True, found: Any = None) -> Sums:
        """What these samples add to each mean. ignores: whether some targets may be `self.ignored`; where none may,
        values of the shape of the targets are first averaged over each sample. found: what a call gave."""
        found = self(outputs, targets) if found is None else found
        rows = count_samples(targets)
        shape = targets.shape if isinstance(targets, Tensor) and targets.dim() > 1 else (rows,)
        values, counts = list[Tensor](), list[int | Tensor]()
        for name in self.names:
            value: Any = found.get(name) if isinstance(found, dict) else None
            count: int | Tensor = rows
            if not isinstance(value, Tensor) or value.shape not in ((rows,), shape):
                given = [*value.shape] if isinstance(value, Tensor) else type(value).__name__
                what = f"{type(self).__name__} gives {name} as {given}, and a value for each sample is wanted"
                what += f", {[rows]}{f', or {[*shape]}' if len(shape) > 1 else ''}: the ranks add them up"
                advice = 'reduction="none" where it calls a loss of torch' if given == [] else "a dict of such tensors"
                raise ConfigError(f"{what}; type {advice}")
            if value.dim() > 1 and ignores and self.ignored is not None:
                count = (targets != self.ignored).sum()
            elif value.dim() > 1:
                value = at_least_float32(value.flatten(1)).mean(1)
            if name == "loss" and self.counts_by_value(targets, ignores):
                count = self.count(targets)
            values.append(at_least_float32(value).sum() if value.is_floating_point() else value.count_nonzero())
            counts.append(count)
        return Sums(values[0], [value.detach() if value.requires_grad else value for value in values], counts)

    def mode(self, objective: str) -> str:
        """ "min" or "max" for an objective such as "val/accuracy". Raises ConfigError if it is not measured."""
        split, _, name = objective.partition("/")
        if name not in self.better:
            names = " or ".join(f"monitor={split}/{name}" for name in self.better)
            raise ConfigError(f"monitor={objective} is not measured; type {names}")
        return self.better[name]


def as_float64(tensor: Tensor) -> Tensor:
    """In float64, on the CPU if its device has none."""
    return tensor.to(float64_device(tensor.device)).double()


def at_least_float32(outputs: Tensor) -> Tensor:
    """Half-precision outputs as float32: a sum of many small numbers is far off in float16 and bfloat16."""
    return outputs.float() if outputs.dtype.itemsize < 4 else outputs


def misfit(task: Task, wanted: str, outputs: Any, targets: Any) -> ConfigError:
    """For outputs and targets that a task of this project does not take."""
    found = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (outputs, targets)]
    kind = f", {str(targets.dtype).removeprefix('torch.')}" if isinstance(targets, Tensor) else ""
    what = f"{type(task).__name__} takes {wanted}, and these are {found[0]} and {found[1]}{kind}"
    return ConfigError(f"{what}; type task=<the one for such targets>, or let model and data set return such tensors")
