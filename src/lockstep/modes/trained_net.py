"""A trained net together with its preprocessing, and `lockstep.load`: without a command line or a process group."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lockstep.config.nodes import check_nodes, instantiate_as
from lockstep.data.loader import InputConverter
from lockstep.data.source import map_tensors
from lockstep.errors import ConfigError
from lockstep.modes.base import folder_of, recorded_classes
from lockstep.snapshots.find import PYTHON, load_first_good, snapshots_to_try
from lockstep.snapshots.state import give_buffers, trained_weights
from lockstep.strategies.base import autocast, model_dtype
from lockstep.training.setup import cast, model_memory_format


class TrainedNet(nn.Module):
    """Raw samples (N, ...) -> the outputs that an evaluation computes: uint8 images, or floats, not normalised yet.

    net: the net itself.
    precision: as trainer.precision.
    classes: their names, empty if they have none.
    mean, std: by which samples are normalised; None where they are not.
    task: the name of the class of the task that it was trained for.
    """

    def __init__(
        self,
        net: nn.Module,
        converter: InputConverter,
        precision: str,
        classes: Sequence[str],
        mean: list[float] | None = None,
        std: list[float] | None = None,
        task: str = "",
    ) -> None:
        super().__init__()
        self.net, self.converter, self.precision, self.classes = net, converter, precision, list(classes)
        self.mean, self.std, self.task = mean, std, task
        self.eval()

    def forward(self, samples: Any) -> Any:
        """samples: also an array of NumPy, or a list of samples of one shape."""
        if isinstance(samples, list):
            samples = torch.stack([torch.as_tensor(sample) for sample in samples])
        elif isinstance(samples, np.ndarray):
            samples = torch.as_tensor(samples)
        device = self.converter.scale.device
        inputs = self.converter(map_tensors(lambda tensor: tensor.to(device), samples))
        with autocast(device, self.precision):
            return self.net(inputs)

    def predict(self, samples: Any) -> list[str | int]:
        """The class of each sample: its name, or its number if classes have no names.

        Raises ConfigError for a net that was trained for another of this project's tasks than classification, or that
        returns something else than scores.
        """
        name = self.task.rpartition(".")[2]
        if self.task.startswith("lockstep.tasks.") and name != "CrossEntropy":
            raise ConfigError(f"predict gives classes, and this net was trained for {name}; type net(samples)")
        with torch.no_grad():
            outputs = self(samples)
        if not isinstance(outputs, Tensor) or outputs.dim() != 2:
            found = list(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise ConfigError(f"predict needs scores (N, classes), and this net returns {found}; type net(samples)")
        numbers = outputs.argmax(1).tolist()
        return [self.classes[number] if self.classes else number for number in numbers]


def load(
    run: str | Path, which: str = "last", device: str | torch.device = "cpu", model: nn.Module | None = None
) -> TrainedNet:
    """The net of a trained run, in evaluation mode, with its preprocessing: raw samples in, outputs out.

    run: a run folder or a snapshot. which: "last", "best" or a snapshot's file. device: where the net computes.
    model: takes the weights, in the place of what the run's config makes. Raises ConfigError if there is no such run.
    """
    saved, path = load_first_good(snapshots_to_try(str(run), which, "load", PYTHON), "which")
    config, precision = saved["config"], saved["config"]["trainer.precision"]
    net = build_model(config) if model is None else model
    channels_last = config["trainer.channels_last"] and "auto"  # a GPU may have trained what a CPU must not
    memory_format = model_memory_format(net, channels_last, torch.device(device))
    cast(net, precision)  # before the weights come: float64 would lose digits
    net = net.to(device)
    if memory_format == torch.channels_last:
        net = net.to(memory_format=torch.channels_last)
    weights = trained_weights(saved, path, averaged=True)
    give_buffers(net, weights, saved["buffers"])
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:  # of a model of the user's
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} does not fit this model ({reason}); type model=<the net that was trained>") from None
    mean, std = config.get("dataset.mean"), config.get("dataset.std")
    converter = InputConverter(model_dtype(precision), memory_format, mean, std).to(device)
    classes, task = recorded_classes(folder_of(path)), str(config.get("task._target_"))
    return TrainedNet(net, converter, precision, classes, mean, std, task)


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a flat config. Raises ConfigError for a class that cannot be imported, or takes other arguments."""
    nested = OmegaConf.create({})
    for key, value in config.items():
        if key.startswith("model."):
            OmegaConf.update(nested, key, value)
    node: Any = OmegaConf.to_container(nested.model)
    check_nodes(node, "model")
    return instantiate_as(nn.Module, node, "model")
