"""A trained net together with its preprocessing, and `lockstep.load`: without a command line or a process group."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from typing import cast as typed

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lockstep.config.nodes import check_nodes, instantiate, instantiate_as
from lockstep.config.schema import Node
from lockstep.data.loader import InputConverter
from lockstep.data.source import map_tensors
from lockstep.errors import ConfigError
from lockstep.modes.base import folder_of, recorded_classes
from lockstep.snapshots.resume import PYTHON, load_first_good, snapshots_to_try
from lockstep.snapshots.state import trained_weights, with_buffers
from lockstep.strategies.base import AUTOCAST_TYPES, autocast, model_dtype
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
        self.weights = self._place_and_type()
        self.eval()

    def _place_and_type(self) -> tuple[torch.device, torch.dtype] | None:
        floating = (parameter for parameter in self.net.parameters() if parameter.is_floating_point())
        first = next(floating, None)
        return None if first is None else (first.device, first.dtype)

    def forward(self, samples: Any) -> Any:
        """samples: also an array of NumPy, or a list of samples of one shape."""
        now = self._place_and_type()
        if now is not None and now != self.weights:  # after net.to(), net.double() or net.half()
            dtype = self.converter.dtype
            if self.weights is None or now[1] != self.weights[1]:
                self.precision, dtype = "", now[1]  # that type is what was asked for
            self.weights = now
            self.converter = InputConverter(dtype, self.converter.memory_format, self.mean, self.std).to(now[0])
        if isinstance(samples, list):
            samples = torch.stack([_as_tensor(sample) for sample in samples])
        elif isinstance(samples, np.ndarray):
            samples = _as_tensor(samples)
        device = self.converter.scale.device
        inputs = self.converter(map_tensors(lambda tensor: tensor.to(device), samples))
        with autocast(device, self.precision) if self.precision in AUTOCAST_TYPES else nullcontext():
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
            found = f"{list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise ConfigError(f"predict needs scores (N, classes), and this net returns {found}; type net(samples)")
        numbers = outputs.argmax(1).tolist()
        return [self.classes[number] if self.classes else number for number in numbers]


def _as_tensor(sample: Any) -> Tensor:
    """Also of an array that is flipped, or of another byte order, which torch does not read."""
    if isinstance(sample, np.ndarray):
        sample = np.ascontiguousarray(sample, sample.dtype.newbyteorder("="))
    return torch.as_tensor(sample)


def load(
    run: str | Path,
    which: str = "last",
    device: str | torch.device = "cpu",
    model: nn.Module | Callable[..., nn.Module] | None = None,
) -> TrainedNet:
    """The net of a trained run, in evaluation mode, with its preprocessing: raw samples in, outputs out.

    run: a run folder or a snapshot. which: "last", "best" or a snapshot's file. device: where the net computes.
    model: in the place of the class that the run names: what is called with its arguments, or a net for the weights.

    Raises ConfigError if there is no such run.
    """
    found = load_first_good(snapshots_to_try(str(run), which, "load", PYTHON), PYTHON)
    assert found is not None  # `snapshots_to_try` gave one at least
    saved, path = found
    config = saved["config"]
    net = model if isinstance(model, nn.Module) else build_model(config, model)
    channels_last = config["trainer.channels_last"] and "auto"  # a GPU may have trained what a CPU must not
    precision, memory_format = (
        config["trainer.precision"],
        model_memory_format(net, channels_last, torch.device(device)),
    )
    cast(net, precision)  # before the weights come: float64 would lose digits
    net = net.to(device)
    if memory_format == torch.channels_last:
        net = net.to(memory_format=torch.channels_last)
    weights = trained_weights(saved, averaged=True)
    weights = with_buffers(net, weights, saved["buffers"])
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:  # of a model of the user's
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} does not fit this model ({reason}); type model=<the net that was trained>") from None
    mean, std = config.get("dataset.mean"), config.get("dataset.std")
    converter = InputConverter(model_dtype(precision), memory_format, mean, std).to(device)
    classes, task = recorded_classes(folder_of(path)), str(config.get("task._target_"))
    return TrainedNet(net, converter, precision, classes, mean, std, task)


def build_model(config: Mapping[str, Any], make: Callable[..., nn.Module] | None) -> nn.Module:
    """The model of a flat config. make: what is called in the place of the class that the run was trained with, with
    the same arguments. Raises ConfigError for a class that cannot be imported, or that takes other arguments."""
    nested = OmegaConf.create({})
    for key, value in config.items():
        if key.startswith("model."):
            OmegaConf.update(nested, key, value)
    node = typed(Node, OmegaConf.to_container(nested.model))
    if make is None:
        check_nodes(node, "model")
        return instantiate_as(nn.Module, node, "model")
    arguments = {name: value for name, value in node.items() if not name.startswith("_")}
    return make(
        **{name: instantiate(value) if "_target_" in str(value) else value for name, value in arguments.items()}
    )
