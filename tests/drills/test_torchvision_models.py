"""The small classification models of torchvision compute the same on any number of ranks, with all that they draw."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torchvision.models import get_model
from torchvision.ops import StochasticDepth

from support.configs import composed
from support.reference import train_reference
from support.worlds import in_world, train

# 20 with few parameters. Swin, a transformer, is equal too, and takes as long as six of them.
MODELS = [
    "squeezenet1_1", "squeezenet1_0", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5",
    "shufflenet_v2_x2_0", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "mobilenet_v3_small",
    "mobilenet_v3_large", "mobilenet_v2", "regnet_y_400mf", "regnet_x_400mf", "efficientnet_b0", "efficientnet_b1",
    "regnet_y_800mf", "googlenet", "densenet121",
]  # fmt: skip

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of conf/dataset/cifar10.yaml


class Noise(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Random images (3, 64, 64) in float64 and their classes, below 10."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(samples, 3, 64, 64, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 10


def weights(model: str, ranks: int, folder: Path) -> dict[str, Tensor]:
    words = [
        "dataset=cifar10",
        "dataset.prepare=null",
        "dataset.shape=[3,64,64]",
        "dataset.augment.pad=0",
        "model=resnet18",
    ]
    words += ["dataset.augment.flip=false"]
    for half in ("train", "test"):
        target = "drills.test_torchvision_models.Noise"
        words += [f"dataset.{half}._target_={target}", f"+dataset.{half}.samples=24"]
    words += ["+model.aux_logits=false"] * (model == "googlenet")  # else it has three outputs in training
    words += [f"model.name={model}", "trainer.precision=fp64", "trainer.batch_size=8"]
    in_world(
        ranks,
        train,
        composed(f"run_dir={folder}", *words, "trainer.epochs=1", "optimizer.lr=0.01", "scheduler=constant"),
    )
    found: dict[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


def plain(model: str) -> dict[str, Tensor] | None:
    """The same by plain torch in one process. None for a model that draws: it draws other numbers there."""
    torch.manual_seed(0)
    net = get_model(model, weights=None, num_classes=10).double()
    if any(getattr(module, "p", 0) for module in net.modules() if isinstance(module, nn.Dropout | StochasticDepth)):
        return None
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    data = (Noise(24).images - mean) / std, torch.arange(24) % 10
    train_reference(
        net, data, F.cross_entropy, lambda weights: SGD(weights, lr=0.01, momentum=0.9), epochs=1, batch_size=8
    )
    return net.state_dict()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("model", "sizes"), [(name, (2, 3, 4) if name == "mobilenet_v3_small" else (3,)) for name in MODELS]
)
def test_three_steps_are_those_of_plain_torch_on_any_number_of_ranks(
    tmp_path: Path, model: str, sizes: tuple[int, ...]
) -> None:
    one = weights(model, 1, tmp_path / "1")
    others = {f"{ranks} ranks": weights(model, ranks, tmp_path / str(ranks)) for ranks in sizes}
    for other, found in (others | {"plain torch": plain(model) or {}}).items():
        for name, value in found.items():
            distance = (value - one[name]).abs().max() / one[name].abs().max().clamp(min=1)
            assert distance < 1e-8, f"{other}: {name} differs by {distance:.1e}"
