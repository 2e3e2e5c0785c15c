"""Images as data sets: what reads one, and the pixels of all, decoded once into a file.

The file of pixels lies in a folder of its own, not beside the images: those are often read-only, or nobody wants files
among them. All ranks and runs map it into memory.
"""

import errno
import fcntl
import glob
import hashlib
import io
import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Count, Positive
from lockstep.data.builtin import one_at_a_time, say
from lockstep.data.dataset import InMemoryDataset
from lockstep.data.image_files import ImageFiles
from lockstep.data.samples import EVALUATION, Key
from lockstep.data.workers import DatasetReader
from lockstep.distributed.host import cpu_count
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

JPEG = (".jpg", ".jpeg")
LARGE_JPEG = 2**15  # bytes: smaller ones are not asked for their size, which takes as long as decoding a tiny one
UNCHANGED = 0  # torchvision.io.ImageReadMode: as many channels as are stored
FORMAT = 4  # one more when the same files give other pixels
BYTES_AT_ONCE = 2**20  # of pixels that a worker writes
IMAGES_A_WORKER = 64  # at least: a process takes longer to start than a few images take
REPORT_EVERY = 10.0  # seconds
UNFINISHED = ".pixels.tmp"  # the end of a file's name while it is written: others in its folder are not ours


class ImageReader:
    """The RGB pixels (3, height, width) of a file, uint8, whatever its colours are, turned as its EXIF tag says.

    size: the shorter side is scaled to it and the middle is cut out, which gives (3, size, size); None: images keep
    their size. torchvision decodes JPEGs to the bytes of Pillow in half to two thirds of its time. JPEGs with sides of
    at least four times the size are decoded at a half, a quarter or an eighth of theirs, still at least twice the size.
    """

    def __init__(self, size: int | None) -> None:
        from torchvision.transforms import v2

        self.size = size
        # The operator that torchvision.io.decode_jpeg calls after a warning that torchvision means to remove it.
        self.decode_jpeg: Any = getattr(torch.ops.image, "decode_jpeg", None)
        self.fit: Any = None if size is None else v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        self.to_tensor: Any = v2.functional.pil_to_tensor

    def __call__(self, path: Path, stored: bytes | None = None) -> Tensor:
        """Raises OSError, with the file's name, for a file that is gone or damaged.

        stored: its bytes, of an image that is no file of its own.
        """
        from PIL import Image, ImageOps

        try:
            pixels = self._jpeg(path, stored)
            if pixels is None:
                with Image.open(path if stored is None else io.BytesIO(stored)) as file:
                    if self.size is not None:
                        file.draft(None, (2 * self.size, 2 * self.size))  # of JPEGs alone
                    pixels = self.to_tensor(ImageOps.exif_transpose(_with_8_bits(file)).convert("RGB"))
            if self.size is not None and pixels.shape[1:] != (self.size, self.size):
                pixels = self.to_tensor(self.fit(Image.fromarray(pixels.permute(1, 2, 0).numpy())))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow raises all of them
            reason = str(error).removesuffix(f": '{path}'").partition(" <_io.BytesIO")[0]
            raise OSError(f"{path}: {reason}") from error
        return pixels

    def _jpeg(self, path: Path, stored: bytes | None) -> Tensor | None:
        """The pixels of a JPEG; None of other files, and of what Pillow shall read, or say what is wrong with it."""
        if self.decode_jpeg is None or path.suffix.lower() not in JPEG:
            return None
        content = bytearray(path.read_bytes() if stored is None else stored)
        if self.size is not None and len(content) > LARGE_JPEG:
            from PIL import Image

            with (
                suppress(OSError, SyntaxError, Image.DecompressionBombError),
                Image.open(io.BytesIO(content)) as header,
            ):
                if self._is_large(header.size):
                    return None
        try:
            encoded = torch.frombuffer(content, dtype=torch.uint8)
            pixels: Tensor = self.decode_jpeg(encoded, UNCHANGED, True)  # turned as its EXIF tag says
        except (RuntimeError, ValueError):
            return None
        if len(pixels) not in (1, 3) or self._is_large(pixels.shape[1:]):  # four channels are the inks of a print
            return None
        return pixels.expand(3, -1, -1)

    def _is_large(self, sides: Sequence[int]) -> bool:
        """Whether Pillow decodes an image at a part of its size."""
        return self.size is not None and min(sides) >= 4 * self.size


