"""trainer.precision=bf16-true: weights and optimizer state in bfloat16, losses in float32. And the warning of bf16."""

import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.distributed.host import has_native_bf16
from lockstep.failures.explain import explain_exception
from lockstep.failures.record import exception_record
from lockstep.models.tutorial import linear
from lockstep.modes.export import net_as
from lockstep.training.setup import cast
from support.commands import ema
from support.configs import composed
from support.digits import digits
from support.reference import saved_parameters, train_reference
from support.run_folders import newest_snapshot
from support.worlds import distance, in_world, same_bits, train, train_all

BASE = ["trainer.precision=bf16-true", "trainer.epochs=1", "logger=[]", "optimizer=adamw", "snapshot.every=10steps"]


def types_in(values):
    return {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}


def test_the_weights_are_those_of_plain_torch_in_bfloat16(tmp_path):
    """Two ranks end near them: each rounds the gradient of its own samples."""
    images, targets = digits(True).inputs, digits(True).targets
    scaled = ((images.double() / 255 - 0.287) / 0.353).bfloat16()
    make = partial(torch.optim.AdamW, lr=0.01, foreach=False)

    def loss(outputs, classes):
        return F.cross_entropy(outputs.float(), classes)

    torch.manual_seed(0)
    plain = train_reference(linear([1, 8, 8], 10).bfloat16(), (scaled, targets), loss, make, epochs=1, batch_size=64)
    words = ["model=linear", "scheduler=constant", "optimizer.lr=0.01", "optimizer.fused=false"]
    for size, limit in ((1, 1e-2), (2, 3e-2)):  # bfloat16 has 8 bits
        in_world(size, train_all, [composed(f"run_dir={tmp_path / str(size)}", *BASE, *words)])
        found = saved_parameters(tmp_path / str(size), plain.model)
        assert found.dtype == torch.bfloat16
        assert distance(found.double(), plain.weights.double()) < limit


@pytest.mark.parametrize("words", [[], ["strategy=fsdp", "model=mlp"]])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one_and_all_is_bfloat16(tmp_path, words):
    words = [*BASE, "model=convnet", ema(0.9), *words]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    resume = f"resume={whole / 'snapshots' / 'step_00000010'}"
    in_world(2, train_all, [composed(*words, f"run_dir={whole}"), composed(*words, f"run_dir={resumed}", resume)])
    assert same_bits(whole, resumed)
    saved = newest_snapshot(whole)
    norms = {name.rpartition(".")[0] for name in saved["model"] if name.endswith("running_mean")}
    assert bool(norms) == ("model=mlp" not in words)
    for name, tensor in saved["model"].items():
        if tensor.is_floating_point():
            assert (tensor.dtype == torch.float32) == (name.rpartition(".")[0] in norms), name
    for name, values in saved["optimizer"].items():
        in_norm = name.rpartition(".")[0] in norms
        found = types_in(value for key, value in values.items() if key != "step")
        assert found == {torch.float32 if in_norm else torch.bfloat16}
    assert types_in(saved["ema"].values()) == {torch.float32}


def advice_of_a_failure(config):
    with pytest.raises(Exception, match="FSDP expects uniform original parameter dtype") as raised:
        train(config)
    return explain_exception(exception_record(raised.value))[1]


def test_a_trained_net_is_loaded_and_exported_and_batch_norm_under_fsdp_is_explained(tmp_path):
    in_world(1, train_all, [composed(*BASE, "model=convnet", f"run_dir={tmp_path / 'run'}")])
    images = digits(False).inputs[:8]
    net = lockstep.load(tmp_path / "run")
    outputs = net(images)
    assert (outputs.dtype, next(net.parameters()).dtype) == (torch.bfloat16, torch.bfloat16)
    exported = torch.export.load(io.BytesIO(net_as(net, images, "torch_export"))).module()(images)
    assert torch.allclose(exported.float(), outputs.float(), atol=0.05)
    config = composed(*BASE, "model=convnet", "strategy=fsdp", f"run_dir={tmp_path / 'fsdp'}")
    assert all("type strategy=ddp" in advice for advice in in_world(2, advice_of_a_failure, config))


def test_what_is_cast_and_what_stays_and_bf16_on_a_cpu_without_it_gets_a_warning(train):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Linear(3, 3).double())
    net.register_buffer("scale", torch.ones(3))
    cast(net, "bf16-true")
    found = {name: tensor.dtype for name, tensor in net.state_dict().items() if tensor.is_floating_point()}
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    kinds = {"0": half, "1": single, "2": half, "3": double, "scale": half}
    assert found == {name: kinds[name.partition(".")[0]] for name in found}
    output = train("model=mlp", "trainer.precision=bf16", "trainer.max_steps=1").output
    assert ("bf16 is up to 8 times slower than fp32; type trainer.precision=fp32" in output) != has_native_bf16()
