"""Parameters and buffers of every type and layout, and tensors with several names, in everything that holds them."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigError
from lockstep.models.base import matching_parameters
from lockstep.snapshots.initial_weights import freeze, load_initial_weights
from lockstep.strategies.base import to_bytes
from support.commands import ema
from support.configs import composed, with_values
from support.models import MadeInForward, OddTensors
from support.run_folders import newest_snapshot
from support.worlds import in_world, train_all

MODEL = ("model=linear", "model._target_=support.models.OddTensors", "optimizer.fused=false", "logger=[]")


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape, value.layout) == (other[name].dtype, other[name].shape, other[name].layout)
        assert torch.equal(to_bytes([value]), to_bytes([other[name]])), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_type_and_layout_is_trained_averaged_saved_and_resumed(tmp_path, strategy):
    trains_all = strategy == "ddp"
    words = [*MODEL, f"+model.trains_all={trains_all}", f"strategy={strategy}", ema(0.5)]
    words += ["trainer.batch_size=500", "trainer.epochs=2"]
    whole, parts = (composed(*words, f"run_dir={tmp_path / name}") for name in ("whole", "parts"))
    in_world(2, train_all, [whole, with_values(parts, "trainer.pause_after=1"), parts])
    runs = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts")]
    assert_same(*runs)
    trained, made = runs[0], OddTensors([1, 8, 8], 10, trains_all).state_dict()
    assert {name: value.dtype for name, value in trained.items()} == {name: value.dtype for name, value in made.items()}
    moved = ["layer.weight", "of_int16", "of_uint16", "of_bfloat16", "of_complex64", "column"]
    for name in [*moved, *(("filter", "gain", "shift") if trains_all else ())]:
        assert not torch.equal(trained[name], made[name]), f"{name} was not trained"
    assert trained["filter"].imag[1:].abs().min() > 0
    assert float(trained["direction"].norm()) == pytest.approx(1, abs=1e-6), "a mean of unit vectors is none"
    column, dense = trained["column"], trained["transposed"].flatten()
    assert torch.allclose(column, column[0] * torch.arange(1, 6))
    assert torch.equal(column, trained["other_column"])
    assert torch.allclose(dense, dense[0] * torch.arange(1, 7))
    saved = newest_snapshot(tmp_path / "whole")
    averaged = {"layer.weight", "layer.bias", "filter", "gain", "shift", "coarse", "running_mean"}
    assert saved["ema"].keys() - {"empty"} == averaged
    assert saved["ema"]["shift"].dtype == torch.float32, "bfloat16 rounds small changes of an average away"


class Tied(nn.Module):
    """Two linear layers that share one weight."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight


def test_any_name_of_a_shared_weight_freezes_groups_and_initialises_it(tmp_path):
    model = Tied(3)
    freeze(model, ["second"])
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["first.weight", "second.bias"]
    assert matching_parameters(model, "second.weight") == {"first.weight"}

    values = {name: torch.full_like(value, 2.0) for name, value in Tied(3).state_dict().items()}
    for left_out in ("first.weight", "second.weight"):  # safetensors' save_model keeps one of the names
        torch.save({name: value for name, value in values.items() if name != left_out}, tmp_path / "some.pt")
        model = Tied(3)
        load_initial_weights(model, str(tmp_path / "some.pt"), [])
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    torch.save(values | {"second.weight": torch.zeros(3, 3)}, tmp_path / "two.pt")
    with pytest.raises(ConfigError, match=r"another first.weight than second.weight.*new_layers=\[second.weight\]"):
        load_initial_weights(Tied(3), str(tmp_path / "two.pt"), [])
    model = Tied(3)
    first = model.first.weight.clone()
    load_initial_weights(model, str(tmp_path / "two.pt"), ["second.weight"])
    assert torch.equal(model.first.weight, first)
    assert torch.equal(model.second.bias, values["second.bias"])


@pytest.mark.parametrize(("strategy", "extra"), [("ddp", "set"), ("fsdp", "bytes")])
def test_buffers_that_a_forward_pass_makes_and_extra_state_are_resumed(tmp_path, strategy, extra):
    words = ["model=linear", "model._target_=support.models.MadeInForward", f"+model.extra={extra}", "logger=[]"]
    base = composed(*words, f"strategy={strategy}", "trainer.batch_size=500", "trainer.epochs=2")
    whole, parts = (with_values(base, f"run_dir={tmp_path / name}") for name in ("whole", "parts"))
    in_world(2, train_all, [whole, with_values(parts, "trainer.pause_after=1"), parts])
    one, other = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts"))
    assert one.pop("_extra_state") == other.pop("_extra_state")
    assert_same(one, other)
    assert len(one["bank"]) == 6
    loaded = lockstep.load(tmp_path / "whole", model=MadeInForward([1, 8, 8], 10, extra)).net.state_dict()
    loaded.pop("_extra_state")
    assert_same(loaded, one)
