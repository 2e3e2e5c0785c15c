"""What all contenders train: the tutorial's net, on the first images of MNIST, with the same arguments."""

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """The tutorial's net, its layers in the tutorial's order. (N, 1, 28, 28) -> (N, 10) logits."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2, 2)
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2, 2)
        )
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

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
    parser.add_argument("--samples", type=int, default=60000, help="to train on, over all ranks")
    parser.add_argument("--test-samples", type=int, default=10000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="samples a rank and step")
    parser.add_argument("--devices", type=int, default=1, help="of Lightning")
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

    transform, found = transforms.Compose(steps or [transforms.ToTensor()]), []
    for train, count in ((True, args.samples), (False, args.test_samples)):
        whole = MNIST(args.data, train=train, transform=transform, download=True)
        whole.data, whole.targets = whole.data[:count], whole.targets[:count]
        found.append(whole)
    return found
