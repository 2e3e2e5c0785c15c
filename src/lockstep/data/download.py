"""Downloads of torchvision's data sets: once per machine, even if several machines share the folder."""

import errno
import fcntl
import logging
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

LOCK = ".download.lock"
IDX_HEADER = 16  # bytes that hold the header of images: a number for the type, and the sizes of up to three dimensions


def download(data_dir: str, name: str) -> None:
    """Make sure that torchvision's data set `name` (MNIST, FashionMNIST, CIFAR10) is in `data_dir`.

    Raises ConfigError if it is not there and cannot be downloaded, and for files of it that are not whole.
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
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
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