def _with_8_bits(file: Any) -> Any:
    """An image of 16 bits a pixel, or more, with the upper 8 of 16: Pillow would turn all above 255 into white.

    The same for dark images and bright ones. Raises ValueError for pixels that are floats, whose range no file says.
    """
    from PIL import Image

    if file.mode == "F":
        raise ValueError("its pixels are floats, and whole numbers are wanted; store it with 8 or 16 bits")
    if not file.mode.startswith("I"):
        return file
    return Image.fromarray((np.asarray(file) // 256).clip(0, 255).astype(np.uint8))


class UndecodedImages(torch.utils.data.Dataset[tuple[Tensor, float | Tensor]]):
    """The images of `source`, decoded each time they are read.

    size: pixels of the square that each image is resized and cropped to; None: images keep their size.
    """

    def __init__(self, source: ImageFiles, size: int | None) -> None:
        self.source, self.targets = source, source.targets
        self.read = ImageReader(size)
        source.name_what_is_odd()

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return self.source.classes

    @property
    def groups(self) -> list[str] | None:
        return self.source.groups

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, float | Tensor]:
        """(pixels, target). Raises OSError, with the file's name, for a file that is gone or damaged."""
        return self.read(self.source.files[index][0]), _target(self.targets[index])


def _target(target: Tensor) -> float | Tensor:
    """One number as Python's: a transform takes a tensor for a second image, or a mask."""
    return target if target.dim() else target.item()


@dataclass(frozen=True, eq=False)
class DecodedImages(InMemoryDataset):
    """What `UndecodedImages` reads of `source`, as two tensors: (N, 3, size, size) uint8, and targets."""

    source: ImageFiles

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return self.source.classes

    @property
    def groups(self) -> list[str] | None:
        return self.source.groups

    def __getitem__(self, index: int) -> tuple[Tensor, float | Tensor]:  # type: ignore[override]  # as UndecodedImages
        """A copy: what reads this data set may change its input in place."""
        row = self.row(index)
        return self.samples[row].clone(), _target(self.targets[row])

    def to(self, device: torch.device) -> "DecodedImages":
        """This data set, on `device` if there is room for it."""
        if device.type == "cpu" or not self.fits_on(device):
            return self
        return DecodedImages(
            self.samples.to(device), self.targets.to(device), self.source, numbers=self.numbers_on(device)
        )


Cache = Literal["auto", "on", "off"]


def images(files: ImageFiles, size: Count | None, cache: Cache, cache_dir: str) -> DecodedImages | UndecodedImages:
    """These images, decoded if `decode_images` has done that. Raises ConfigError with cache=on if they are not decoded.

    files: a node of a function that lists them, such as `class_folders`.
    size: pixels of the square that each image is resized and cropped to; null: images keep their size, for transforms.
    cache: keep the decoded pixels in a file; auto: where that can be done.
    cache_dir: folder of the decoded pixels.
    """
    if cache != "off" and size is not None:
        decoded = PixelFile(files, size, cache_dir).open()
        if decoded is not None:
            files.name_what_is_odd()
            return decoded
    if cache == "on":
        raise ConfigError(
            f"dataset.cache=on, and the images of {files.listed_in} are not in {cache_dir}; "
            f"keep dataset.prepare as it is, or type dataset.cache=auto"
        )
    return UndecodedImages(files, size)


def decode_images(
    train: ImageFiles,
    test: ImageFiles,
    train_size: Count | None,
    test_size: Count | None,
    cache: Cache,
    cache_dir: str,
    cache_limit: Positive,
    on_error: Literal["fail", "skip"],
) -> None:
    """`dataset.prepare` of images: decode those for training and for tests, unless that is done.

    With cache=auto a half that cannot be decoded is read from its files, and the log says why; with cache=on that
    raises ConfigError. So does a file that cannot be read, unless on_error is skip.

    train: as dataset.train.files.
    test: as dataset.test.files.
    train_size: as dataset.train.size.
    test_size: as dataset.test.size.
    cache: keep the decoded pixels in a file; auto: where that can be done.
    cache_dir: folder of the decoded pixels.
    cache_limit: GB of decoded pixels of each half; more are not kept.
    on_error: as dataset.on_error.
    """
    if cache == "off":
        return
    for files, size in ((train, train_size), (test, test_size)):
        if not len(files) or (size is None and cache == "auto"):
            continue  # the user wants each image in its own size
        reason: str | None = "they keep their size"
        if size is not None:
            reason = PixelFile(files, size, cache_dir).decode_once(cache_limit, on_error)
        if reason is not None and cache == "on":
            raise ConfigError(
                f"dataset.cache=on, but the images of {files.listed_in} cannot be decoded once: {reason}; "
                f"type dataset.cache=auto"
            )
        if reason is not None:
            log.info("the images of %s are decoded each time they are read: %s", files.listed_in, reason)


class PixelFile:
    """The file in `cache_dir` with the pixels of `files`, (N, 3, size, size) uint8.

    Its name has a hash of names, sizes and times of the images: it is never outdated. Where some images cannot be read,
    a list of them stands in its place.
    """

    def __init__(self, files: ImageFiles, size: int, cache_dir: str) -> None:
        self.files, self.size, self.cache_dir = files, size, cache_dir
        self.shape = len(files), 3, size, size
        self.nbytes = math.prod(self.shape)
        place = hashlib.sha256(os.fsencode(files.listed_in.absolute()) + os.fsencode(files.name)).hexdigest()[:8]
        state = hashlib.sha256(f"{FORMAT} {version('pillow')} {version('torchvision')}".encode())
        for path, _ in files.files:
            state.update(os.fsencode(f"{str(path)[len(str(files.folder)) :]}\0{_state(path)}\n"))
        self.path = Path(cache_dir) / f"{Path(files.name).name[:40]}-{place}-{size}-{state.hexdigest()[:16]}.pixels"
        self.unreadable = self.path.with_suffix(".unreadable")  # a line for each image that cannot be read

    def is_whole(self) -> bool:
        """Whether it has all pixels."""
        try:
            return self.path.stat().st_size == self.nbytes
        except OSError:
            return False

    def open(self) -> DecodedImages | None:
        """The decoded images, None if they are not there."""
        if not len(self.files) or not self.is_whole():
            return None
        try:
            with open(self.path, "rb") as file:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_SH)  # held by the mapping: what a run uses is not removed
                pixels = np.memmap(file, np.uint8, "c", shape=self.shape)
        except OSError:  # removed in between, or there is too little memory to map it
            return None
        return DecodedImages(torch.from_numpy(pixels), self.files.targets, self.files)

    def decode_once(self, limit: float, on_error: str) -> str | None:
        """Decode the images unless that is done. Returns why they are not decoded, None if they are."""
        if self.is_whole():
            return None
        if self.nbytes / 1e9 > limit:
            return f"they would take {self.nbytes / 1e9:.3g} GB, and dataset.cache_limit is {limit:g}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(self.path.parent / ".decode.lock"):
                if not self.is_whole() and not self.unreadable.exists():
                    self._sweep()
                    self._decode()
            unreadable = self.unreadable.read_text().splitlines() if not self.path.exists() else []
        except OSError as error:
            return f"{self.cache_dir} cannot hold them ({error.strerror or error})"
        except RuntimeError as error:  # a worker was killed, such as for its memory
            return str(error).partition("\n")[0]
        if unreadable and on_error == "fail":
            raise ConfigError(
                f"{len(unreadable)} of the images of {self.files.listed_in} cannot be read, the first is "
                f"{unreadable[0]}; remove it, or type dataset.on_error=skip"
            )
        return f"{len(unreadable)} of them cannot be read, the first is {unreadable[0]}" if unreadable else None

    def _sweep(self) -> None:
        """Remove what killed processes and earlier states of the same images have left, if no run uses it."""
        folder, same_images = self.path.parent, glob.escape(self.path.name.rpartition("-")[0])
        for old in [*folder.glob(f"*{UNFINISHED}"), *folder.glob(f"{same_images}-*")]:
            with suppress(OSError), open(old, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                old.unlink()

    def _decode(self) -> None:
        """Write the pixels, or the names of the files that cannot be read beside them. Raises OSError."""
        if shutil.disk_usage(self.path.parent).free < self.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        read = ImageReader(self.size)  # imports torchvision
        say(
            f"decoding the {len(self.files)} images of {self.files.listed_in} once: {self.nbytes / 1e6:.0f} MB in "
            f"{self.path}"
        )
        begun, temporary = time.monotonic(), self.path.with_suffix(UNFINISHED)
        try:
            with open(temporary, "wb", buffering=0) as out:
                unreadable = self._decode_into(out.fileno(), read)
                if unreadable:
                    out.truncate(0)
                    out.write("\n".join(unreadable).encode(errors="replace"))
                os.fsync(out.fileno())
            os.replace(temporary, self.unreadable if unreadable else self.path)
        finally:
            temporary.unlink(missing_ok=True)
        say(f"decoded them in {time.monotonic() - begun:.2f} s")

    def _decode_into(self, file: int, read: ImageReader) -> list[str]:
        """Write the pixels to an open file. Returns sentences about images that cannot be read. Raises OSError.

        The work is done in other processes: one that has computed must not fork ranks.
        """
        count = len(self.files)
        workers = max(1, min(cpu_count(), count // IMAGES_A_WORKER))
        at_once = max(1, min(BYTES_AT_ONCE // (3 * self.size**2), count // (8 * workers)))
        keys = [(EVALUATION, number) for number in range(count)]
        batches = [keys[first : first + at_once] for first in range(0, count, at_once)]
        reader = DatasetReader(_Decoder(file, self.files, self.size, read), workers, pin_memory=False)
        done, unreadable, report_at = 0, list[str](), time.monotonic() + REPORT_EVERY
        try:
            for images, errors in reader.read(batches):
                if isinstance(errors, OSError):  # raised here: a DataLoader would put a traceback into its words
                    raise errors
                unreadable += errors
                done += images
                if time.monotonic() > report_at:
                    say(f"decoded {done} of {count} images")
                    report_at += REPORT_EVERY
        finally:
            reader.close()
        return unreadable


class _Decoder:
    """What a worker does: it writes the pixels of an image to their place in the file, whose descriptor it shares."""

    def __init__(self, file: int, files: ImageFiles, size: int, read: ImageReader) -> None:
        self.file, self.files, self.size, self.read = file, files.files, size, read

    def __getitems__(self, keys: Sequence[Key]) -> tuple[int, list[str] | OSError]:
        pixels, errors = np.empty((len(keys), 3, self.size, self.size), dtype=np.uint8), []
        for row, (_, number) in zip(pixels, keys, strict=True):
            try:
                row[:] = self.read(self.files[number][0]).numpy()
            except OSError as error:
                errors.append(" ".join(str(error).split()))
        left, place = pixels.reshape(-1).data, keys[0][1] * pixels[0].nbytes  # the numbers of a batch are in a row
        try:
            while left:
                written = os.pwrite(self.file, left, place)
                left, place = left[written:], place + written
        except OSError as error:
            return len(keys), error
        return len(keys), errors

    def collate(self, read: tuple[int, list[str] | OSError]) -> tuple[int, list[str] | OSError]:
        return read


def _state(path: Path) -> tuple[int, int, int]:
    """(bytes, ns of the last change of its content, ns of the last change of its name or rights) of a file.

    Zeros if it is gone: decoding names it.
    """
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
