"""What a loaded net takes, without a run."""

import numpy as np
import torch
from torch import nn

from lockstep.data.loader import InputConverter
from lockstep.modes.trained_net import TrainedNet
from lockstep.tasks.tasks import MultiLabel, Regression


def test_a_net_takes_arrays_and_lists() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    net = TrainedNet(layers, InputConverter(torch.float32, mean=[0.25], std=[0.5]), "bf16", ["a", "b", "c"])
    images = torch.randint(0, 256, (5, 1, 2, 2), dtype=torch.uint8)
    classes = net.predict(images)
    assert net.predict(images.numpy()) == net.predict(list(images)) == net.predict(list(images.numpy())) == classes
    assert isinstance(net(np.zeros((2, 1, 2, 2), dtype=np.uint8)), torch.Tensor)


def test_a_net_predicts_what_its_task_says() -> None:
    values = torch.tensor([[1.5], [-2.0]])
    converter = InputConverter(torch.float32)
    assert TrainedNet(nn.Identity(), converter, "fp32", task=Regression).predict(values) == values.tolist()
    labels = TrainedNet(nn.Identity(), converter, "fp32", ["a", "b"], task=MultiLabel).predict(torch.eye(2) - 0.5)
    assert labels == [[1, 0], [0, 1]]
