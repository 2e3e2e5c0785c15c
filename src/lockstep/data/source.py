"""A data set of a config is a `DataSource`, one node in conf/dataset. Its splits are map-style data sets of torch.

To add one of your own, either write `_target_: lockstep.data.Pair` with two nodes of plain `torch.utils.data.Dataset`s,
or a dataclass derived from `DataSource`, with `splits`, and a YAML file with its fields.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.config.schema import Count, Positive, Shape
from lockstep.data.partition import Array
from lockstep.errors import ConfigError

TARGET_KEYS = ("target", "targets", "label", "labels")  # of samples that are dicts


class Splits(NamedTuple):
    """The data of a run. val: None where `loader.validation` holds a part of the training data out."""

    train: Any
    test: Any
    val: Any = None


@dataclass(kw_only=True)
class DataSource:
    """The contract of a data set. Its fields are the keys of its node, and their types are checked. shape: of a
    sample's inputs. classes: how many. null: the data tells. mean, std: of each channel, of pixels from 0 to 1: inputs
    are normalised by them."""

    shape: Shape | None = None
    classes: Count | None = None
    mean: list[float] | None = None
    std: list[Positive] | None = None

    def prepare(self) -> None:
        """Once on each machine, before `splits`: download, decode, index, tokenise."""

    def splits(self) -> Splits:
        """The data, the same on every rank: map-style data sets whose samples are pairs (inputs, target).

        An attribute `classes`, the names of the classes, is compared between the splits. Attributes `targets`, `groups`
        and `weights` (N,) are used without reading samples: for balance, for validation by group, for sampling. A data
        set with `gather(indices) -> (inputs, targets)` and `to(device)` is read in the rank itself, whole batches at
        once. One with `shards` (N,), the number of the file of each sample, is shuffled by `Order` within windows of
        files. Of one with `draws`, a number, an epoch draws as many samples at random.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class Pair(DataSource):
    """Two map-style data sets of the user's. validation: null where a part of `train` is held out."""

    train: Any
    test: Any
    validation: Any = None

    def splits(self) -> Splits:
        return Splits(self.train, self.test, self.validation)


@dataclass(eq=False)
class Tensors(Dataset[Any]):
    """Samples in memory: inputs and targets (N, ...). The others are as of `DataSource.splits`. files: for reports."""

    inputs: Tensor
    targets: Tensor
    classes: Sequence[str] | None = None
    groups: Sequence[Any] | None = None
    weights: Tensor | None = None
    files: Any = None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index].clone(), self.targets[index].clone()  # a transform may change what it gets

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The rows (n,) of inputs and targets. `index_select` copies whole rows, five times as fast as []."""
        indices = indices.to(self.inputs.device, non_blocking=True)
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def to(self, device: torch.device) -> "Tensors":
        """The same samples on `device`, where they fit beside the training; else themselves."""
        is_copied = fits(device, self.inputs, self.targets)
        return Tensors(self.inputs.to(device), self.targets.to(device)) if is_copied else self


def fits(device: torch.device, *tensors: Tensor) -> bool:
    """Whether copies of `tensors` take at most a quarter of the free memory of a GPU. On a CPU nothing is copied."""
    if device.type != "cuda":
        return device.type == "mps"
    return sum(tensor.nbytes for tensor in tensors) <= torch.cuda.mem_get_info(device)[0] // 4


def unwrapped(dataset: Any) -> tuple[Any, Array | None]:
    """The whole data set of which `dataset` may be a part, and the part's indices in it; None: all of them."""
    indices = None
    while isinstance(dataset, Subset):
        own = np.asarray(dataset.indices)
        indices = own if indices is None else own[indices]
        dataset = dataset.dataset
    return dataset, indices


def of_each_sample(dataset: Any, name: str) -> Any:
    """The attribute `name` of a data set, as an array (N, ...); None without it. Raises ConfigError for a wrong N."""
    whole, indices = unwrapped(dataset)
    is_target = name == "targets" and isinstance(whole, TensorDataset)
    values = whole.tensors[-1] if is_target else getattr(whole, name, None)
    if values is None:
        return None
    values = values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)
    if len(values) != len(whole):
        what = f"{type(whole).__name__} has {len(whole)} samples, and its attribute {name} {len(values)} values"
        raise ConfigError(f"{what}; give it one for each sample, or name the attribute something else")
    return values if indices is None else values[indices]


def class_names(dataset: Any) -> list[str]:
    """In the order of their numbers; empty without names."""
    names = getattr(unwrapped(dataset)[0], "classes", None)
    return list(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else []


def class_numbers(dataset: Any) -> Array | None:
    """(N,) of each sample; None where they are not known without reading samples."""
    targets = of_each_sample(dataset, "targets")
    return targets if targets is not None and targets.ndim == 1 and targets.dtype.kind in "iu" else None


def class_count(dataset: Any, first_target: Any) -> int | None:
    """The number of names, else one more than the largest target, else the numbers of a target; None if none tells."""
    if names := class_names(dataset):
        return len(names)
    if (numbers := class_numbers(dataset)) is not None:
        return int(numbers.max()) + 1
    is_row = torch.is_tensor(first_target) and first_target.dim() == 1
    return len(first_target) if is_row and (len(first_target) > 1 or first_target.is_floating_point()) else None


def require_same_classes(names: Sequence[str], others: Sequence[str], what: str, other: str, advice: str) -> None:
    """Raise ConfigError if a class number of `other` has another name in `what`, or none: nothing else would show it.
    names, others: of their classes, empty if they have none. advice: what to type."""
    for number, name in enumerate(others if names else ()):
        if names[number : number + 1] != [name]:
            first = names[number] if number < len(names) else "no class"
            raise ConfigError(f"class {number} is {first} in {what} and {name} in {other}; {advice}")


# Inputs and targets of a batch are one tensor each, or tuples or dicts of them, whose first dimension counts samples.


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `function` applied to each of its tensors. Lists become tuples; other values stay as they are."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return tuple(map_tensors(function, item) for item in value) if isinstance(value, tuple | list) else value


def tensors_in(value: Any) -> list[Tensor]:
    found = list[Tensor]()
    map_tensors(found.append, value)
    return found


def count_samples(value: Any) -> int:
    """How many samples a batch has. A tensor with a single number is one for the whole batch."""
    if isinstance(value, Tensor) and value.dim():
        return value.shape[0]
    return next(len(tensor) for tensor in tensors_in(value) if tensor.dim())


def without_samples(value: Any) -> Any:
    """A batch `value` as one of no samples."""
    return map_tensors(lambda tensor: tensor[:0] if tensor.dim() else tensor, value)
