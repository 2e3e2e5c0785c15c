"""The parts of the image recipes: airbench's net, its whitening and its views, Muon for filters, and the presets."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config.check import instantiate
from lockstep.models.airbench import Airbench, Whitening
from lockstep.training.optimizers import Muon, orthogonalised
from support.configs import composed


def net(shape: list[int], views: str = "one") -> nn.Module:
    torch.manual_seed(0)
    return Airbench(shape, 10, [8, 12, 16], views).double()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("shape", [[3, 32, 32], [1, 28, 28], [1, 9, 17]])
def test_the_net_of_airbench_takes_images_of_any_size(shape: list[int]) -> None:
    model = net(shape)
    assert model(noise(5, *shape)).shape == (5, 10)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms = [f"blocks.block{block}.norm{place}.bias" for block in (1, 2, 3) for place in (1, 2)]
    filters = [f"blocks.block{block}.conv{place}.weight" for block in (1, 2, 3) for place in (1, 2)]
    assert trained == {*norms, *filters, "whiten.bias", "head.weight"}
    second = noise(2, 8, 6, 6)
    assert torch.equal(model.get_submodule("blocks.block2.conv1")(second)[:, :8], second)  # at first


def test_the_whitening_makes_the_covariance_of_patches_the_identity() -> None:
    mixed = torch.einsum("nchw,dc->ndhw", noise(1100, 3, 9, 9), noise(3, 3))  # the channels depend on each other
    images = F.avg_pool2d(mixed, 2, 1)  # and so do the pixels
    layer = Whitening(3).double()
    layer.bias.detach().zero_()
    layer.set_weights_from(images)
    whitened = layer(images).transpose(0, 1).flatten(1)
    assert torch.equal(whitened[:12], -whitened[12:])
    covariance = whitened[:12] @ whitened[:12].T / whitened.shape[1]
    assert torch.allclose(covariance.diagonal(), torch.ones(12, dtype=torch.float64), atol=0.05)  # SMALLEST_VARIANCE
    assert torch.allclose(covariance, torch.diag(covariance.diagonal()), atol=1e-10)


def test_an_evaluation_is_the_mean_over_the_views() -> None:
    images = noise(4, 3, 12, 12)
    one, two, six = (net([3, 12, 12], views).eval() for views in ("one", "mirrored", "mirrored_and_shifted"))
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    up_and_left, down_and_right = padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]

    def mean(*views: torch.Tensor) -> torch.Tensor:
        return torch.stack([one(view) for view in views]).mean(0)

    mirrored = mean(images, images.flip(3))
    shifted = mean(up_and_left, up_and_left.flip(3), down_and_right, down_and_right.flip(3))
    torch.testing.assert_close(two(images), mirrored)
    torch.testing.assert_close(six(images), (mirrored + shifted) / 2)
    assert not torch.allclose(mirrored, shifted)
    torch.testing.assert_close(six.train()(images), one.train()(images))


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_orthogonalised_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = noise(*shape)
    found = orthogonalised(matrix, 5)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ found @ right.T
    values = inside.diagonal()
    assert torch.allclose(inside, torch.diag(values), atol=1e-10)
    assert 0.5 < values.min() <= values.max() < 1.5


def muon(parameters: Any, lr: float) -> Muon:
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.8, weight_decay=0.1, nesterov=True)
    return Muon(parameters, lr, 0.6, 0.0, 3, True, sgd)


def test_muon_turns_filters_beside_groups_of_sgd() -> None:
    tall = torch.nn.Parameter(torch.eye(6, 2, dtype=torch.float64) * 3**0.5)  # its norm is the root of its rows
    tall.grad = tall.detach().clone()
    muon([tall], 0.1).step()  # a published step: not longer for having more rows than columns
    expected = torch.eye(6, 2, dtype=torch.float64) * 3**0.5
    expected -= 0.1 * orthogonalised(expected.clone(), 3)
    torch.testing.assert_close(tall.detach(), expected, rtol=1e-6, atol=1e-7)

    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 5)).double()
    weight, bias, head = net[0].weight, net[0].bias, net[2].weight
    weight.detach().mul_(3**0.5 / weight.norm())  # as Muon does first
    net(noise(7, 1, 8, 8)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in (weight, bias, head)]
    of_head: dict[str, Any] = {"params": [head], "use_muon": False, "lr": 0.3, "weight_decay": 0.2}
    muon([{"params": [*net[0].parameters(), net[2].bias]}, of_head], 0.1).step()
    update = orthogonalised(weight.grad.flatten(1), 3).view(3, 1, 3, 3)  # momentum only scales a first gradient
    torch.testing.assert_close(weight.detach(), before[0] - 0.1 * update, rtol=1e-6, atol=1e-7)
    for parameter, first, lr, decay in ((bias, before[1], 0.02, 0.1), (head, before[2], 0.3, 0.2)):
        gradient = parameter.grad + decay * first  # Nesterov's first step is of 1.8 gradients
        torch.testing.assert_close(parameter.detach(), first - lr * 1.8 * gradient, rtol=1e-9, atol=1e-12)


def test_the_preset_for_image_folders_has_every_part_of_torchvisions_recipe() -> None:
    cfg = composed("experiment=image_folder_resnet", "dataset.root=pictures", "dataset.classes=2")
    crop, flip, augment, erasing = instantiate(cfg.loader.transforms)
    assert crop(torch.zeros(3, 40, 30, dtype=torch.uint8)).shape == (3, 176, 176)
    assert type(augment).__name__ == "TrivialAugmentWide"
    resize, middle = instantiate(cfg.loader.test_transforms)
    assert resize(torch.zeros(3, 464, 928)).shape == (3, 232, 464)
    assert middle(torch.zeros(3, 232, 464)).shape == (3, 224, 224)
    (mixing,) = instantiate(cfg.loader.batch_transforms)
    mixup, cutmix = mixing.transforms
    assert (erasing.p, flip.p, mixup.alpha, cutmix.alpha, cutmix.num_classes) == (0.1, 0.5, 0.2, 1.0, 2)
    assert cfg.dataset["size"] is None
    assert (cfg.task["label_smoothing"], cfg.trainer.ema["decay"], cfg.scheduler["warmup_epochs"]) == (0.1, 0.999, 5)
    assert cfg.scheduler["shape"] == "cosine"
    assert (cfg.optimizer["weight_decay"], cfg.parameters.no_decay) == (2e-5, ["bias", "norm"])
    assert cfg.optimizer["lr"] / cfg.trainer.batch_size == 0.5 / 1024
