"""Nets with their preprocessing, as files of torch.export."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.loader import InputConverter
from lockstep.errors import ConfigError
from lockstep.models.gpt import gpt
from lockstep.modes.export import net_as
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


class Branches(nn.Linear):
    def forward(self, samples: Tensor) -> Tensor:
        scores = super().forward(samples)
        return scores if scores.sum().item() > 0 else -scores  # what it does depends on the values


def test_a_net_that_cannot_be_exported_gets_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    said = r"^torch cannot export this net \(.*, at .*test_exported_programs.py:\d+\); type mode.format=state_dict, or"
    with pytest.raises(ConfigError, match=said):
        exported(Branches(12, 2), torch.rand(5, 12))
    assert len("".join(capfd.readouterr())) < 200
