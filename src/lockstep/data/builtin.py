"""The data sets that come with the project: digits, MNIST, CIFAR-10, random pairs; and torchvision's downloads.

A download is made once per machine, even if several machines share the folder.
"""

import errno
import fcntl
import gzip
import logging
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Count, Seed
from lockstep.data.dataset import InMemoryDataset
from lockstep.errors import ConfigError
from lockstep.text import first_line

log = logging.getLogger(__name__)

DIGITS_TO_TRAIN_ON = 1437  # of 1797
LOCK = ".download.lock"
IDX_HEADER = 16  # bytes that hold the header of images: a number for the type, and the sizes of up to three dimensions


def digits(train: bool) -> InMemoryDataset:
    """1437 training or 360 test images (N, 1, 8, 8) uint8, of 10 classes. Raises ConfigError without scikit-learn.

    train: whether this is the training data.
    """
    table = _table()[:DIGITS_TO_TRAIN_ON] if train else _table()[DIGITS_TO_TRAIN_ON:]
    images = (table[:, :64] * 15).reshape(-1, 1, 8, 8)  # 0..16 -> 0..240
    return InMemoryDataset(images, table[:, 64].long())


@cache
def _table() -> Tensor:
    """(1797, 65) uint8, shuffled: 64 pixels and a class. Read from the file: importing scikit-learn takes a second."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("dataset=digits needs scikit-learn; type pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path) as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    return table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]


def mnist(data_dir: str, name: str, train: bool) -> InMemoryDataset:
    """60000 training or 10000 test images (N, 1, 28, 28) uint8, of 10 classes.

    The files are memory-mapped, so all ranks of a machine share one copy.

    data_dir: folder of the data sets.
    name: folder of the files inside data_dir: MNIST or FashionMNIST.
    train: whether this is the training data.
    """
    require_downloaded(data_dir, name)
    folder, split = Path(data_dir) / name / "raw", "train" if train else "t10k"
    images = _read_idx(folder / f"{split}-images-idx3-ubyte", header=16)
    labels = _read_idx(folder / f"{split}-labels-idx1-ubyte", header=8)
    return InMemoryDataset(images.reshape(-1, 1, 28, 28), labels.long())


def _read_idx(path: Path, header: int) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[header:]


def cifar10(data_dir: str, train: bool) -> InMemoryDataset:
    """50000 training or 10000 test images (N, 3, 32, 32) uint8, of 10 classes.

    data_dir: folder of the data sets.
    train: whether this is the training data.
    """
    from torchvision.datasets import CIFAR10

    require_downloaded(data_dir, "CIFAR10")
    stored = CIFAR10(data_dir, train=train)
    images = torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous()
    return InMemoryDataset(images, torch.tensor(stored.targets))


def random_pairs(samples: Count, features: Count, seed: Seed, train: bool) -> InMemoryDataset:
    """Inputs (samples, features) and targets (samples, 1), uniform in 0..1.

    samples: pairs in each half.
    features: numbers in a sample.
    seed: as seed.
    train: whether this is the training data.
    """
    generator = torch.Generator().manual_seed(2 * seed + (not train))
    inputs = torch.rand(samples, features, generator=generator)
    return InMemoryDataset(inputs, torch.rand(samples, 1, generator=generator))


def download(data_dir: str, name: str) -> None:
    """Make sure that a data set of torchvision (MNIST, FashionMNIST, CIFAR10) is there.

    Raises ConfigError if it is not there and cannot be downloaded, and for files of it that are not whole.

    data_dir: folder of the data sets.
    name: name of the data set in torchvision.
    """
    folder, problem = _folder(Path(data_dir), name), None
    try:
        if _is_there(folder, name):
            return
    except ConfigError as error:  # or another machine writes the file now
        problem = error
    created = not Path(data_dir).exists()
    try:
        Path(data_dir).mkdir(parents=True, exist_ok=True)
        with one_at_a_time(Path(data_dir) / LOCK):
            problem = None  # nobody else writes now
            if not _is_there(folder, name):
                import torchvision

                getattr(torchvision.datasets, name)(data_dir, train=False, download=True)
    except ConfigError:
        raise
    except Exception as error:  # urllib, sockets, checksums, disks: whatever it was, the data is not there
        if problem is not None:  # the folder cannot be written to
            raise problem from None
        if created:
            _remove_empty(Path(data_dir))
        reason = first_line(error)
        raise ConfigError(
            f"{name} is not in data_dir={data_dir} (searched {folder.absolute()}) and cannot be downloaded "
            f"({reason}); type data_dir=<folder that holds {name}>, or dataset=digits, which needs no download"
        ) from None


def require_downloaded(data_dir: str, name: str) -> None:
    """Raise ConfigError if torchvision's data set `name` is not in `data_dir`, as when `download` is left out."""
    folder = _folder(Path(data_dir), name)
    if not _is_there(folder, name):
        raise ConfigError(
            f"{name} is not in data_dir={data_dir} (searched {folder.absolute()}); "
            f"type data_dir=<folder that holds {name}>, or keep dataset.prepare as it is, which downloads {name}"
        )


def _folder(data_dir: Path, name: str) -> Path:
    return data_dir / "cifar-10-batches-py" if name == "CIFAR10" else data_dir / name / "raw"


def _is_there(folder: Path, name: str) -> bool:
    """Whether all files are there. Raises ConfigError for one that is cut: torchvision would not replace it."""
    if name == "CIFAR10":
        return (folder / "test_batch").exists()  # which torchvision writes last
    files = [folder / f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    if not all(file.exists() for file in files):
        return False
    for images, labels in (files[:2], files[2:]):
        counts = [_idx_count(file) for file in (images, labels)]
        if counts[0] != counts[1]:
            raise ConfigError(
                f"{images} has {counts[0]} images and {labels.name} has {counts[1]} labels; "
                f"type {shlex.join(['rm', str(images), str(labels)])}, and the command again, which downloads them"
            )
    return True


def _idx_count(file: Path) -> int:
    """The samples of an IDX file. Raises ConfigError if its size is not the one that its header says."""
    with open(file, "rb") as stored:
        header = np.frombuffer(stored.read(IDX_HEADER).ljust(IDX_HEADER, b"\0"), dtype=">i4")
    dimensions = int(header[0]) % 256
    sizes = header[1 : 1 + dimensions].tolist()
    if dimensions not in (1, 3) or file.stat().st_size != 4 + 4 * dimensions + math.prod(sizes):
        raise ConfigError(
            f"{file} is not whole: it has {file.stat().st_size} bytes, and its first ones say another size; "
            f"type {shlex.join(['rm', str(file)])}, and the command again, which downloads it"
        )
    return int(sizes[0])


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold the file `lock`: the first ranks of several machines may share its folder over a network file system."""
    with open(lock, "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            say(f"waiting for another run that writes into {lock.parent}")
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def say(sentence: str) -> None:
    """In the log, or printed by a process that has none yet: the one that starts the ranks."""
    log.info(sentence)
    if not log.hasHandlers():
        print(sentence, flush=True)


def _remove_empty(folder: Path) -> None:
    """Remove a folder that this download created and could not fill."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if all(path.name == LOCK for path in files):
        for path in files:
            path.unlink()
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir()
        folder.rmdir()
