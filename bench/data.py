"""Reading images: folders of JPEGs beside torchvision's references, tars beside webdataset.

folders: trainings of the same small net on the same made images with two workers, with and without decoded pixels on
disk. tars: samples/s of the second epoch, without a training, decoded by the same function in two processes: two
workers of a rank, or one of each of two ranks. start: seconds until the first batch of an index of 10^7 made-up
samples, and the memory that a rank then has more.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from PIL import Image
from record import memory

from lockstep.data.images import ImageFolders
from lockstep.data.loader import InputConverter
from lockstep.data.source import of_each_sample
from lockstep.data.split import hold_out
from lockstep.data.tar_shards import TarSamples, TarShards
from lockstep.data.vision import read_image
from support.loaders import Position, loader
from support.worlds import in_world

CLASSES, EPOCHS, BATCH, SHARDS = 8, 3, 64, 16
COUNTS = {"folders": {32: 4096, 224: 512}, "tars": {32: 8192, 224: 1024}}  # training images by size; 1/8 for tests
MANY, PER_SHARD = 10_000_000, 10_000  # samples of the made-up index


def made_images(part: str, place: Path, quick: bool) -> Iterator[tuple[str, int, Path]]:
    """(their name in the table, size, folder): JPEGs with as much detail as photos have, smooth colours and noise."""
    for size, whole in COUNTS[part].items():
        count, root, drawn = whole // (8 if quick else 1), place / part / str(size), np.random.default_rng(size)
        for split, images in (("train", count), ("test", count // 8)):
            for number in range(images):
                small = Image.fromarray(drawn.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8))
                smooth = np.asarray(small.resize((size, size), Image.Resampling.BICUBIC), dtype=np.int64)
                noisy = (smooth + drawn.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
                path = root / split / f"class{number % CLASSES}" / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(noisy).save(path, quality=90)
        yield f"{size}x{size}, {count}", size, root


def seconds_of(*command: str) -> list[float]:
    """Of training in each epoch."""
    return [lap["seconds"] for lap in harness.recorded(*command)[0]["training"]]


def lockstep(root: Path, size: int, cache: bool) -> list[float]:
    """The time that decoding takes, of the tests' images, too, counts for the first epoch."""
    with tempfile.TemporaryDirectory() as decoded:
        own = ["dataset=image_folder", f"dataset.root={root}", f"dataset.size={size}", f"dataset.cache={cache}"]
        own += [f"dataset.cache_dir={decoded}", f"loader.num_workers={0 if cache else 2}", "optimizer.lr=0.1"]
        own += [f"trainer.epochs={EPOCHS}", f"trainer.batch_size={BATCH}", "model._target_=workload.small_image_net"]
        began = time.monotonic()
        ImageFolders(root=str(root), size=size, cache=cache, cache_dir=decoded).prepare()
        preparing = time.monotonic() - began
        first, *later = seconds_of(harness.TRAIN, *harness.MEASURED, *own)
        return [first + preparing, *later]


def folders(place: Path, rounds: int, quick: bool) -> str:
    rows = []
    for name, size, root in made_images("folders", place, quick):
        theirs = [str(harness.CONTENDERS / "references.py"), f"--images={root}", f"--size={size}"]
        ways = {"references": partial(seconds_of, *theirs, f"--epochs={EPOCHS}", f"--batch={BATCH}")}
        for way, cache in (("decoded once", True), ("decoded each time", False)):
            ways[way] = partial(lockstep, root, size, cache)
        found = harness.interleave(ways, rounds)
        firsts = {way: [run[0] for run in runs] for way, runs in found.items()}
        laters = {way: [statistics.median(run[1:]) for run in runs] for way, runs in found.items()}
        for way in list(ways)[1:]:
            ratios = [harness.ratios(seconds["references"], seconds[way]) for seconds in (firsts, laters)]
            rows.append([name, way, *ratios])
    return harness.table(["images", "Lockstep", "first epoch, samples/s against references", "later epochs"], rows)


def batches_of(data: Any, workers: int, rank: int, ranks: int) -> Iterator[Any]:
    """What a rank's loader gives from the begin of a training on."""
    shards = of_each_sample(data, "shards")
    shards = None if shards is None else torch.as_tensor(shards)
    found = loader(data, rank, ranks, batch=BATCH * ranks, shards=shards, workers=workers)
    return replace(found, converter=InputConverter(torch.float32)).batches(Position())


