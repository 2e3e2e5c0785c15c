"""Raw samples and targets as a model and its task take them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.nested import map_tensors
from lockstep.errors import ConfigError


class Converter:
    """Brings raw samples and targets to the device, type and memory layout that a model computes in.

    uint8 samples are scaled to 0..1. With `mean` or `std`, one number for each channel (the second dimension) or one
    for all, samples are normalised. Integer samples of another type stay as they are. Targets that are whole numbers
    become int64, others take the model's type.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        self.device, self.dtype, self.memory_format = device, dtype, memory_format
        deviation = self._per_channel([1.0] if std is None else std)
        self.float_scale, self.image_scale = 1 / deviation, 1 / (255 * deviation)
        self.normalises = mean is not None or std is not None
        self.shift = None if mean is None else -self._per_channel(mean) / deviation

    def _per_channel(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(list(values), dtype=self.dtype, device=self.device)

    def to_device(self, value: Any) -> Any:
        """The tensors in `value` on the device. A GPU copies from pinned memory while the host goes on."""
        return map_tensors(self._to_device, value)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Raw inputs and targets, on the device, (N, ...) or tuples or dicts of such -> what model and task take."""
        if isinstance(inputs, Tensor):
            return self._input(inputs, normalised=True), map_tensors(self._target, targets)
        # Among several inputs only images are known to have channels.
        converted = map_tensors(lambda tensor: self._input(tensor, normalised=tensor.dim() == 4), inputs)
        return converted, map_tensors(self._target, targets)

    def _input(self, samples: Tensor, normalised: bool) -> Tensor:
        if samples.dtype == torch.uint8:
            samples = samples.to(self.dtype)
            samples = self._shifted(samples.mul_(_beside(self.image_scale, samples))) if normalised else samples / 255
        elif samples.is_floating_point():
            samples = samples.to(self.dtype)
            if self.normalises and normalised:
                samples = self._shifted(samples * _beside(self.float_scale, samples))
        if samples.dim() == 4:
            samples = samples.contiguous(memory_format=self.memory_format)
        return samples

    def _target(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or targets.dtype == torch.bool:
            return targets.to(self.dtype)
        return targets.long()

    def _shifted(self, scaled: Tensor) -> Tensor:
        return scaled if self.shift is None else scaled.add_(_beside(self.shift, scaled))


def require_channels(inputs: Any, **options: Sequence[float] | None) -> None:
    """Raise ConfigError if `mean` or `std` has another number of values than samples have channels.

    inputs: a batch of raw ones. Several inputs, and whole numbers that are no images, are not normalised.
    """
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        return
    if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        return
    for name, values in options.items():
        if values is not None and len(values) not in (1, inputs.shape[1]):
            raise ConfigError(
                f"dataset.{name} has {len(values)} numbers, and the samples have the shape {list(inputs.shape[1:])}; "
                f"type dataset.{name}=[0.5] or dataset.{name}=null"
            )


def _beside(values: Tensor, samples: Tensor) -> Tensor:
    """One number per channel (C,), shaped so that it broadcasts over samples (N, C, ...)."""
    return values.view(-1, *[1] * (samples.dim() - 2))
