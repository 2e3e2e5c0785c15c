"""Downloads of torchvision's data sets: once per machine, even if several machines share the folder."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import ConfigError

LOCK = ".download.lock"


def download(data_dir: str, name: str) -> None:
    """Make sure that torchvision's data set `name` (MNIST, FashionMNIST, CIFAR10) is in `data_dir`.

    Raises ConfigError if it is not there and cannot be downloaded.
    """
    expected = _last_file(Path(data_dir), name)
    if expected.exists():
        return
    created = not Path(data_dir).exists()
    try:
        Path(data_dir).mkdir(parents=True, exist_ok=True)
        with one_at_a_time(Path(data_dir) / LOCK):
            if not expected.exists():
                import torchvision

                getattr(torchvision.datasets, name)(data_dir, train=False, download=True)
    except Exception as error:  # urllib, sockets, checksums, disks: whatever it was, the data is not there
        if created:
            _remove_empty(Path(data_dir))
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{name} is not in data_dir={data_dir} (searched {expected.parent.absolute()}) and cannot be downloaded "
            f"({reason}); type data_dir=<folder that holds {name}>, or dataset=digits, which needs no download"
        ) from None


def require_downloaded(data_dir: str, name: str) -> None:
    """Raise ConfigError if torchvision's data set `name` is not in `data_dir`, as when `download` is left out."""
    expected = _last_file(Path(data_dir), name)
    if not expected.exists():
        raise ConfigError(
            f"{name} is not in data_dir={data_dir} (searched {expected.parent.absolute()}); "
            f"type data_dir=<folder that holds {name}>, or keep dataset.prepare as it is, which downloads {name}"
        )


def _last_file(data_dir: Path, name: str) -> Path:
    """The file that torchvision writes last."""
    if name == "CIFAR10":
        return data_dir / "cifar-10-batches-py" / "test_batch"
    return data_dir / name / "raw" / "t10k-labels-idx1-ubyte"


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold the file `lock`: the first ranks of several machines may share its folder over a network file system."""
    with open(lock, "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _remove_empty(folder: Path) -> None:
    """Remove a folder that this download created and could not fill."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if all(path.name == LOCK for path in files):
        for path in files:
            path.unlink()
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir()
        folder.rmdir()