def measure_epoch(way: str, root: Path, size: int, ranks: int) -> tuple[int, float]:
    """In each rank: (samples, seconds) of the second epoch."""
    import webdataset

    torch.set_num_threads(1)
    rank, workers = int(os.environ["RANK"]), 2 // ranks
    if way == "webdataset":
        urls = sorted(map(str, root.glob("train-*.tar")))
        stream = webdataset.WebDataset(urls, shardshuffle=SHARDS, nodesplitter=webdataset.split_by_node)
        stream = stream.shuffle(1000).to_tuple("jpg", "cls").map_tuple(partial(read_image, size=size), int)
        stream, read = stream.batched(BATCH), {"num_workers": workers, "persistent_workers": True}
        theirs = webdataset.WebLoader(stream, batch_size=None, **read)

        def epoch() -> int:  # what Lockstep's loader gives: floats from 0 to 1
            return sum(len(torch.as_tensor(images).float().mul_(1 / 255)) for images, _ in theirs)

    else:
        source: Any = ImageFolders(root=str(root), size=size, cache=False, cache_dir=str(root / f"lists{rank}"))
        if way == "tar_shards":
            urls = {"urls": f"{root}/train-*.tar", "test_urls": f"{root}/test-*.tar", "val_urls": None}
            source = TarShards(**urls, inputs="jpg", targets="cls", size=size, index_dir=str(root / "indexes"))
        source.prepare()
        data = source.splits().train
        ours, count = batches_of(data, workers, rank, ranks), -(-len(data) // (BATCH * ranks))

        def epoch() -> int:
            return sum(len(batch.parts[0].numbers) for batch in islice(ours, count))

    epoch()
    began = time.monotonic()
    return epoch(), time.monotonic() - began


def tars(place: Path, rounds: int, quick: bool) -> str:
    import webdataset

    def speed(way: str, root: Path, size: int, ranks: int) -> float:
        samples, seconds = zip(*in_world(ranks, measure_epoch, way, root, size, ranks, limit=600), strict=True)
        return sum(samples) / max(seconds)

    rows, (own, *others) = [], ("tar_shards", "image_folder", "webdataset")
    for name, size, root in made_images("tars", place, quick):
        for split, shards in (("train", SHARDS), ("test", 1)):
            files = sorted(root.glob(f"{split}/*/*.jpg"), key=lambda path: int(path.stem))
            for shard in range(shards):
                with webdataset.TarWriter(str(root / f"{split}-{shard:03}.tar")) as tar:
                    for path in files[shard::shards]:
                        label = int(path.parent.name.removeprefix("class"))
                        tar.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": label})
        for ranks in (1, 2):
            ways = {way: partial(speed, way, root, size, ranks) for way in (own, *others)}
            found = harness.interleave(ways, rounds)
            ratios = [harness.ratios(found[own], found[way]) for way in others]
            rows.append([name, ranks, harness.spread(found[own]), *ratios])
    return harness.table(["images", "ranks", "samples/s", *(f"against {way}" for way in others)], rows)


def measure_start(index: Path, held_out: float | None) -> tuple[float, float]:
    """In a rank that has imported all it needs: (seconds, MB) of the first batch."""
    torch.set_num_threads(1)
    before, begun = memory()["own"], time.monotonic()
    data: Any = TarSamples(**torch.load(index, mmap=True), members=("cls", "cls"), size=None)
    if held_out:
        data, _ = hold_out(data, held_out, None, 0, "auto")
    next(batches_of(data, 0, 1, 2))
    return time.monotonic() - begun, memory()["own"] - before


def start(place: Path, rounds: int, quick: bool) -> str:
    shard, shards, rows = place / "1", MANY // PER_SHARD, []
    shard.write_bytes(b"1")
    columns = torch.ones(6, MANY, dtype=torch.int64)  # of each sample its shard, first bytes, lengths, and its class
    columns[0], columns[1], columns[3] = torch.arange(shards).repeat_interleave(PER_SHARD), 0, 0
    torch.save({"tars": [(str(shard), 1, "")] * shards, "columns": columns}, place / "index")
    for held_out in (None, 0.1):
        found = [in_world(1, measure_start, place / "index", held_out)[0] for _ in range(rounds)]
        rows.append([f"`loader.validation={held_out or 'null'}`", *map(harness.spread, zip(*found, strict=True))])
    return harness.table([f"{MANY} samples in {shards} shards", "s to the first batch", "MB more"], rows)


if __name__ == "__main__":
    harness.run_parts(__doc__, "data", 3, folders=folders, tars=tars, start=start)
