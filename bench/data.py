"""Reading images: folders of JPEGs beside torchvision's references, tars beside webdataset and mosaicml-streaming.

python bench/data.py [--quick] [--rounds=3] [--only=folders,tars,start]

folders: trainings of the same small net on the same made images with two workers, with and without decoded pixels on
disk. The first epoch of a run that decodes its images once includes that; the next run of the same data would not.
tars: samples/s of one epoch, the second one, decoded by the same function in two processes: two workers of a rank, or
one of each of two ranks. Without a training, so that the reading is seen. Packages that are not installed are left out;
mosaicml-streaming writes shards of its own.
start: seconds until the first batch of an index of 10^7 made-up samples, and the memory that a rank then has more.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import harness

CLASSES, EPOCHS, BATCH, SHARDS = 8, 3, 64, 16
COUNTS = {"folders": {32: 4096, 224: 512}, "tars": {32: 8192, 224: 1024}}  # training images by size; 1/8 for tests
MANY, PER_SHARD = 10_000_000, 10_000  # samples of the made-up index
WAYS = ["tar_shards", "image_folder", "webdataset", "streaming"]
Laps = list[float]
"""Seconds of training of each epoch."""


def make_images(root: Path, size: int, count: int) -> None:
    """JPEGs with as much detail as photos have: smooth colours and some noise."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(size)
    for split, images in (("train", count), ("test", count // 8)):
        for number in range(images):
            small = drawn.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC), dtype=np.int64)
            noisy = (smooth + drawn.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
            path = root / split / f"class{number % CLASSES}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noisy).save(path, quality=90)


def references(root: Path, size: int) -> Laps:
    script = [str(harness.CONTENDERS / "references_images.py"), f"--data={root}", f"--size={size}"]
    return laps_of([*script, f"--epochs={EPOCHS}", f"--batch={BATCH}"])


def lockstep(root: Path, size: int, cache: bool) -> Laps:
    """The time that decoding takes, of the tests' images, too, counts for the first epoch."""
    from lockstep.data.images import ImageFolders

    with tempfile.TemporaryDirectory() as decoded:
        same = ["dataset=image_folder", f"dataset.root={root}", f"dataset.size={size}", f"dataset.cache={cache}"]
        same += [f"trainer.epochs={EPOCHS}", f"trainer.batch_size={BATCH}", f"dataset.cache_dir={decoded}"]
        net = ["model._target_=workload.small_image_net", "optimizer.lr=0.1", "hydra.run.dir=run"]
        began = time.monotonic()
        ImageFolders(root=str(root), size=size, cache=cache, cache_dir=decoded).prepare()
        preparing = time.monotonic() - began
        workers = f"loader.num_workers={0 if cache else 2}"
        first, *later = laps_of([harness.TRAIN, *same, *net, workers, *harness.MEASURED])
        return [first + preparing, *later]


def laps_of(command: list[str]) -> Laps:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if code := harness.run_on_terminal([sys.executable, *command], folder):
            sys.exit(f"{command} ended with {code}:\n{(folder / 'console.log').read_text()}")
        return [lap["seconds"] for lap in harness.records(folder)[0]["training"]]


def folders(place: Path, rounds: int, quick: bool) -> str:
    rows = []
    for size, count, root in made_images("folders", place, quick):
        ways: dict[Any, Callable[[], Any]] = {
            "references": partial(references, root, size),
            "decoded once": partial(lockstep, root, size, True),
            "decoded each time": partial(lockstep, root, size, False),
        }
        theirs, *ours = harness.interleave(ways, rounds).items()
        for name, runs in ours:
            pairs = list(zip(theirs[1], runs, strict=True))
            first = [their[0] / own[0] for their, own in pairs]
            later = [statistics.median(their[1:]) / statistics.median(own[1:]) for their, own in pairs]
            rows.append([f"{size}x{size}, {count}", name, harness.spread(first), harness.spread(later)])
    return harness.table(["images", "Lockstep", "first epoch, samples/s against references", "later epochs"], rows)


def made_images(part: str, place: Path, quick: bool) -> Iterable[tuple[int, int, Path]]:
    for size, count in COUNTS[part].items():
        count //= 8 if quick else 1
        make_images(place / part / str(size), size, count)
        yield size, count, place / part / str(size)


def make_shards(root: Path) -> None:
    """The images of `root` in tars, and those of training in shards of mosaicml-streaming if it is installed."""
    files = images_of(root, "train")
    for shard in range(SHARDS):
        write_tar(root / f"train-{shard:03}.tar", files[shard::SHARDS])
    write_tar(root / "test-000.tar", images_of(root, "test"))
    if find_spec("streaming"):
        from streaming import MDSWriter

        size = sum(path.stat().st_size for path in files) // SHARDS
        with MDSWriter(out=str(root / "mds"), columns={"jpg": "bytes", "cls": "int"}, size_limit=size) as out:
            for path in files:
                out.write({"jpg": path.read_bytes(), "cls": int(path.parent.name.removeprefix("class"))})


def images_of(root: Path, split: str) -> list[Path]:
    return sorted((root / split).glob("*/*.jpg"), key=lambda path: int(path.stem))


def write_tar(place: Path, files: list[Path]) -> None:
    label = place.with_name("label")
    with tarfile.open(place, "w") as tar:
        for path in files:
            tar.add(path, f"{path.stem}.jpg")
            label.write_text(path.parent.name.removeprefix("class"))
            tar.add(label, f"{path.stem}.cls")


class Start:
    """The position of a training that begins."""

    epoch, samples = 0, 0


def tar_source(root: Path, inputs: str, size: int | None) -> Any:
    from lockstep.data.tar_shards import TarShards

    urls = {"urls": f"{root}/train-*.tar", "test_urls": f"{root}/test-*.tar", "val_urls": None}
    return TarShards(**urls, inputs=inputs, targets="cls", size=size, index_dir=str(root / "indexes"))


def loader_of(data: Any, workers: int, rank: int, ranks: int) -> Any:
    """A rank's loader of a training."""
    import torch

    from lockstep.data.loader import InputConverter, Loader
    from lockstep.data.partition import Order, parts
    from lockstep.data.reader import SampleReader
    from lockstep.data.source import of_each_sample

    shards = of_each_sample(data, "shards")
    order = Order(len(data), 0, shards=None if shards is None else torch.as_tensor(shards))
    reader, converter = SampleReader(data, "training data", seed=0), InputConverter(torch.float32)

    def own(number: int, count: int) -> Any:
        return parts(count, 1, rank, ranks)

    return Loader(reader, order, converter, torch.device("cpu"), 0, BATCH * ranks, own, (rank, ranks), workers=workers)


def epochs_of(way: str, root: Path, size: int, workers: int, rank: int, ranks: int) -> Callable[[], Iterable[Any]]:
    """What gives the batches of the next epoch."""
    import torch

    from lockstep.data.images import ImageFolders
    from lockstep.data.vision import read_image

    torch.set_num_threads(1)
    decode = partial(read_image, size=size)
    if way in ("tar_shards", "image_folder"):
        source = tar_source(root, "jpg", size)
        if way == "image_folder":
            source = ImageFolders(root=str(root), size=size, cache=False, cache_dir=str(root / f"lists{rank}"))
        source.prepare()
        data = source.splits().train
        endless = loader_of(data, workers, rank, ranks).batches(Start())
        return lambda: islice(endless, -(-len(data) // (BATCH * ranks)))
    if way == "webdataset":
        import webdataset

        urls = sorted(map(str, root.glob("train-*.tar")))
        stream = webdataset.WebDataset(urls, shardshuffle=SHARDS, nodesplitter=webdataset.split_by_node)
        stream = stream.shuffle(1000).to_tuple("jpg", "cls").map_tuple(decode, int).batched(BATCH)
        batches = webdataset.WebLoader(stream, batch_size=None, num_workers=workers, persistent_workers=True)
        return lambda: batches
    from streaming import StreamingDataset

    class Images(StreamingDataset):  # type: ignore[misc, unused-ignore]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return decode(sample["jpg"]), sample["cls"]

    images = Images(local=str(root / "mds"), shuffle=True, batch_size=BATCH)
    loaded = torch.utils.data.DataLoader(images, batch_size=BATCH, num_workers=workers, persistent_workers=True)
    return lambda: loaded


def measure_rank(way: str, root: str, size: str, workers: str, rank: str, ranks: str) -> None:
    """Print {"samples", "seconds"} of the second epoch."""
    import torch

    epoch = epochs_of(way, Path(root), int(size), int(workers), int(rank), int(ranks))
    for _ in range(2):
        begun, samples = time.monotonic(), 0
        for batch in epoch():
            if hasattr(batch, "parts"):
                samples += len(batch.parts[0].numbers)
            else:  # what Lockstep's loader gives: floats from 0 to 1
                samples += len(torch.as_tensor(batch[0]).float().mul_(1 / 255))
    print(json.dumps({"samples": samples, "seconds": time.monotonic() - begun}), flush=True)
    os._exit(0)


def speed(way: str, root: Path, size: int, ranks: int) -> float:
    """Samples/s of all ranks together."""
    from support.ports import free_port

    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(ranks):
        numbers = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        processes.append(process_of("rank", way, root, size, 2 // ranks, rank, ranks, **numbers))
    found = [result_of(process) for process in processes]
    return sum(one["samples"] for one in found) / max(one["seconds"] for one in found)


def process_of(*words: object, **env: str) -> Any:
    """This file in another process."""
    path = os.pathsep.join([str(harness.ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path} | env, stdout=subprocess.PIPE, text=True)


def result_of(process: Any) -> dict[str, float]:
    found: dict[str, float] = json.loads(process.communicate(timeout=600)[0].splitlines()[-1])
    return found


def tars(place: Path, rounds: int, quick: bool) -> str:
    ours, *others = [way for way in WAYS if way in ("tar_shards", "image_folder") or find_spec(way)]
    rows = []
    for size, count, root in made_images("tars", place, quick):
        make_shards(root)
        for ranks in (1, 2):
            found = harness.interleave({way: partial(speed, way, root, size, ranks) for way in (ours, *others)}, rounds)
            ratios = [[one / other for one, other in zip(found[ours], found[way], strict=True)] for way in others]
            rows.append([f"{size}x{size}, {count}", ranks, *map(harness.spread, [found[ours], *ratios])])
    return harness.table(["images", "ranks", "samples/s", *(f"against {way}" for way in others)], rows)


def make_large_index(root: Path) -> None:
    """Two tars of 10 MB, and an index of the first which says that it lies there a thousand times."""
    import torch

    (root / "1").write_text("1")
    for split in ("train", "test"):
        with tarfile.open(root / f"{split}-0.tar", "w") as tar:
            for number in range(PER_SHARD):
                tar.add(root / "1", f"{number}.cls")
    source = tar_source(root, "cls", None)
    source.prepare()
    _, place = next(source._indexes())
    index, times = torch.load(place), MANY // PER_SHARD
    columns = index["columns"].repeat(1, times)
    columns[0] = torch.arange(times).repeat_interleave(PER_SHARD)
    name, *about = index["tars"][0]
    found = [(f"{name}.{shard}", *about) for shard in range(times)]
    for other, *_ in found:
        os.link(name, other)
    torch.save({"tars": found, "columns": columns}, place)


def measure_start(root: str, held_out: str) -> None:
    """Print {"seconds", "MB"} of the first batch, of a process that has imported all it needs."""
    import torch

    from lockstep.data.split import hold_out

    torch.set_num_threads(1)
    source = tar_source(Path(root), "cls", None)
    before, begun = anonymous_memory(), time.monotonic()
    data = source.splits().train
    if held_out == "0.1":
        data, _ = hold_out(data, 0.1, None, 0, "auto")
    next(loader_of(data, 0, 1, 2).batches(Start()))
    print(json.dumps({"seconds": time.monotonic() - begun, "MB": (anonymous_memory() - before) / 1e6}), flush=True)


def anonymous_memory() -> int:
    """Bytes of this process's memory, without pages of files."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def start(place: Path, rounds: int, quick: bool) -> str:
    make_large_index(place)
    rows = []
    for held_out in ("null", "0.1"):
        found = [result_of(process_of("start", place, held_out)) for _ in range(rounds)]
        spreads = [harness.spread([one[key] for one in found]) for key in ("seconds", "MB")]
        rows.append([f"`loader.validation={held_out}`", *spreads])
    return harness.table([f"{MANY} samples in {MANY // PER_SHARD} shards", "s to the first batch", "MB more"], rows)


def main() -> None:
    parts = {part.__name__: part for part in (folders, tars, start)}
    args = harness.parse(harness.parser(__doc__, "data", tuple(parts), rounds=3))
    text = f"{harness.processor()}\n"
    with tempfile.TemporaryDirectory(prefix="lockstep-data-") as place:
        for part in args.only:
            text += f"\n{parts[part](Path(place), args.rounds, args.quick)}"
    print(text)
    harness.save(args.out, "data", text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure_rank(*sys.argv[2:])
    elif sys.argv[1:2] == ["start"]:
        measure_start(*sys.argv[2:])
    else:
        main()
