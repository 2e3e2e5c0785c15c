"""Files of weights that other programs wrote, as what a net begins with."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18

from lockstep.errors import ConfigError
from lockstep.snapshots.initial_weights import load_initial_weights


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_torchvisions_weights_come_in_with_a_new_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    pretrained, net = resnet18(num_classes=20), resnet18(num_classes=7)
    pretrained.bn1.running_mean += 3
    path = tmp_path / f"weights.{kind}"
    if kind == "pt":
        torch.save(pretrained.state_dict(), path)
    else:
        save_file(pretrained.state_dict(), path)
    head = net.fc.weight.clone()
    with pytest.raises(
        ConfigError, match=r"size mismatch for fc.bias: .*\[20\].*\[7\].*type .?parameters.new_layers=\[<the layers"
    ):
        load_initial_weights(net, str(path), [])
    with caplog.at_level(logging.INFO):
        load_initial_weights(net, str(path), ["fc"])
    expected = pretrained.state_dict()
    for name, value in net.state_dict().items():
        if name not in ("fc.weight", "fc.bias"):
            assert torch.equal(value, expected[name]), name
    assert torch.equal(net.fc.weight, head)
    assert f"init: {len(expected) - 2} of {len(expected)} tensors" in caplog.text
    assert "init: keep their first values: fc.bias, fc.weight" in caplog.text


def test_a_safetensors_file_without_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    path.touch()
    monkeypatch.setattr("lockstep.snapshots.files.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^parameters.init=.* needs safetensors; type pip install safetensors$"):
        load_initial_weights(resnet18(), str(path), [])
