"""MNIST and FashionMNIST from IDX files in torchvision's layout."""

from pathlib import Path

import torch
from torch import Tensor

from lockstep.data.download import require_downloaded
from lockstep.data.in_memory import InMemoryDataset


def mnist(data_dir: str, name: str, train: bool) -> InMemoryDataset:
    """60000 training or 10000 test images (N, 1, 28, 28) uint8, of 10 classes. name: MNIST or FashionMNIST.

    The files are memory-mapped, so all ranks of a machine share one copy.
    """
    require_downloaded(data_dir, name)
    folder, split = Path(data_dir) / name / "raw", "train" if train else "t10k"
    images = _read_idx(folder / f"{split}-images-idx3-ubyte", header=16)
    labels = _read_idx(folder / f"{split}-labels-idx1-ubyte", header=8)
    return InMemoryDataset(images.reshape(-1, 1, 28, 28), labels.long())


def _read_idx(path: Path, header: int) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[header:]
