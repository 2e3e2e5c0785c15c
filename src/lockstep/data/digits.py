"""The 1797 handwritten 8x8 digits inside scikit-learn (UCI, Alpaydin and Kaynak 1998)."""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from lockstep.data.in_memory import InMemoryDataset
from lockstep.errors import ConfigError

TRAIN_SAMPLES = 1437


def digits(train: bool) -> InMemoryDataset:
    """1437 training or 360 test images (N, 1, 8, 8) uint8, of 10 classes. Raises ConfigError without scikit-learn."""
    table = _table()[:TRAIN_SAMPLES] if train else _table()[TRAIN_SAMPLES:]
    images = (table[:, :64] * 15).reshape(-1, 1, 8, 8)  # 0..16 -> 0..240
    return InMemoryDataset(images, table[:, 64].long())


@cache
def _table() -> Tensor:
    """(1797, 65) uint8, shuffled: 64 pixels and a class. Read from the file: importing scikit-learn takes a second."""
    import numpy as np

    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("dataset=digits needs scikit-learn; type pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path) as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    return table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
