"""What a loaded net takes, without a run."""

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.data.loader import InputConverter
from lockstep.errors import ConfigError
from lockstep.modes.trained_net import TrainedNet


def test_a_net_takes_arrays_and_lists_and_computes_where_it_was_moved() -> None:
    torch.manual_seed(0)
    mean, std = [0.25], [0.5]
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    net = TrainedNet(layers, InputConverter(torch.float32, mean=mean, std=std), "bf16", ["a", "b", "c"], mean, std)
    images = torch.randint(0, 256, (5, 1, 2, 2), dtype=torch.uint8)
    classes = net.predict(images)
    assert net.predict(images.numpy()) == net.predict(list(images)) == net.predict(list(images.numpy())) == classes
    flipped, swapped = images.numpy()[:, :, ::-1], (images.numpy() / np.float32(255)).astype(">f4")
    assert net.predict(flipped) == net.predict(list(flipped)) == net.predict(images.flip(2))
    assert net.predict(swapped) == classes
    exact = (images.double() / 255 - 0.25) / 0.5
    weight, bias = layers[1].weight.double(), layers[1].bias.double()
    torch.testing.assert_close(net.double()(images), exact.flatten(1) @ weight.T + bias)
    assert net(images).dtype == torch.float64
    assert net.half()(images).dtype == torch.float16
    assert isinstance(net(np.zeros((2, 1, 2, 2), dtype=np.uint8)), torch.Tensor)


def test_predict_needs_scores() -> None:
    class Heads(nn.Module):
        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"digit": inputs}

    net = TrainedNet(Heads(), InputConverter(torch.float32), "fp32", [])
    with pytest.raises(ConfigError, match=r"returns a dict; type net\(samples\)"):
        net.predict(torch.zeros(2, 3))
