"""Images of one size that were decoded once: their pixels lie in one file, which all ranks and runs map into memory."""

import fcntl
import hashlib
import math
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.data.image_folder import ImageFiles, ImageFolder
from lockstep.data.in_memory import InMemoryDataset
from lockstep.errors import ConfigError

FORMAT = 2  # one more when the same files give other pixels
MAY_READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
DEVICE_SHARE = 4  # up to 1/4 of the free memory of a GPU is taken; more pixels stay with the host


@dataclass(frozen=True, eq=False)
class DecodedImages(InMemoryDataset):
    """What `ImageFolder` reads of `source`, as two tensors: (N, 3, size, size) uint8 and (N,) int64."""

    source: ImageFiles

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return self.source.classes

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]  # as ImageFolder
        """A copy: what reads this data set may change its input in place."""
        return self.samples[index].clone(), int(self.targets[index])

    def to(self, device: torch.device) -> "DecodedImages":
        """This data set, on `device` if there is room for it."""
        if device.type == "cpu" or self.samples.nbytes > torch.cuda.mem_get_info(device)[0] // DEVICE_SHARE:
            return self
        return DecodedImages(self.samples.to(device), self.targets.to(device), self.source)


def image_folder(
    root: str, split: str, size: int | None, classes: int | None, cache: str, cache_dir: str
) -> DecodedImages | ImageFolder:
    """The images of `root`/`split`, decoded if `lockstep.data.decode` has done that.

    Raises ConfigError as ImageFiles does, and with cache=on if they are not decoded.
    """
    if cache != "off" and size is not None:
        decoded = open_decoded(ImageFiles(root, split, classes), size, cache_dir)
        if decoded is not None:
            decoded.source.name_empty_classes()
            return decoded
    if cache == "on":
        raise ConfigError(
            f"dataset.cache=on, and the images of {Path(root) / split} are not in {cache_dir}; "
            f"keep dataset.prepare as it is, or type dataset.cache=auto"
        )
    return ImageFolder(root, split, size, classes)


def open_decoded(files: ImageFiles, size: int, cache_dir: str) -> DecodedImages | None:
    """The decoded images, None if they are not in `cache_dir`."""
    path = pixel_file(files, size, cache_dir)
    if not len(files) or not is_whole(path, files, size):
        return None
    try:
        with open(path, "rb") as file:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_SH)  # held by the mapping: what a run uses is not removed
            pixels = np.memmap(file, np.uint8, "c", shape=_shape(files, size))
    except OSError:  # removed in between, or there is too little memory to map it
        return None
    return DecodedImages(torch.from_numpy(pixels), torch.tensor(files.targets), files)


def pixel_file(files: ImageFiles, size: int, cache_dir: str) -> Path:
    """Where the pixels of these files are. The name has a hash of names, sizes and times: it is never outdated."""
    folder = files.folder.absolute()
    place = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    state = hashlib.sha256(f"{FORMAT} {version('pillow')} {version('torchvision')}".encode())
    for path, _ in files.files:
        state.update(os.fsencode(f"{str(path)[len(str(files.folder)) :]}\0{_state(path)}\n"))
    return Path(cache_dir) / f"{folder.name[:40]}-{place}-{size}-{state.hexdigest()[:16]}.pixels"


def is_whole(path: Path, files: ImageFiles, size: int) -> bool:
    """Whether `path` is a file with all pixels."""
    try:
        return path.stat().st_size == pixel_bytes(files, size)
    except OSError:
        return False


def pixel_bytes(files: ImageFiles, size: int) -> int:
    """What the decoded images take."""
    return math.prod(_shape(files, size))


def _shape(files: ImageFiles, size: int) -> tuple[int, int, int, int]:
    return len(files), 3, size, size


def _state(path: Path) -> tuple[int, int, int]:
    """(bytes, ns of the last change, who may read it) of a file; zeros if it is gone: decoding names it."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_mode & MAY_READ
