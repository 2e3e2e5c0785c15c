"""Nets with their preprocessing, as files of torch.export."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.loader import InputConverter
from lockstep.models.gpt import gpt
from lockstep.modes.export import net_as, require_same_outputs
from lockstep.modes.trained_net import TrainedNet


def exported(net: nn.Module, samples: Tensor) -> tuple[Any, TrainedNet]:
    trained = TrainedNet(net, InputConverter(torch.float32), "fp32", [])
    return torch.export.load(io.BytesIO(net_as(trained, samples, "torch_export"))).module(), trained


def test_an_exported_text_model_takes_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    net = gpt(shape=[12], classes=7, layers=1, heads=2, width=8, dropout=0.0, tied=False, variant="gpt2")
    tokens = torch.randint(0, 7, (5, 12))
    program, trained = exported(net, tokens)
    for rows, length in ((1, 12), (3, 5), (2, 1)):
        torch.testing.assert_close(program(tokens[:rows, :length]), trained(tokens[:rows, :length]))


def test_one_sample_is_example_enough() -> None:
    samples, net = torch.randint(0, 256, (1, 1, 2, 2), dtype=torch.uint8), nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    program, trained = exported(net, samples)
    torch.testing.assert_close(program(samples.expand(7, 1, 2, 2)), trained(samples.expand(7, 1, 2, 2)))


def test_outputs_with_nan_are_the_same_as_outputs_with_nan() -> None:
    ours = torch.tensor([1.0, torch.nan, torch.inf])
    require_same_outputs(ours, ours.clone(), "onnx")
    heads = {"left": torch.zeros(2), "right": (torch.ones(3), torch.empty(0))}
    require_same_outputs(heads, [torch.zeros(2), torch.ones(3), torch.empty(0)], "onnx")
    others = [ours.clone().index_fill_(0, torch.tensor(place), value) for place, value in ((0, 1.1), (0, torch.nan))]
    for one, other in [(heads, [torch.zeros(2), torch.ones(3)]), *((ours, other) for other in others)]:
        with pytest.raises(AssertionError, match="other outputs|length of the sequences"):
            require_same_outputs(one, other, "onnx")
