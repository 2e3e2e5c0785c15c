"""The small classification models of torchvision compute the same on any number of ranks, with all that they draw."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torchvision.models import get_model
from torchvision.ops import StochasticDepth

from support.configs import composed
from support.reference import train_reference
from support.worlds import in_world, train_all

# The smallest of each family. Swin, a transformer, is equal too, and takes as long as six of them.
MODELS = [
    "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf",
    "regnet_y_400mf", "efficientnet_b0", "googlenet", "densenet121",
]  # fmt: skip
MODELS = MODELS if os.environ.get("LOCKSTEP_NETS") == "all" else MODELS[::2]
SIZES = {3: MODELS, 2: ["mobilenet_v3_small"], 4: ["mobilenet_v3_small"]}  # of the worlds that train them

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the channels


class Noise(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Random images (3, 64, 64) in float64 and their classes, below 10."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(samples, 3, 64, 64, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 10


def config(model: str, folder: Path) -> Any:
    words = ["dataset=pair", "dataset.classes=10", f"dataset.mean={[*MEAN]}", f"dataset.std={[*STD]}", "model=resnet18"]
    words += [f"+dataset.{split}={{_target_: {__name__}.Noise, samples: 24}}" for split in ("train", "test")]
    words += ["+model.aux_logits=false"] * (model == "googlenet")  # else it has three outputs in training
    words += [f"model.name={model}", "trainer.precision=fp64", "trainer.batch_size=8", "logger=[]"]
    return composed(f"run_dir={folder}", *words, "trainer.epochs=1", "optimizer.lr=0.01", "scheduler=constant")


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
@pytest.mark.timeout(900)
def test_three_steps_are_those_of_plain_torch_on_any_number_of_ranks(tmp_path: Path) -> None:
    """One world of ranks trains all models: its start takes longer than the steps of one."""
    for ranks, models in {1: MODELS, **SIZES}.items():
        in_world(ranks, train_all, [config(model, tmp_path / str(ranks) / model) for model in models], limit=600)
    wrong = []
    for model in MODELS:
        one, *others = (
            read(tmp_path / str(ranks) / model) for ranks in (1, *SIZES) if model in SIZES.get(ranks, MODELS)
        )
        for found in (*others, plain(model) or {}):
            for name, value in found.items():
                distance = (value - one[name]).abs().max() / one[name].abs().max().clamp(min=1)
                if not distance < 1e-8:
                    wrong.append(f"{model}: {name} differs by {distance:.1e}")
    assert not wrong, "\n".join(wrong)


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found
