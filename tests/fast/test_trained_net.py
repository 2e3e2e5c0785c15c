"""What a loaded net takes, without a run."""

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.data.loader import InputConverter
from lockstep.errors import ConfigError
from lockstep.modes.trained_net import TrainedNet


def test_a_net_takes_arrays_and_lists() -> None:
    torch.manual_seed(0)
    mean, std = [0.25], [0.5]
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    net = TrainedNet(layers, InputConverter(torch.float32, mean=mean, std=std), "bf16", ["a", "b", "c"], mean, std)
    images = torch.randint(0, 256, (5, 1, 2, 2), dtype=torch.uint8)
    classes = net.predict(images)
    assert net.predict(images.numpy()) == net.predict(list(images)) == net.predict(list(images.numpy())) == classes
    assert isinstance(net(np.zeros((2, 1, 2, 2), dtype=np.uint8)), torch.Tensor)


def test_predict_needs_scores() -> None:
    class Heads(nn.Module):
        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"digit": inputs}

    net = TrainedNet(Heads(), InputConverter(torch.float32), "fp32", [])
    with pytest.raises(ConfigError, match=r"returns a dict; type net\(samples\)"):
        net.predict(torch.zeros(2, 3))
