"""The data sets. A set that fits in memory is one tensor of samples beside one of targets; `ImageFolder` decodes files.

Downloads are functions of their own (`prepare` in the YAML), so that one process a machine runs them first.
"""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.refusal import Refusal


class InMemory(NamedTuple):
    """samples: (N, C, H, W) uint8 images or (N, ...) floats; targets: (N,) int64 classes or (N, ...) floats."""

    samples: torch.Tensor
    targets: torch.Tensor

    def __len__(self):
        return len(self.targets)


def digits(train):
    """The 1797 8x8 handwritten digits inside scikit-learn (UCI, Alpaydin and Kaynak 1998): 1437 to train, 360 to test.

    Read from the package's own file: importing scikit-learn costs a second that a run does not need.
    """
    table = _digits()[:1437] if train else _digits()[1437:]
    return InMemory((table[:, :64] * 15).reshape(-1, 1, 8, 8), table[:, 64].long())  # 0..16 -> 0..240


@cache
def _digits():
    import numpy as np

    package = find_spec("sklearn")
    if package is None:
        raise Refusal("dataset=digits wants scikit-learn; type pip install scikit-learn")
    with gzip.open(Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    return table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]


def mnist(data_dir, name, train):
    """MNIST or FashionMNIST from the IDX files of torchvision's layout: 60000 or 10000 28x28 images.

    The files are mapped, not read: all ranks of a machine share one copy.
    """
    raw, split = Path(data_dir) / name / "raw", "train" if train else "t10k"
    images = _idx(raw / f"{split}-images-idx3-ubyte", header=16)
    labels = _idx(raw / f"{split}-labels-idx1-ubyte", header=8)
    return InMemory(images.reshape(-1, 1, 28, 28), labels.long())


def _idx(path, header):
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[header:]


def cifar10(data_dir, train):
    """CIFAR-10 as torchvision stores it: 50000 or 10000 32x32 colour images."""
    from torchvision.datasets import CIFAR10

    stored = CIFAR10(data_dir, train=train)
    return InMemory(torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(stored.targets))


def download(data_dir, name):
    """Have torchvision's data set `name` (MNIST, FashionMNIST, CIFAR10) in `data_dir`, from the network if need be.

    Raises Refusal where it is neither there nor to be had.
    """
    expected = (
        Path(data_dir) / name / "raw" / "t10k-labels-idx1-ubyte" if name != "CIFAR10" else Path(data_dir) / "cifar-10-batches-py" / "test_batch"
    )
    if expected.exists():
        return
    import torchvision

    try:
        getattr(torchvision.datasets, name)(data_dir, train=False, download=True)
    except Exception as error:  # urllib, sockets, hashes, disks: whatever it was, the data is not there
        raise Refusal(
            f"{name} is not in data_dir={data_dir} (searched {expected.parent.absolute()}) and cannot "
            f"be downloaded ({str(error).splitlines()[0] or type(error).__name__}); type data_dir=<folder that holds {name}>, "
            f"or dataset=digits, which needs no download"
        ) from None


def random(samples, features, seed, train):
    """The second tutorial's regression pairs: uniform random inputs (samples, features) and targets (samples, 1)."""
    generator = torch.Generator().manual_seed(2 * seed + (not train))
    return InMemory(torch.rand(samples, features, generator=generator), torch.rand(samples, 1, generator=generator))


class ImageFolder(torch.utils.data.Dataset):
    """`root`/train/<class>/*.jpg and `root`/test/<class>/*.jpg as uint8 images of one size, decoded by torchvision.

    Raises Refusal where the folder is missing or holds another number of classes than the model was told.
    """

    def __init__(self, root, size, classes, train):
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        folder = Path(root) / ("train" if train else "test")
        if not folder.is_dir():
            raise Refusal(f"dataset=image_folder found no folder {folder.absolute()}; type dataset.root=<folder with train/ and test/ inside>")
        self.files = ImageFolder(folder, v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()]))
        if len(self.files.classes) != classes:
            raise Refusal(f"{folder} holds {len(self.files.classes)} classes, not {classes}; type dataset.classes={len(self.files.classes)}")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.files[index]
