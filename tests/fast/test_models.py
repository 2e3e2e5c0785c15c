"""The models' layers, numbers, names and refusals."""

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.models.airbench import Airbench
from lockstep.models.gpt import gpt
from lockstep.models.library import timm_model, torchvision_model
from lockstep.models.tutorial import convnet, linear, mlp, toy_parallel
from support.refusals import accepted


def small_gpt(variant: Any) -> nn.Sequential:
    """Two blocks, two heads, 8 numbers a token, 7 symbols and places for 16."""
    torch.manual_seed(0)
    return gpt([16], 7, layers=2, heads=2, width=8, dropout=0.0, tied=True, variant=variant)


def test_models_have_the_layers_that_they_are_asked_for() -> None:
    for model, shapes in [
        (mlp([1, 4, 4], 3, width=5, depth=2, dropout=0.5), [(5, 16), (5, 5), (3, 5)]),
        (linear([20], 1), [(1, 20)]),
        (linear([1, 8, 8], 10), [(10, 64)]),
        (toy_parallel([3, 2], 4, width=9), [(9, 6), (4, 9)]),
        (convnet([3, 12, 8], 10), [(16, 3, 5, 5), (16,), (32, 16, 5, 5), (32,), (10, 192)]),
    ]:
        assert [tuple(value.shape) for name, value in model.named_parameters() if name.endswith("weight")] == shapes
    drops = [module.p for module in mlp([7], 3, width=5, depth=3, dropout=0.5) if isinstance(module, nn.Dropout)]
    assert drops == [0.5, 0.5, 0.5]
    assert list(dict(linear([20], 1).named_parameters())) == ["weight", "bias"]


def test_models_of_torchvision_and_timm_are_built_for_the_channels_and_classes_of_the_data() -> None:
    small = torchvision_model("resnet18", [1, 8, 8], 10)
    assert (small.conv1.weight.shape, type(small.maxpool)) == ((64, 1, 3, 3), nn.Identity)
    assert torchvision_model("resnet18", [1, 64, 64], 10).conv1.weight.shape == (64, 1, 7, 7)
    with torch.device("meta"):  # other nets, whose first convolution is somewhere else
        for name in ("mobilenet_v2", "efficientnet_b0", "shufflenet_v2_x0_5"):
            assert next(torchvision_model(name, [1, 28, 28], 10).parameters()).shape[1] == 1
        vit = torchvision_model("vit_b_32", [1, 64, 64], 10, image_size=64)
        assert (vit.conv_proj.weight.shape, vit.heads.head.out_features) == ((768, 1, 32, 32), 10)
        assert timm_model("convnext_atto", [1, 64, 64], 10).stem[0].weight.shape[1] == 1
        vit = timm_model("vit_tiny_patch16_224", [3, 64, 64], 7, img_size=64)
        assert (vit.pos_embed.shape, vit.head.out_features) == ((1, 17, 192), 7)


def test_what_a_model_does_not_take_is_refused_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, said in [
        (lambda: timm_model("resnet18", [3, 64, 64], 5, drop_rat=0.1), "drop_rat.* or ~model.<option>"),
        (lambda: timm_model("resnet18", [3, 64, 64], 5, pretrained=True), "pretrained.* or ~model.<option>"),
        (lambda: timm_model("resnet81", [3, 64, 64], 5), r"Unknown model \(resnet81\).*type model.model_name="),
        (lambda: torchvision_model("resnet18", [3, 64, 64], 5, drop_rat=0.1), "drop_rat.* or ~model.<option>"),
        (lambda: torchvision_model("resnet81", [3, 64, 64], 5), "Unknown model resnet81.*type model.name="),
        (lambda: gpt([8], 5, 1, 4, 18, 0.0, True, "gpt2"), "type model.width=16"),
        (lambda: gpt([8], 5, 1, 4, 12, 0.0, True, "modern"), "in pairs; type model.width=16"),
        (lambda: gpt([1, 8, 8], 5, 1, 4, 16, 0.0, True, "gpt2"), "type dataset=text"),
        (lambda: small_gpt("gpt2")(torch.zeros(2, 17).long()), "rows of at most 16 tokens.*type dataset=text"),
        (lambda: Airbench([1, 8, 20], 10, [8, 12, 16], "one"), "at least 9x9 pixels, not 8x20; type model=mlp"),
        (lambda: convnet([1, 3, 8], 1), "at least 4x4 pixels, not 3x8; type model=mlp"),
        (lambda: accepted("dataset=text", "model=convnet"), r"images, not samples of shape \[64\]; type model=mlp"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make()
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match="model=timm needs timm; type pip install timm, or model=resnet18"):
        timm_model("resnet18", [3, 64, 64], 10)


def test_the_smallest_gpt_of_nanogpt_has_as_many_parameters() -> None:
    model = gpt([64], 65, layers=4, heads=4, width=128, dropout=0.0, tied=True, variant="gpt2")
    assert sum(parameter.numel() for parameter in model.parameters()) == 804096


@pytest.mark.parametrize("variant", ["gpt2", "modern"])
def test_a_gpt_is_the_formulas_of_its_papers(variant: Any) -> None:
    model, modern, tokens = small_gpt(variant).double(), variant == "modern", torch.randint(7, (3, 12))
    added = [weight for name, weight in model.named_parameters() if name.endswith("projection.weight")]
    assert [bool(weight.any()) for weight in added] == [not modern] * 4
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    angles = torch.arange(12)[:, None] / 10_000 ** (torch.arange(0, 4, 2) / 4)

    def placed(vectors: Tensor) -> Tensor:
        """(N, T, 4) of a head: of the norm 2, and turned as complex numbers."""
        pairs = torch.complex(*F.normalize(vectors, dim=-1).chunk(2, -1))
        turned = 2 * pairs * torch.polar(torch.ones(12, 2), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def attention(vectors: Tensor, block: str) -> Tensor:
        if modern:
            before = torch.cat([torch.zeros(3, 1, 4), vectors[:, :-1, 4:]], 1)
            vectors = torch.cat([vectors[:, :, :4], before], -1)
        later, heads = torch.ones(12, 12).triu(1).bool(), []
        for of_head in (vectors @ weights[f"{block}.attention.queries_keys_values.weight"].T).chunk(2, -1):
            queries, keys, values = of_head.chunk(3, -1)
            queries, keys = (placed(queries), placed(keys)) if modern else (queries, keys)
            heads.append((queries @ keys.mT / 2).masked_fill(later, -math.inf).softmax(-1) @ values)
        return torch.cat(heads, -1) @ weights[f"{block}.attention.projection.weight"].T

    def norm(vectors: Tensor, name: str) -> Tensor:
        return F.layer_norm(vectors, (8,), weights[name])

    vectors = weights["embedding.tokens.weight"][tokens]
    vectors = vectors if modern else vectors + weights["embedding.positions.weight"][:12]
    for block in ("block1", "block2"):
        vectors = vectors + attention(norm(vectors, f"{block}.norm1.weight"), block)
        wide = norm(vectors, f"{block}.norm2.weight") @ weights[f"{block}.mlp.widen.weight"].T
        wide = wide.clamp(min=0) ** 2 if modern else F.gelu(wide)
        vectors = vectors + wide @ weights[f"{block}.mlp.projection.weight"].T
    logits = norm(vectors, "head.norm.weight") @ weights["embedding.tokens.weight"].T
    torch.testing.assert_close(model(tokens), logits, rtol=1e-6, atol=1e-6)  # its angles are float32's
