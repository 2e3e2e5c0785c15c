"""`dataset.prepare` of an image folder: decodes its images once, into the files that `decoded_images` maps.

They lie in a folder of their own, not beside the images: those are often read-only, or nobody wants files among them.
"""

import errno
import fcntl
import glob
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from lockstep.data.decoded_images import is_whole, pixel_bytes, pixel_file
from lockstep.data.download import one_at_a_time, say
from lockstep.data.image_folder import ImageFiles
from lockstep.data.image_reader import ImageReader
from lockstep.data.samples import EVALUATION, Key
from lockstep.data.workers import DatasetReader
from lockstep.distributed.host import cpu_count
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

BYTES_AT_ONCE = 2**20  # of pixels that a worker writes
IMAGES_A_WORKER = 64  # at least: a process takes longer to start than a few images take
REPORT_EVERY = 10.0  # seconds
UNFINISHED = ".pixels.tmp"  # the end of a file's name while it is written: others in its folder are not ours


def decode_images(
    root: str,
    test_split: str,
    train_size: int | None,
    test_size: int | None,
    classes: int | None,
    cache: str,
    cache_dir: str,
    limit: float,
    on_error: str,
) -> None:
    """Decode the training and the test images, unless that is done. sizes: as for ImageReader. limit: GB of each half.

    With cache=auto a half that cannot be decoded is read from its files, and the log says why; with cache=on that
    raises ConfigError. So does a file that cannot be read, unless on_error is skip.
    """
    if cache == "off":
        return
    for split, size in (("train", train_size), (test_split, test_size)):
        if size is None and cache == "auto":
            continue  # the user wants each image in its own size
        files = ImageFiles(root, split, classes)
        reason = _decode_once(files, size, cache_dir, limit, on_error)
        if reason is not None and cache == "on":
            raise ConfigError(
                f"dataset.cache=on, but the images of {files.folder} cannot be decoded once: {reason}; "
                f"type dataset.cache=auto"
            )
        if reason is not None:
            log.info("the images of %s are decoded each time they are read: %s", files.folder, reason)


def _decode_once(files: ImageFiles, size: int | None, cache_dir: str, limit: float, on_error: str) -> str | None:
    """Decode the images unless that is done. Returns why they are not decoded, None if they are."""
    if size is None:
        return "they keep their size"
    path, gigabytes = pixel_file(files, size, cache_dir), pixel_bytes(files, size) / 1e9
    if is_whole(path, files, size):
        return None
    if gigabytes > limit:
        return f"they would take {gigabytes:.3g} GB, and dataset.cache_limit is {limit:g}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(path.parent / ".decode.lock"):
            if not is_whole(path, files, size) and not _list_of_unreadable(path).exists():
                _sweep(path)
                _decode(files, size, path)
        unreadable = _list_of_unreadable(path).read_text().splitlines() if not path.exists() else []
    except OSError as error:
        return f"{cache_dir} cannot hold them ({error.strerror or error})"
    except RuntimeError as error:  # a worker was killed, such as for its memory
        return str(error).partition("\n")[0]
    if unreadable and on_error == "fail":
        raise ConfigError(
            f"{len(unreadable)} of the images of {files.folder} cannot be read, the first is {unreadable[0]}; "
            f"remove it, or type dataset.on_error=skip"
        )
    return f"{len(unreadable)} of them cannot be read, the first is {unreadable[0]}" if unreadable else None


def _list_of_unreadable(path: Path) -> Path:
    """The file that stands in for the pixels `path` if some images cannot be read: a line for each of them."""
    return path.with_suffix(".unreadable")


def _sweep(path: Path) -> None:
    """Remove what killed processes have left, and what earlier states of the same images gave, if no run uses it."""
    same_images = glob.escape(path.name.rpartition("-")[0])
    for old in [*path.parent.glob(f"*{UNFINISHED}"), *path.parent.glob(f"{same_images}-*")]:
        with suppress(OSError), open(old, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old.unlink()


def _decode(files: ImageFiles, size: int, path: Path) -> None:
    """Write the pixels to `path`, or the names of the files that cannot be read beside it. Raises OSError."""
    needed = pixel_bytes(files, size)
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reader = ImageReader(size)  # imports torchvision
    say(f"decoding the {len(files)} images of {files.folder} once: {needed / 1e6:.0f} MB in {path}")
    begun, temporary = time.monotonic(), path.with_suffix(UNFINISHED)
    try:
        with open(temporary, "wb", buffering=0) as out:
            unreadable = _decode_into(out.fileno(), files, size, reader)
            if unreadable:
                out.truncate(0)
                out.write("\n".join(unreadable).encode(errors="replace"))
            os.fsync(out.fileno())
        os.replace(temporary, _list_of_unreadable(path) if unreadable else path)
    finally:
        temporary.unlink(missing_ok=True)
    say(f"decoded them in {time.monotonic() - begun:.2f} s")


def _decode_into(file: int, files: ImageFiles, size: int, read: ImageReader) -> list[str]:
    """Write the pixels to an open file. Returns sentences about images that cannot be read. Raises OSError.

    The work is done in other processes: one that has computed must not fork ranks.
    """
    workers = max(1, min(cpu_count(), len(files) // IMAGES_A_WORKER))
    at_once = max(1, min(BYTES_AT_ONCE // (3 * size**2), len(files) // (8 * workers)))
    keys = [(EVALUATION, number) for number in range(len(files))]
    batches = [keys[first : first + at_once] for first in range(0, len(files), at_once)]
    reader = DatasetReader(_Decoder(file, files, size, read), workers, pin_memory=False)
    done, unreadable, report_at = 0, list[str](), time.monotonic() + REPORT_EVERY
    try:
        for images, errors in reader.read(batches):
            if isinstance(errors, OSError):  # raised here: a DataLoader would put a traceback into its words
                raise errors
            unreadable += errors
            done += images
            if time.monotonic() > report_at:
                say(f"decoded {done} of {len(files)} images")
                report_at += REPORT_EVERY
    finally:
        reader.close()
    return unreadable


class _Decoder:
    """What a worker does: it writes the pixels of an image to their place in the file, whose descriptor it shares."""

    def __init__(self, file: int, files: ImageFiles, size: int, read: ImageReader) -> None:
        self.file, self.files, self.size, self.read = file, files.files, size, read

    def __getitems__(self, keys: list[Key]) -> tuple[int, list[str] | OSError]:
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
