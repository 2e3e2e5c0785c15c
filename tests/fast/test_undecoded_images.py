"""Images that cannot be decoded once: what is said, and that they are then read from their files."""

import logging
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.images import DecodedImages, ImageReader, UndecodedImages
from lockstep.errors import ConfigError
from support.decoding import SIZE, assert_current, decode, decoded, images, write_pictures


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_pictures(tmp_path)


def test_a_cut_file_of_pixels_is_not_used(root: Path) -> None:
    decode(root)
    os.truncate(decoded(root), 1000)
    assert isinstance(images(root), UndecodedImages)
    decode(root)
    assert_current(root)


def test_a_damaged_image_is_named_or_the_images_are_read_one_by_one(root: Path, caplog: Any) -> None:
    damaged = root / "train" / "cat" / "1.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    said = (
        r"1 of the images of .*train cannot be read, the first is .*cat/1.jpg: .*; remove it, or type loader.on_error"
    )
    with pytest.raises(ConfigError, match=said):
        decode(root)
    with caplog.at_level(logging.INFO):
        decode(root, on_error="skip")
    assert "train are decoded each time they are read: 1 of them cannot be read" in caplog.text
    assert isinstance(images(root), UndecodedImages)
    damaged.unlink()
    decode(root)
    assert_current(root)


def test_a_file_that_may_be_read_again_is_decoded(root: Path) -> None:
    forbidden = root / "train" / "cat" / "1.jpg"
    content, status = forbidden.read_bytes(), forbidden.stat()
    forbidden.write_bytes(bytes(len(content)))  # root may read any file, so this one holds no image
    forbidden.chmod(0)
    os.utime(forbidden, ns=(status.st_atime_ns, status.st_mtime_ns))
    decode(root, on_error="skip")
    assert isinstance(images(root), UndecodedImages)
    forbidden.chmod(status.st_mode)
    forbidden.write_bytes(content)
    os.utime(forbidden, ns=(status.st_atime_ns, status.st_mtime_ns))
    decode(root)
    assert_current(root)


class Killed(ImageReader):
    """Its process is killed while it decodes, as by a kernel without memory."""

    def __call__(self, path: Path) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_images_whose_decoder_is_killed_are_read_from_their_files(
    root: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.data.images.ImageReader", Killed)
    with caplog.at_level(logging.INFO):
        decode(root)
    assert re.search(r"each time they are read: DataLoader worker \(pid \d+\) is killed by signal: Killed", caplog.text)
    assert not list((root / "decoded").glob("train-*"))


def test_pixels_above_the_limit_are_not_kept(root: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        decode(root, limit=24 * 3 * SIZE**2 * 1e-9 - 1e-12)
    assert "they would take 4.61e-06 GB, and dataset.cache_limit is" in caplog.text
    assert isinstance(images(root), UndecodedImages)
    assert isinstance(images(root, split="test"), DecodedImages)


def test_on_a_full_disk_images_are_read_from_their_files(root: Path, caplog: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # 4608 bytes are needed
    try:
        with caplog.at_level(logging.INFO):
            decode(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "decoded cannot hold them (File too large)" in caplog.text
    assert isinstance(images(root), UndecodedImages)
    assert not list((root / "decoded").glob("train-*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 1e-9}, "they would take 4.61e-06 GB, and dataset.cache_limit is 1e-09"),
        ({"size": None}, "they keep their size"),
    ],
)
def test_what_cannot_be_decoded_once_is_refused_where_it_is_asked_for(root: Path, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"dataset.cache=on, but .*{said}; type dataset.cache=auto"):
        decode(root, "on", **options)
    with pytest.raises(
        ConfigError, match="are not in .*decoded; keep dataset.prepare as it is, or type dataset.cache=auto"
    ):
        images(root, "on")


def test_without_a_cache_nothing_is_written(root: Path) -> None:
    decode(root, "off")
    assert not (root / "decoded").exists()
