"""Nets with their preprocessing, as files of torch.export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.loader import Converter
from lockstep.errors import ConfigError
from lockstep.models.gpt import gpt
from lockstep.modes.export import write_net
from lockstep.modes.trained_net import TrainedNet


def write(net: nn.Module, samples: Tensor, path: Path) -> TrainedNet:
    trained = TrainedNet(net, Converter(torch.device("cpu")), "fp32", [])
    with torch.no_grad():
        write_net(trained, samples, path, "torch_export")
    return trained


def test_an_exported_text_model_takes_any_number_of_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = gpt(shape=[12], classes=7, layers=1, heads=2, width=8, dropout=0.0, tied=False, variant="gpt2")
    tokens = torch.randint(0, 7, (5, 12))
    trained = write(net, tokens, tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2").module()
    for rows, length in ((1, 12), (3, 5), (2, 1)):
        torch.testing.assert_close(program(tokens[:rows, :length]), trained(tokens[:rows, :length]))


class OneLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.layer(tokens.float())
        return scores


def test_a_net_of_one_length_is_exported_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    write(OneLength(), torch.randint(0, 7, (5, 12)), tmp_path / "net.pt2")
    assert "the file takes samples of 12 tokens, and no fewer" in caplog.text


class Branches(OneLength):
    def forward(self, samples: Tensor) -> Tensor:
        scores: Tensor = self.layer(samples)
        return scores if scores.sum().item() > 0 else -scores  # what it does depends on the values


def test_a_net_that_cannot_be_exported_gets_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = r"^torch cannot export this net \(.*, at .*test_exported_programs.py:\d+\); type mode.format=state_dict, or"
    with pytest.raises(ConfigError, match=said):
        write(Branches(), torch.rand(5, 12), tmp_path / "net.pt2")
    assert len("".join(capfd.readouterr())) < 200
