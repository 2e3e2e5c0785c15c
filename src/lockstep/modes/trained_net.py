"""A trained net together with its preprocessing."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.data.dataset import map_tensors
from lockstep.data.loader import Converter
from lockstep.errors import ConfigError
from lockstep.training.setup import AUTOCAST_TYPES, autocast


class TrainedNet(nn.Module):
    """Raw samples (N, ...) -> the outputs that an evaluation computes: uint8 images, or floats, not normalised yet.

    net: the net itself. classes: their names, empty if they have none. precision: as trainer.precision.
    mean, std: attributes, by which samples are normalised; None where they are not. task: an attribute, the name of the
    class of the task that it was trained for.
    """

    def __init__(self, net: nn.Module, converter: Converter, precision: str, classes: Sequence[str]) -> None:
        super().__init__()
        self.net, self.converter, self.precision, self.classes = net, converter, precision, list(classes)
        self.mean: list[float] | None = None
        self.std: list[float] | None = None
        self.task = ""
        self.eval()

    def forward(self, samples: Any) -> Any:
        moved = map_tensors(lambda tensor: tensor.to(self.converter.device), samples)
        inputs, _ = self.converter(moved, ())
        with autocast(self.converter.device, self.precision) if self.precision in AUTOCAST_TYPES else nullcontext():
            return self.net(inputs)

    def predict(self, samples: Any) -> list[str | int]:
        """The class of each sample: its name, or its number if classes have no names.

        Raises ConfigError for a net that was trained for another of this project's tasks than classification.
        """
        if self.task.startswith("lockstep.tasks.") and not self.task.startswith("lockstep.tasks.classification"):
            name = self.task.split(".")[2]
            raise ConfigError(f"predict gives classes, and this net was trained for {name}; type net(samples)")
        with torch.no_grad():
            numbers = self(samples).argmax(1).tolist()
        return [self.classes[number] if self.classes else number for number in numbers]
