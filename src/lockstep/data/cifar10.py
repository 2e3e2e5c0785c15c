"""CIFAR-10 from the files that torchvision stores."""

import torch

from lockstep.data.download import require_downloaded
from lockstep.data.in_memory import InMemoryDataset


def cifar10(data_dir: str, train: bool) -> InMemoryDataset:
    """50000 training or 10000 test images (N, 3, 32, 32) uint8, of 10 classes."""
    from torchvision.datasets import CIFAR10

    require_downloaded(data_dir, "CIFAR10")
    stored = CIFAR10(data_dir, train=train)
    images = torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous()
    return InMemoryDataset(images, torch.tensor(stored.targets))
