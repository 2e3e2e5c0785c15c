"""`lockstep.load`: a trained net from its run folder, without the command line and without a process group."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from lockstep.config.schema import nodes_with_target
from lockstep.config.targets import instantiate_as, is_open, locate
from lockstep.data.loader import Converter
from lockstep.errors import ConfigError
from lockstep.modes.base import TrainedRun, folder_of, recorded_classes
from lockstep.modes.trained_net import TrainedNet
from lockstep.runs.record import read_run
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.resume import PYTHON, load_first_good, snapshots_to_try
from lockstep.snapshots.state import trained_weights
from lockstep.training.setup import model_dtype, model_memory_format

log = logging.getLogger(__name__)


def load(run: str | Path, which: str, device: str | torch.device, model: nn.Module | None) -> TrainedNet:
    """See `lockstep.load`."""
    found = load_first_good(snapshots_to_try(str(run), which, "load", PYTHON), PYTHON)
    assert found is not None  # `snapshots_to_try` gave one at least
    saved, path = found
    config = saved["config"]
    net = build_model(config) if model is None else model
    precision, memory_format = config["trainer.precision"], model_memory_format(net, config["trainer.channels_last"])
    net = net.to(device, model_dtype(precision))  # before the weights come: float64 would lose digits
    if memory_format == torch.channels_last:
        net = net.to(memory_format=torch.channels_last)
    weights = trained_weights(saved, averaged=config["trainer.ema"] is not None)
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:  # of a model of the user's
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} does not fit this model ({reason}); type model=<the net that was trained>") from None
    mean, std = config.get("dataset.mean"), config.get("dataset.std")
    converter = Converter(torch.device(device), model_dtype(precision), memory_format, mean, std)
    trained = TrainedNet(net, converter, precision, recorded_classes(folder_of(path)))
    trained.mean, trained.std, trained.task = mean, std, str(config.get("task._target_"))
    return trained


def warn_of_changed_data(trained: TrainedRun, config: Mapping[str, Any]) -> None:
    """Warn if the data has changed since the training, although `config`, a flat one, names the same data."""
    named = [
        {key: value for key, value in each.items() if key.startswith("dataset.")}
        for each in (trained.saved["config"], config)
    ]
    recorded: dict[str, Any] = {}
    with suppress(ConfigError):
        recorded = read_run(trained.folder)["data"]
    if named[0] != named[1]:
        return
    for name, loader in (("training_data", trained.train_loader), ("test_data", trained.eval_loader)):
        now = data_fingerprint(loader.dataset)
        if recorded.get(name, now) != now:
            what = name.replace("_", " ")
            log.warning("the %s is not that of the training: it was %s, and is %s", what, recorded[name], now)


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a flat config. Raises ConfigError for a class that a run's record may not name."""
    nested = OmegaConf.create({})
    for key, value in config.items():
        if key.startswith("model."):
            OmegaConf.update(nested, key, value)
    for key, node in nodes_with_target(OmegaConf.to_container(nested.model), "model"):
        if not is_open(node["_target_"]):
            raise ConfigError(
                f"{key}._target_={node['_target_']} may run anything, and the record of a run may be a stranger's; "
                f"if you trust it, type lockstep.load(..., model=<your net, built by yourself>)"
            )
        locate(f"{key}._target_", node["_target_"], "model")
    return instantiate_as(nn.Module, nested.model, "model")
