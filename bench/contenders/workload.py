"""What all contenders train: the tutorial's net, on the first images of MNIST, with the same arguments."""

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """The tutorial's net. (N, 1, 28, 28) -> (N, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer2(self.layer1(x))
        return self.fc(out.reshape(out.size(0), -1))


def small_image_net(shape: list[int], classes: int) -> nn.Module:
    """Means over 8x8 areas and one linear layer: reading the images takes longer than this net."""
    channels, height, _ = shape
    return nn.Sequential(nn.AvgPool2d(height // 8), nn.Flatten(), nn.Linear(channels * 64, classes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.environ.get("LOCKSTEP_DATA", "data"), help="where MNIST/raw lies")
    parser.add_argument("--batch", type=int, default=128, help="samples a rank and step")
    parser.add_argument("--until", type=float, default=1.0, help="test accuracy at which to end")
    parser.add_argument("--images", help="of references: a folder with train/ and test/ in the place of MNIST")
    parser.add_argument("--resnet18", action="store_true", help="with the recipe that it was published with")
    # Samples are those of all ranks, devices Lightning's, and size the pixels of a side of --images.
    for name, value in {"samples": 60000, "test-samples": 10000, "epochs": 2, "devices": 1, "size": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def wrap(net: nn.Module) -> nn.Module:
    """The net, under torchrun inside DistributedDataParallel over gloo."""
    if "WORLD_SIZE" not in os.environ:
        return net
    torch.distributed.init_process_group(backend="gloo", init_method="env://")
    return nn.parallel.DistributedDataParallel(net)


def mnist(args: argparse.Namespace, *steps: Any) -> list[Any]:
    """torchvision's MNIST for training and for the test, cut to its first images."""
    from torchvision import transforms
    from torchvision.datasets import MNIST

    transform = transforms.Compose(steps or [transforms.ToTensor()])
    sets = [MNIST(args.data, train=train, transform=transform, download=True) for train in (True, False)]
    for whole, count in zip(sets, (args.samples, args.test_samples), strict=True):
        whole.data, whole.targets = whole.data[:count], whole.targets[:count]
    return sets
