"""Files of weights that other programs wrote, as what a net begins with."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18

from lockstep.errors import ConfigError
from lockstep.snapshots.initial_weights import load_initial_weights


@pytest.mark.parametrize(("kind", "save"), [("pt", torch.save), ("safetensors", save_file)])
def test_torchvisions_weights_come_in_with_a_new_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: str, save: Callable[..., None]
) -> None:
    pretrained, net = resnet18(num_classes=20), resnet18(num_classes=7)
    pretrained.bn1.running_mean += 3
    path = tmp_path / f"weights.{kind}"
    save(pretrained.state_dict(), path)
    head = net.fc.weight.clone()
    said = r"size mismatch for fc.bias: .*\[20\].*\[7\].*type .?parameters.new_layers=\[<the layers"
    with pytest.raises(ConfigError, match=said):
        load_initial_weights(net, str(path), [])
    with caplog.at_level(logging.INFO):
        load_initial_weights(net, str(path), ["fc"])
    expected = pretrained.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in net.state_dict().items() if not name.startswith("fc"))
    assert torch.equal(net.fc.weight, head)
    assert f"init: {len(expected) - 2} of {len(expected)} tensors" in caplog.text
    assert "init: keep their first values: fc.bias, fc.weight" in caplog.text
    monkeypatch.setattr("lockstep.snapshots.files.find_spec", lambda name: None)
    if kind == "safetensors":
        with pytest.raises(ConfigError, match=r"^parameters.init=.* needs safetensors; type pip install safetensors$"):
            load_initial_weights(net, str(path), [])
