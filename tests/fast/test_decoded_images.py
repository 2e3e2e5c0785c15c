"""Images that are decoded once: the same bytes, never outdated, shared by ranks and runs."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.images import DecodedImages, UndecodedImages
from lockstep.data.loader import BatchLoader, Converter
from lockstep.snapshots.data_fingerprint import data_fingerprint
from support.commands import wait_for
from support.decoding import SIZE, assert_current, decode, decoded, images, save, write_pictures
from support.worlds import in_world


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_pictures(tmp_path)


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

    return Part(0, 0, batch)


def exchange(one: Path, other: Path) -> None:
    """The names of two files of one size and time."""
    for file in (one, other):
        file.write_bytes(file.read_bytes().ljust(5000, b"\0"))
        os.utime(file, ns=(1, 1))
    decode(one.parents[2])
    one.rename(one.with_suffix(".kept"))
    other.rename(one)
    one.with_suffix(".kept").rename(other)


def test_pixels_are_decoded_again_when_a_file_is_changed_added_removed_or_touched(root: Path) -> None:
    cats = root / "train" / "cat"
    changes = [
        lambda: None,
        lambda: save(cats / "0.jpg", width=50),
        lambda: save(cats / "new.jpg"),
        lambda: (cats / "1.jpg").unlink(),
        lambda: (cats / "2.jpg").rename(root / "train" / "dog" / "2b.jpg"),
        lambda: os.utime(cats / "3.jpg", ns=(1, 1)),
        lambda: exchange(cats / "4.jpg", cats / "5.jpg"),
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
    assert isinstance(images(root), UndecodedImages)
    assert len(list((root / "decoded").glob("*.tmp"))) == 1
    pipe.unlink()
    decode(root)
    assert_current(root)
    assert not list((root / "decoded").glob("*.tmp"))
