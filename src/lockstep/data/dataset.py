"""What a data set is: tensors in memory, or samples that are read by number. What it says of itself, and what its
targets must be.

Inputs and targets are one tensor each, or a tuple or dict of tensors, whose first dimension counts samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError

IGNORED = -100  # the target that torch's losses leave out
TARGET_KEYS = ("target", "targets", "label", "labels")  # of samples that are dicts
TOLERANCE = 1e-2  # of the sum of probabilities
DEVICE_SHARE = 4  # up to 1/4 of the free memory of a GPU is taken; more samples stay with the host


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to each of its tensors. Lists become tuples; other values stay as they are."""
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map_tensors(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A GPU copies from pinned memory while the host goes on. Apple's shares the memory, and has no float64."""
    if tensor.device == device:
        return tensor
    if device.type == "mps":
        return (tensor.float() if tensor.dtype == torch.float64 else tensor).to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def float64_device(device: torch.device) -> torch.device:
    """Where a computation in float64 is that belongs to one on `device`."""
    return torch.device("cpu") if device.type == "mps" else device


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def count_samples(value: Any) -> int:
    """How many samples a batch has. A tensor with a single number is one for the whole batch."""
    return next(len(tensor) for tensor in tensors_in(value) if tensor.dim())


def is_list_of_samples(value: Any, count: int) -> bool:
    """Whether a part of a batch is a list with an item for each of `count` samples, not tensors with rows for them.

    The items are dicts, or images, or tensors of several lengths. A few tensors of one length are packed sequences.
    """
    if isinstance(value, Mapping):
        return any(is_list_of_samples(item, count) for item in value.values())
    if not isinstance(value, tuple | list) or len(value) != count:
        return False
    rows = {len(tensor) for tensor in tensors_in(value) if tensor.dim()}
    if all(isinstance(item, Mapping) for item in value):
        return bool(rows) and rows != {count}
    are_images = all(isinstance(item, Tensor) and item.dim() > 2 for item in value)
    are_tables = all(isinstance(item, Tensor) and item.dim() == 2 for item in value)
    return rows != {count} and (are_images or (are_tables and len(rows) > 1))


def without_samples(value: Any) -> Any:
    """A batch `value` as one of no samples."""
    return map_tensors(lambda tensor: tensor[:0] if tensor.dim() else tensor, value)


# What a sample is made of: values in tuples (named ones too), lists, mappings and dataclasses, in any depth.


def parts_of(value: Any) -> dict[Any, Any] | None:
    """{name or place: part} of what holds parts of a sample. None for a value, such as a tensor or an image."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
    """A copy of `value` with other `parts`, which have the names of `parts_of(value)`."""
    if isinstance(value, tuple | list):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    if isinstance(value, Mapping) and (type(value) is dict or not isinstance(value, MutableMapping)):
        return dict(parts)
    made = copy(value)
    if isinstance(made, MutableMapping):
        made.update(parts)
        return made
    for name, part in parts.items():
        object.__setattr__(made, name, part)  # a dataclass may be frozen
    return made


def values_in(sample: Any) -> Iterator[Any]:
    """Every value of a sample."""
    parts = parts_of(sample)
    if parts is None:
        yield sample
    else:
        for part in parts.values():
            yield from values_in(part)


def copied(sample: Any) -> Any:
    """`sample` with copies of its tensors, arrays and images of Pillow. Other values stay."""
    parts = parts_of(sample)
    if parts is not None:
        return with_parts(sample, {name: copied(part) for name, part in parts.items()})
    if isinstance(sample, Tensor):
        return sample.clone()
    if isinstance(sample, np.ndarray):
        return sample.copy() if sample.flags.writeable else sample  # a mapped file may be large
    return sample.copy() if hasattr(sample, "getbands") else sample


@dataclass(frozen=True, eq=False)
class InMemoryDataset:
    """A data set that is two tensors, which `BatchLoader` indexes directly.

    Any other map-style data set is read through a DataLoader. Raises ConfigError for anything else than tensors, and
    for another number of targets than of samples.

    samples: (N, C, H, W) uint8 images or (N, ...) floats.
    targets: (N,) int64 classes or (N, ...) floats.
    numbers: (n,) int64, the rows that the data set consists of, where it is a part of the tensors, such as the training
        data without what is held out of it. The tensors stay whole: nothing is copied. None: all rows.
    """

    samples: Tensor
    targets: Tensor
    numbers: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("targets", self.targets)):
            if not isinstance(value, Tensor) or value.dim() == 0:
                kind = "one number" if isinstance(value, Tensor) else f"an object of {type(value).__name__}"
                raise ConfigError(
                    f"the {name} of an InMemoryDataset are {kind}, and must be a tensor with a row for each sample; "
                    f"type torch.as_tensor(<{name}>) where the data set is made"
                )
        if len(self.samples) != len(self.targets):
            raise ConfigError(
                f"an InMemoryDataset has {len(self.samples)} samples and {len(self.targets)} targets, and each sample "
                f"must have one; type InMemoryDataset(samples, targets) with tensors of one length"
            )

    def __len__(self) -> int:
        return len(self.targets) if self.numbers is None else len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.row(index)
        return self.samples[row], self.targets[row]

    def row(self, index: int) -> int:
        """The row of the tensors that a sample is."""
        return index if self.numbers is None else int(self.numbers[index])

    def rows(self, indices: Tensor) -> Tensor:
        """As `row`, of several samples."""
        return indices if self.numbers is None else self.numbers.to(indices.device)[indices]

    def one(self, number: int = 0) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of one sample as a batch."""
        row = self.row(number)
        return self.samples[row : row + 1], self.targets[row : row + 1]

    @property
    def epoch_samples(self) -> int:
        """How many samples an epoch has."""
        return len(self)

    @property
    def evaluated(self) -> range:
        """The numbers of the samples that an evaluation of the whole takes."""
        return range(len(self))

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        """The indices (epoch_samples,) of an epoch's samples. They depend on `generator` alone."""
        return torch.randperm(len(self), generator=generator)

    def fits_on(self, device: torch.device) -> bool:
        """Whether `device` has the CPU's memory, or is a GPU with room for the samples and the rest of a training."""
        if device.type != "cuda":
            return True
        # Windows of a text are a view, so the storage counts.
        return self.samples.untyped_storage().nbytes() <= torch.cuda.mem_get_info(device)[0] // DEVICE_SHARE

    def to(self, device: torch.device) -> "InMemoryDataset":
        """This data set, copied if it is on another device, and fits there."""
        if self.samples.device == device or not self.fits_on(device):
            return self
        return InMemoryDataset(self.samples.to(device), self.targets.to(device), numbers=self.numbers_on(device))

    def numbers_on(self, device: torch.device) -> Tensor | None:
        """`numbers` on `device`."""
        return None if self.numbers is None else self.numbers.to(device)


@dataclass(frozen=True, eq=False)
class Subset:
    """The samples of `dataset`, a map-style data set, that have `numbers` (n,), in this order."""

    dataset: Any
    numbers: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.numbers[index])]

    @property
    def classes(self) -> Any:
        """What the data set says of its classes."""
        return self.dataset.classes


