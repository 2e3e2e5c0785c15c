"""Images that are decoded once: the same bytes, never outdated, whole or not at all, shared by ranks and runs."""

import logging
import multiprocessing
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lockstep.data.converter import Converter
from lockstep.data.decode import decode_images
from lockstep.data.decoded_images import DecodedImages, image_folder
from lockstep.data.image_folder import ImageFolder
from lockstep.data.image_reader import ImageReader
from lockstep.data.loader import BatchLoader
from lockstep.errors import ConfigError
from lockstep.snapshots.data_fingerprint import data_fingerprint, file_times
from support.commands import wait_for
from support.worlds import in_world

SIZE = 8


def save(path: Path, mode: str = "RGB", width: int = 20, height: int = 30) -> None:
    """Noise, so that every step of decoding shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(map(ord, f"{path.parent.name}{path.name}"))
    channels = len(Image.new(mode, (1, 1)).getbands())
    noise = torch.randint(0, 256, (height * width * channels,), generator=torch.Generator().manual_seed(seed))
    Image.frombytes(mode, (width, height), bytes(noise.tolist())).save(path, quality=70)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """24 training and 4 test images of two classes: JPEGs and others, of several modes and sizes."""
    for number in range(10):
        for name in ("cat", "dog"):
            save(tmp_path / "train" / name / f"{number}.jpg", width=10 + number)
    for name, mode in {"grey.jpg": "L", "print.jpg": "CMYK", "glass.png": "RGBA", "exact.jpg": "RGB"}.items():
        exact = SIZE if name == "exact.jpg" else 30
        save(tmp_path / "train" / "cat" / name, mode, width=exact, height=exact)
    for number in range(4):
        save(tmp_path / "test" / "dog" / f"{number}.jpg")
    return tmp_path


def decode(root: Path, cache: str = "auto", limit: float = 1, on_error: str = "fail", size: int | None = SIZE) -> None:
    decode_images(str(root), "test", size, size, None, cache, str(root / "decoded"), limit, on_error)


def images(root: Path, cache: str = "auto", split: str = "train", size: int | None = SIZE) -> Any:
    return image_folder(str(root), split, size, None, cache, str(root / "decoded"))


def decoded(root: Path) -> Path:
    """The one file of training pixels."""
    (path,) = (root / "decoded").glob("train-*.pixels")
    return path


def assert_current(root: Path) -> None:
    """The decoded images are what is read from the files now."""
    read, found = images(root, "off"), images(root, "on")
    assert isinstance(read, ImageFolder)
    assert isinstance(found, DecodedImages)
    assert len(found) == len(read)
    for index in range(len(read)):
        assert torch.equal(found[index][0], read[index][0])
        assert found[index][1] == read[index][1]


def test_decoded_images_are_those_that_are_read_from_files(root: Path) -> None:
    decode(root)
    assert_current(root)
    read, found = images(root, "off"), images(root)
    assert (found.classes, found.samples.shape, found.samples.dtype) == (
        ["cat", "dog"],
        (24, 3, SIZE, SIZE),
        torch.uint8,
    )
    assert data_fingerprint(found) == data_fingerprint(read)  # a run may go on with or without them
    assert file_times(found) == file_times(read)


def test_epochs_and_evaluations_have_the_same_samples_without_workers(root: Path) -> None:
    decode(root)
    converter = Converter(torch.device("cpu"), torch.float64, mean=[0.5] * 3, std=[0.2] * 3)
    seen = []
    for data in (images(root), images(root, "off")):
        loader = BatchLoader(data, converter, workers=0)
        batches = [*loader.epoch(3, 5, lambda batch: [_part(batch)])]
        seen.append([*(batch.parts[0].inputs for batch in batches), *(inputs for inputs, _ in loader.eval_batches(7))])
    assert len(seen[0]) == 5 + 4
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def _part(batch: torch.Tensor) -> Any:
    from lockstep.data.partition import Part

    return Part(0, batch)


def test_pixels_are_decoded_again_when_a_file_is_changed_added_removed_or_touched(root: Path) -> None:
    cats = root / "train" / "cat"
    changes = [
        lambda: None,
        lambda: save(cats / "0.jpg", width=50),
        lambda: save(cats / "new.jpg"),
        lambda: (cats / "1.jpg").unlink(),
        lambda: (cats / "2.jpg").rename(root / "train" / "dog" / "2b.jpg"),
        lambda: os.utime(cats / "3.jpg", ns=(1, 1)),
    ]
    names = set()
    for change in changes:
        change()
        decode(root)
        assert_current(root)
        names.add(decoded(root).name)  # what was there before is swept
    assert len(names) == len(changes)
    kept = decoded(root).stat().st_mtime_ns
    decode(root)
    assert decoded(root).stat().st_mtime_ns == kept


def test_another_size_has_a_file_of_its_own_and_what_a_run_uses_is_not_removed(root: Path) -> None:
    decode(root)
    used = images(root)
    decode(root, size=4)
    save(root / "train" / "cat" / "0.jpg", width=50)
    decode(root)
    assert len(list((root / "decoded").glob("train-*.pixels"))) == 3
    del used
    save(root / "train" / "cat" / "0.jpg", width=60)
    decode(root)
    assert len(list((root / "decoded").glob("train-*.pixels"))) == 2


def decode_in_a_world(root: str) -> tuple[bool, int]:
    """What ranks do: the first decodes, all of them map the file."""
    from lockstep.distributed.world import init_distributed

    with init_distributed("gloo", 60) as world:
        world.once_per_machine(lambda: decode(Path(root)))
        found = images(Path(root), "on")
    return isinstance(found, DecodedImages), int(found.samples.sum())


def test_only_files_of_its_own_are_swept(root: Path) -> None:
    (root / "decoded").mkdir()
    for name in ("mine.tmp", "killed.pixels.tmp"):
        (root / "decoded" / name).touch()
    decode(root)
    assert [path.name for path in (root / "decoded").glob("*.tmp")] == ["mine.tmp"]


def test_ranks_share_one_file(root: Path) -> None:
    assert len(set(in_world(3, decode_in_a_world, str(root)))) == 1
    assert sorted(path.name.split("-")[0] for path in (root / "decoded").iterdir()) == [".decode.lock", "test", "train"]


def test_a_killed_decoder_leaves_nothing_that_is_taken_for_whole(root: Path) -> None:
    pipe = root / "train" / "dog" / "99.jpg"
    os.mkfifo(pipe)  # reading it waits: the decoder is in the middle of its work
    killed = multiprocessing.get_context("spawn").Process(target=decode, args=(root,))
    killed.start()
    wait_for(lambda: list((root / "decoded").glob("*.tmp")), "begun file")
    killed.kill()
    killed.join()
    assert isinstance(images(root), ImageFolder)
    assert len(list((root / "decoded").glob("*.tmp"))) == 1
    pipe.unlink()
    decode(root)
    assert_current(root)
    assert not list((root / "decoded").glob("*.tmp"))


def test_a_cut_file_of_pixels_is_not_used(root: Path) -> None:
    decode(root)
    os.truncate(decoded(root), 1000)
    assert isinstance(images(root), ImageFolder)
    decode(root)
    assert_current(root)


def test_a_damaged_image_is_named_or_the_images_are_read_one_by_one(root: Path, caplog: Any) -> None:
    damaged = root / "train" / "cat" / "1.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    said = (
        r"1 of the images of .*train cannot be read, the first is .*cat/1.jpg: .*; remove it, or type dataset.on_error"
    )
    with pytest.raises(ConfigError, match=said):
        decode(root)
    with caplog.at_level(logging.INFO):
        decode(root, on_error="skip")
    assert "train are decoded each time they are read: 1 of them cannot be read" in caplog.text
    assert isinstance(images(root), ImageFolder)
    damaged.unlink()
    decode(root)
    assert_current(root)


def test_a_file_that_may_be_read_again_is_decoded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = root / "train" / "cat" / "1.jpg"
    content = forbidden.read_bytes()
    status = forbidden.stat()
    with monkeypatch.context() as context:  # root may read all files
        context.setattr(os, "access", lambda path, mode: Path(path) != forbidden)
        forbidden.write_bytes(bytes(len(content)))
        os.utime(forbidden, ns=(status.st_atime_ns, status.st_mtime_ns))
        decode(root, on_error="skip")
        assert isinstance(images(root), ImageFolder)
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
    monkeypatch.setattr("lockstep.data.decode.ImageReader", Killed)
    with caplog.at_level(logging.INFO):
        decode(root)
    assert re.search(r"each time they are read: DataLoader worker \(pid \d+\) is killed by signal: Killed", caplog.text)
    assert not list((root / "decoded").glob("train-*"))


def test_pixels_above_the_limit_are_not_kept(root: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        decode(root, limit=24 * 3 * SIZE**2 * 1e-9 - 1e-12)
    assert "they would take 4.61e-06 GB, and dataset.cache_limit is" in caplog.text
    assert isinstance(images(root), ImageFolder)
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
    assert isinstance(images(root), ImageFolder)
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
