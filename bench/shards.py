"""Reading tars: Lockstep, in turns with its folders of images, the webdataset package and mosaicml-streaming.

python bench/shards.py [--quick] [--rounds=3] [--only=speed,start]

speed: samples/s of one epoch, the second one, of the same made JPEGs, decoded by the same function in two processes:
two workers of a rank, or one of each of two ranks. Without a training, so that the reading is seen.
start: seconds until the first batch of an index of 10^7 made-up samples, and the memory that a rank then has more.
mosaicml-streaming and webdataset are measured if they are installed; the first one writes shards of its own.
"""

import json
import os
import re
import shutil
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
from images import make_images

BATCH, SHARDS = 64, 16
COUNTS = {32: 8192, 224: 1024}
MANY, PER_SHARD = 10_000_000, 10_000  # samples of the made-up index
WAYS = ["tar_shards", "image_folder", "webdataset", "streaming"]


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

    from lockstep.data.vision import read_image

    torch.set_num_threads(1)
    decode = partial(read_image, size=size)
    if way in ("tar_shards", "image_folder"):
        from lockstep.data.images import ImageFolders

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
        command = [sys.executable, __file__, "rank", way, root, size, 2 // ranks, rank, ranks]
        paths = os.pathsep.join([str(harness.ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        numbers = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        env = os.environ | numbers | {"PYTHONPATH": paths}
        processes.append(subprocess.Popen(list(map(str, command)), env=env, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]
    return sum(one["samples"] for one in found) / max(one["seconds"] for one in found)


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
    tars = [(f"{name}.{shard}", *about) for shard in range(times)]
    for other, *_ in tars:
        os.link(name, other)
    torch.save({"tars": tars, "columns": columns}, place)


def measure_start(root: str, held_out: str) -> None:
    """Print {"seconds", "MB"} of the first batch, of a process that has imported all it needs."""
    import torch

    from lockstep.data.split import hold_out

    torch.set_num_threads(1)
    source = tar_source(Path(root), "cls", None)
    before, begun = _memory(), time.monotonic()
    data = source.splits().train
    if held_out == "0.1":
        data, _ = hold_out(data, 0.1, None, 0, "auto")
    next(loader_of(data, 0, 1, 2).batches(Start()))
    print(json.dumps({"seconds": time.monotonic() - begun, "MB": (_memory() - before) / 1e6}), flush=True)


def _memory() -> int:
    """Bytes of this process's memory, without pages of files."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    args = harness.parse(harness.parser(__doc__ or "", "shards", parts=("speed", "start"), rounds=3))
    text = f"{harness.processor()}\n"
    folder = Path(tempfile.mkdtemp(prefix="lockstep-shards-"))
    try:
        if "speed" in args.only:
            text += f"\n{speeds(folder, args)}"
        if "start" in args.only:
            text += f"\n{starts(folder, args)}"
    finally:
        shutil.rmtree(folder)
    harness.save(args.out, "shards", text)


def speeds(folder: Path, args: Any) -> str:
    ours, *others = [way for way in WAYS if way in ("tar_shards", "image_folder") or find_spec(way)]
    rows = []
    for size, count in COUNTS.items():
        count //= 8 if args.quick else 1
        root = folder / str(size)
        make_images(root, size, count)
        make_shards(root)
        for ranks in (1, 2):
            ways = {way: partial(speed, way, root, size, ranks) for way in (ours, *others)}
            found = harness.interleave(ways, args.rounds)
            ratios = [[one / other for one, other in zip(found[ours], found[way], strict=True)] for way in others]
            rows.append([f"{size}x{size}, {count}", ranks, *map(harness.spread, [found[ours], *ratios])])
    return harness.table(["images", "ranks", "samples/s", *(f"against {way}" for way in others)], rows)


def starts(folder: Path, args: Any) -> str:
    make_large_index(folder)

    def start(held_out: str) -> dict[str, float]:
        command = [sys.executable, __file__, "start", str(folder), held_out]
        env = os.environ | {"PYTHONPATH": str(harness.ROOT / "src")}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    rows = []
    for held_out in ("null", "0.1"):
        found = [start(held_out) for _ in range(args.rounds)]
        spreads = [harness.spread([one[key] for one in found]) for key in ("seconds", "MB")]
        rows.append([f"`loader.validation={held_out}`", *spreads])
    return harness.table([f"{MANY} samples in {MANY // PER_SHARD} shards", "s to the first batch", "MB more"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure_rank(*sys.argv[2:])
    elif sys.argv[1:2] == ["start"]:
        measure_start(*sys.argv[2:])
    else:
        main()