def part_of(dataset: Any, numbers: Tensor | None) -> Any:
    """The samples of `dataset` that have `numbers` (n,), None for all: a view, which copies none of them."""
    if not isinstance(dataset, InMemoryDataset):
        assert numbers is not None
        # Another object where a data set is told its epochs: an evaluation has none, and leaves the training's.
        whole = copy(dataset) if hasattr(dataset, "set_epoch") else dataset
        return Subset(whole, numbers.int() if len(whole) < 2**31 else numbers)  # half the memory of 10**7 samples
    part = copy(dataset)
    object.__setattr__(part, "numbers", numbers)
    return part


def whole_of(dataset: Any) -> Any:
    """The data set that a part is of; what is no part as it is."""
    if isinstance(dataset, Subset):
        return dataset.dataset
    return dataset if numbers_of(dataset) is None else part_of(dataset, None)


def numbers_of(dataset: Any) -> Tensor | None:
    """The numbers (n,) that the samples of a part have in the whole data set; None for what is no part."""
    return dataset.numbers if isinstance(dataset, InMemoryDataset | Subset) else None


def require_samples(dataset: Any, name: str, key: str) -> None:
    """Raise ConfigError for a data set without samples. key: its node in the config."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"the {name} is a {type(dataset).__name__} without __len__ and __getitem__, and samples are read by their "
            f"number; type {key}._target_=<module>.<class> of a map-style data set"
        )
    if len(dataset) == 0:
        raise ConfigError(f"the {name} has no samples; check the keys of {key}, or type dataset=<another data set>")


def sample_shape(inputs: Any) -> list[int]:
    """The shape of a sample. inputs: a batch. Raises ConfigError if a sample has several inputs."""
    if isinstance(inputs, Tensor):
        return list(inputs.shape[1:])
    raise ConfigError(
        "the samples have several inputs, and this model has a key for one shape; "
        "type model._target_=<module>.<class> for a model that takes them, or dataset.shape=[<numbers>]"
    )


def check_shape(
    dataset: InMemoryDataset, inputs: object, shape: Sequence[int] | None, key: str = "dataset.shape"
) -> None:
    """Raise ConfigError if the samples have another shape than the config says.

    inputs: some of them as a batch, after the transforms of training. They may have the shape, or those of the data,
    which tests may be about: many nets take images of any size. key: that says `shape`.
    """
    if shape is None or not isinstance(inputs, Tensor):
        return
    real = list(inputs.shape[1:])
    if list(shape) not in (real, list(dataset.samples.shape[1:])):
        configured, right = (",".join(map(str, numbers)) for numbers in (shape, real))
        raise ConfigError(f"{key}=[{configured}] but the samples have the shape [{right}]; type {key}=[{right}]")


def class_names(dataset: object) -> list[str]:
    """The names of the classes, if the data set has an attribute `classes` with them, as torchvision's have.

    Numbers are no names: they may be the targets.
    """
    names: Any = getattr(dataset, "classes", None)
    if isinstance(names, str) or not (isinstance(names, Sized) and isinstance(names, Iterable)):
        return []
    return list(names) if all(isinstance(name, str) for name in names) else []


def require_same_classes(names: Sequence[str], others: Sequence[str], what: str, other: str, advice: str) -> None:
    """Raise ConfigError if a class number of the second data set has another name in the first one, or none there.

    names, others: of the classes of the data sets `what` and `other`, empty if they have none. advice: what to type.
    """
    if not names or list(others) == list(names[: len(others)]):
        return
    number = next((n for n, pair in enumerate(zip(names, others, strict=False)) if pair[0] != pair[1]), len(names))
    first = f"is {names[number]} in {what}" if number < len(names) else f"is none of {what}, which has {number},"
    raise ConfigError(f"class {number} {first} and {others[number]} in {other}; {advice}")


def class_count(dataset: Any, targets: Any, are_values: bool) -> int:
    """How many outputs a model needs: classes, or numbers in a target.

    targets: of some samples.
    are_values: whether whole numbers are values, as in a regression, unless the data set names its classes.
    The data set has an attribute `classes` with their names, or `targets` with all of them, as those of torchvision
    have. Raises ConfigError if it has neither.
    """
    names = getattr(dataset, "classes", None)
    are_values = are_values and not isinstance(names, Sized)
    if isinstance(targets, Tensor) and (are_values or not is_class_numbers(targets)) and targets.dim() <= 2:
        return targets[:1].numel()
    if isinstance(names, Sized):
        return len(names)
    try:
        return int(torch.as_tensor(of_each_sample(whole_of(dataset), "targets")).max()) + 1
    except (TypeError, ValueError, RuntimeError):  # there are none, or they are no numbers, such as names
        raise ConfigError(
            "the data set does not say how many classes it has; type dataset.classes=<how many>, "
            "or give it an attribute `classes` with their names"
        ) from None


def of_each_sample(dataset: Any, name: str) -> Any:
    """What a data set keeps of each of its samples, such as its `targets`, without reading them. None if it does not.

    Of a part of a data set (torch's Subset, too) what the whole one keeps of the samples of the part.
    """
    numbers = numbers_of(dataset)
    if numbers is not None:
        values = of_each_sample(whole_of(dataset), name)
        return None if values is None else torch.as_tensor(values)[numbers]
    if isinstance(dataset, torch.utils.data.Subset):
        values = of_each_sample(dataset.dataset, name)
        return None if values is None else torch.as_tensor(values)[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, torch.utils.data.TensorDataset) and name == "targets":
        return dataset.tensors[-1]
    return getattr(dataset, name, None)


def class_of_each_sample(dataset: Any) -> Tensor | None:
    """(N,) class numbers from 0 on; None if the data set does not keep them, see `of_each_sample`."""
    try:
        numbers = torch.as_tensor(of_each_sample(dataset, "targets")).cpu()
    except (TypeError, ValueError, RuntimeError):
        return None
    is_kept = is_class_numbers(numbers) and len(numbers) == len(dataset) and bool((numbers >= 0).all())
    return numbers.long() if is_kept else None


def balanced_weights(dataset: Any, classes: int, ignored: int | None) -> list[float]:
    """For each class the number of all samples / (classes * the samples of this class), as scikit-learn's
    compute_class_weight("balanced") has it. Where a target is several class numbers, such as a mask's, each counts.

    ignored: the class number that counts nowhere. Raises ConfigError where the data does not keep its targets, and for
    a class without a sample.
    """
    key = "task.class_weights=balanced"
    advice = f"type task.class_weights=[{','.join(['1'] * min(classes, 3))}{',...' if classes > 3 else ''}]"
    try:
        numbers = torch.as_tensor(of_each_sample(dataset, "targets")).flatten()
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0)
    if not _is_whole(numbers):
        raise ConfigError(
            f"{key} counts the classes of the training data, and {type(dataset).__name__} does not keep them; give it "
            f"an attribute `targets` with the class of each sample, or {advice} with a weight for each class"
        )
    numbers = numbers.long()
    counts = numbers[(numbers >= 0) & (numbers < classes) & (numbers != ignored)].bincount(minlength=classes)
    for missing in (counts == 0).nonzero().flatten().tolist()[:1]:
        raise ConfigError(
            f"{key} has no weight for class {missing}, of which the training data has no sample; {advice} with a "
            f"weight for each class"
        )
    weights: list[float] = (counts.sum().double() / (classes * counts)).tolist()
    return weights


def weight_of_each_sample(dataset: Any, sampling: Literal["balanced", "weights"]) -> Tensor:
    """(N,) float64: how likely each training sample is to be drawn. Raises ConfigError where the data does not say it.

    sampling: balanced makes all classes equally likely; weights takes the data set's attribute `sample_weights`.
    """
    key, kind = f"dataset.sampling={sampling}", type(dataset).__name__
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"{key} draws samples by their numbers, and the training data is an IterableDataset, {kind}, which is read "
            f"from its beginning to its end; type dataset.sampling=null"
        )
    if sampling == "balanced":
        classes = class_of_each_sample(dataset)
        if classes is None:
            raise ConfigError(
                f"{key} needs the class of each training sample, and {kind} does not keep them; give it an attribute "
                f"`targets` with a whole number from 0 on for each sample, or type dataset.sampling=null"
            )
        return 1 / classes.bincount()[classes].double()
    try:
        weights = torch.as_tensor(of_each_sample(dataset, "sample_weights"), dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        weights = torch.empty(0)
    is_fine = weights.shape == (len(dataset),) and bool(weights.isfinite().all()) and bool((weights >= 0).all())
    if not is_fine or not weights.any():
        raise ConfigError(
            f"{key} needs a weight for each training sample, and {kind} has no attribute `sample_weights` with "
            f"{len(dataset)} numbers of 0 or more, some of them above 0; give it one, or type dataset.sampling=balanced"
        )
    return weights


def is_class_numbers(targets: Any) -> bool:
    """Whether targets are one whole number for each sample."""
    return _is_whole(targets) and targets.dim() == 1


def _is_whole(targets: Any) -> bool:
    """Whether targets are a tensor of whole numbers."""
    return isinstance(targets, Tensor) and not targets.is_floating_point() and targets.dtype != torch.bool


@dataclass(frozen=True)
class Labels:
    """What the targets of a task may be.

    name: of the data set, for messages.
    classes: class numbers are below it; None: any are.
    is_signed: whether negative numbers may mean something to the task.
    are_probabilities: whether targets of several values a sample must be probabilities.
    are_flags: whether targets must lie between 0 and 1, as the labels of a multi-label task.
    are_dense: whether a target is a class number for each of several places, such as the pixels of a mask.
    ignored: the number that counts nowhere; None: none does, and a task that counts samples would count -100.
    one_each: whether the task counts samples, so that there must be a target for each.
    """

    name: str
    classes: int | None
    is_signed: bool = False
    are_probabilities: bool = False
    are_flags: bool = False
    are_dense: bool = False
    ignored: int | None = IGNORED
    one_each: bool = False

    def check(self, numbers: Sequence[int], targets: Any) -> None:
        """Raise ConfigError for the first target that is not allowed. numbers: of their samples."""
        rows = [len(tensor) for tensor in tensors_in(targets) if tensor.dim()] or [1]
        for count in [count for count in rows if count != len(numbers)][: int(self.one_each)]:
            advice = "return None from __getitem__ for samples to leave out and type dataset.on_error=skip"
            if count > len(numbers):
                advice = "type task._target_=<module>.<such a task>"
            raise ConfigError(
                f"dataset.collate_fn makes {count} targets of {len(numbers)} samples of the {self.name}, and a step "
                f"takes the mean over all of them; write a task whose count says what it counts, or {advice}"
            )
        if self.are_flags and isinstance(targets, Tensor) and targets.dim() > 1:
            for row in (~((targets >= 0) & (targets <= 1))).flatten(1).any(1).nonzero().flatten().tolist()[:1]:
                raise ConfigError(
                    f"sample {numbers[row]} of the {self.name} has the target {_in_words(targets[row].flatten())}, and "
                    f"the labels of a sample are 0 or 1; type task=regression, or its target as 0s and 1s"
                )
        elif is_class_numbers(targets) or (self.are_dense and _is_whole(targets)):
            self._check_numbers(numbers, targets)
        elif self.are_probabilities and isinstance(targets, Tensor) and targets.is_floating_point():
            self._check_probabilities(numbers, targets)

    def _check_numbers(self, numbers: Sequence[int], targets: Tensor) -> None:
        targets = targets.long()  # the number of classes, and -100, may be more than a small type holds
        if self.ignored is None:
            for row in (targets == IGNORED).nonzero().flatten().tolist()[:1]:
                raise ConfigError(
                    f"sample {numbers[row]} of the {self.name} has the target {IGNORED}, and a classification counts "
                    f"every sample; leave that sample out, or type task._target_=<module>.<a task whose count does>"
                )
        if self.classes is None:
            return
        wrong = targets >= self.classes
        if not self.is_signed:
            wrong |= targets < 0
        wrong &= targets != (IGNORED if self.ignored is None else self.ignored)
        for row, *place in wrong.nonzero().tolist()[:1]:
            label = int(targets[(row, *place)])
            advice = f"dataset.classes={label + 1}" if label >= 0 else f"its target as 0 to {self.classes - 1}"
            where = f" at {place}" if place else ""
            raise ConfigError(
                f"sample {numbers[row]} of the {self.name} has the target {label}{where}, and the classes are "
                f"0 to {self.classes - 1}; type {advice}"
            )

    def check_masks(self, targets: Any) -> None:
        """Raise ConfigError if the masks of some samples together hold only class 0 and the ignored label.

        Binary masks of 0 and 255 do: with 255 ignored, a net that says 0 everywhere would be right everywhere.
        """
        if not _is_whole(targets) or self.ignored is None or (self.classes or 0) < 2:
            return
        if sorted({0, self.ignored}) == targets.unique().tolist():
            raise ConfigError(
                f"the masks of the first {len(targets)} samples of the {self.name} hold only 0 and {self.ignored}, "
                f"which is task.ignored_label and counts nowhere; return masks with the classes 0 to "
                f"{(self.classes or 0) - 1} from __getitem__, or type task.ignored_label={IGNORED} for other masks"
            )

    def _check_probabilities(self, numbers: Sequence[int], targets: Tensor) -> None:
        if targets.dim() != 2:
            return  # the task says what it takes
        wrong = (targets < 0).any(1) | ~((targets.sum(1) - 1).abs() < TOLERANCE)
        for row in wrong.nonzero().flatten().tolist()[:1]:
            raise ConfigError(
                f"sample {numbers[row]} of the {self.name} has the target {_in_words(targets[row])}, which are no "
                f"probabilities of classes; type task=regression, or task=multi_label for labels of 0 and 1"
            )


def _in_words(values: Tensor) -> str:
    """ "[0.5, 1, 0, 2, ...]": the first values of (N,)."""
    shown = ", ".join(f"{value:g}" for value in values[:4].tolist())
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"
