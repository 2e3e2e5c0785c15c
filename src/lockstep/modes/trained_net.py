"""A trained net together with its preprocessing, and `lockstep.load`: without a command line or a process group."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import default_collate, default_convert

from lockstep.config.check import Kind, check_nodes, instantiate_as
from lockstep.data.loader import InputConverter
from lockstep.data.source import map_tensors
from lockstep.modes.base import recorded
from lockstep.snapshots.files import load_first_good, snapshots_to_try
from lockstep.snapshots.state import load_weights, trained_weights
from lockstep.strategies.base import autocast, model_dtype
from lockstep.tasks.base import Task
from lockstep.tasks.tasks import CrossEntropy
from lockstep.training.setup import cast, model_memory_format


class TrainedNet(nn.Module):
    """Raw samples (N, ...) -> the outputs that an evaluation computes: uint8 images, or floats, not normalised yet.

    net: the net itself.
    precision: as trainer.precision.
    classes: their names, empty if they have none.
    task: makes the task that it was trained for.
    """

    def __init__(
        self,
        net: nn.Module,
        converter: InputConverter,
        precision: str,
        classes: Sequence[str] = (),
        task: Callable[[], Task] = CrossEntropy,
    ) -> None:
        super().__init__()
        self.net, self.converter, self.precision, self.classes = net, converter, precision, list(classes)
        self.task = task
        self.eval()

    def forward(self, samples: Any) -> Any:
        """samples: also an array of NumPy, or a list of samples of one shape."""
        if isinstance(samples, list):
            samples = default_collate(samples)
        device = self.converter.scale.device
        inputs = self.converter(map_tensors(lambda tensor: tensor.to(device), default_convert(samples)))
        with autocast(device, self.precision):
            return self.net(inputs)

    @torch.no_grad()
    def predict(self, samples: Any) -> list[Any]:
        """The prediction of the task for each sample; of a class its name, if classes have names."""
        found = self.task().predictions(self(samples))["prediction"]
        if self.classes and found.dim() == 1 and not found.is_floating_point():
            return [self.classes[number] for number in found.tolist()]
        return found.tolist()


def load(
    run: str | Path, which: str = "last", device: str | torch.device = "cpu", model: nn.Module | None = None
) -> TrainedNet:
    """The net of a trained run, in evaluation mode, with its preprocessing: raw samples in, outputs out.
    run: a run folder or a snapshot. which: "last", "best" or a snapshot's file. device: where the net computes.
    model: takes the weights, in the place of what the run's config makes. Raises ConfigError if there is no such
    run."""
    saved, path = load_first_good(snapshots_to_try(str(run), which, "load"))
    config, precision = saved["config"], saved["config"]["trainer.precision"]
    net = built(nn.Module, config, "model") if model is None else model
    memory_format = model_memory_format(net, config["trainer.channels_last"], torch.device(device))
    cast(net, precision)  # before the weights come: float64 would lose digits
    net = net.to(device).to(memory_format=memory_format)
    load_weights(net, trained_weights(saved, path), saved["buffers"])
    normalised = config.get("dataset.mean"), config.get("dataset.std")
    converter = InputConverter(model_dtype(precision), memory_format, *normalised).to(device)
    classes, task = recorded(path).get("classes", ()), partial(built, Task, config, "task")
    return TrainedNet(net, converter, precision, classes, task)


def built(kind: type[Kind], config: Mapping[str, Any], section: str) -> Kind:
    """The object that a section of a flat config describes. Raises ConfigError for a class that cannot be imported, or
    takes other arguments."""
    nested = OmegaConf.create({})
    for key, value in config.items():
        if key.startswith(f"{section}."):
            OmegaConf.update(nested, key, value)
    node: Any = OmegaConf.to_container(nested[section])
    check_nodes(node, section)
    return instantiate_as(kind, node, section)
