"""Reading shards: Lockstep, in turns with its folders of images, the webdataset package and mosaicml-streaming.

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
from pathlib import Path
from typing import Any

import harness
import numpy as np
from images import make_images

BATCH, SHARDS = 64, 16
COUNTS = {32: 8192, 224: 1024}
MANY, PER_SHARD = 10_000_000, 10_000  # samples of the made-up index
WAYS = ["shards", "image_folder", "webdataset", "streaming"]


def make_shards(root: Path) -> None:
    """The images of `root`/train in tar files, and in shards of mosaicml-streaming if it is installed."""
    files = sorted((root / "train").glob("*/*.jpg"), key=lambda path: int(path.stem))
    for shard in range(SHARDS):
        with tarfile.open(root / f"train-{shard:03}.tar", "w") as tar:
            for path in files[shard::SHARDS]:
                tar.add(path, f"{path.stem}.jpg")
                label = root / "label"
                label.write_text(path.parent.name.removeprefix("class"))
                tar.add(label, f"{path.stem}.cls")
    if find_spec("streaming"):
        from streaming import MDSWriter

        size = sum(path.stat().st_size for path in files) // SHARDS
        with MDSWriter(out=str(root / "mds"), columns={"jpg": "bytes", "cls": "int"}, size_limit=size) as out:
            for path in files:
                out.write({"jpg": path.read_bytes(), "cls": int(path.parent.name.removeprefix("class"))})


def epochs_of(way: str, root: Path, size: int, workers: int, rank: int, ranks: int) -> Callable[[int], Iterable[Any]]:
    """epoch number -> its batches."""
    import torch

    from lockstep.data.images import ImageReader

    torch.set_num_threads(1)
    read = ImageReader(size)
    if way in ("shards", "image_folder"):
        from lockstep.data.image_files import class_folders
        from lockstep.data.images import UndecodedImages
        from lockstep.data.loader import BatchLoader, Converter
        from lockstep.data.partition import micro_batch_parts
        from lockstep.data.samples import Samples
        from lockstep.data.shards import ShardFiles, shards

        if way == "shards":
            pattern = f"{root}/train-*.tar"
            files = ShardFiles(pattern, pattern, True, "auto", "jpg", "cls", str(root / "indexes"))
            files.index_once("fail")
            data: Any = shards(files, size, 1_000_000)
        else:
            data = UndecodedImages(class_folders(str(root), True, "test", None, None), size)
        loader = BatchLoader(Samples(data), Converter(torch.device("cpu")), rank, ranks, workers=workers)
        parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=ranks)
        return lambda epoch: loader.epoch(epoch, BATCH * ranks, parts)
    if way == "webdataset":
        import webdataset

        urls = sorted(map(str, root.glob("train-*.tar")))
        stream = webdataset.WebDataset(urls, shardshuffle=SHARDS, nodesplitter=webdataset.split_by_node)
        stream = stream.shuffle(1000).to_tuple("jpg", "cls").map_tuple(partial(_decoded, read), int).batched(BATCH)
        batches = webdataset.WebLoader(stream, batch_size=None, num_workers=workers, persistent_workers=True)
        return lambda epoch: batches
    from streaming import StreamingDataset

    class Images(StreamingDataset):  # type: ignore[misc, unused-ignore]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return _decoded(read, sample["jpg"]), sample["cls"]

    images = Images(local=str(root / "mds"), shuffle=True, batch_size=BATCH)
    loaded = torch.utils.data.DataLoader(images, batch_size=BATCH, num_workers=workers, persistent_workers=True)
    return lambda epoch: loaded


def _decoded(read: Any, stored: bytes) -> Any:
    return read(Path("a.jpg"), stored)


def measure_rank(way: str, root: str, size: str, workers: str, rank: str, ranks: str) -> None:
    """Print {"samples", "seconds"} of the second epoch."""
    import torch

    batches = epochs_of(way, Path(root), int(size), int(workers), int(rank), int(ranks))
    for epoch in range(2):
        begun, samples = time.monotonic(), 0
        for batch in batches(epoch):
            if hasattr(batch, "parts"):
                samples += len(batch.parts[0].indices)
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


def make_large_index(folder: Path) -> Path:
    """A tar of 10 MB, and an index which says that a thousand others like it lie beside it. Returns its pattern."""
    from lockstep.data.shards import ShardFiles

    with tarfile.open(folder / "train-0.tar", "w") as tar:
        (folder / "1").write_text("1")
        for number in range(PER_SHARD):
            tar.add(folder / "1", f"{number}.cls")
    pattern = folder / "train-0.tar"
    files = ShardFiles(str(pattern), str(pattern), True, "auto", "cls", "cls", str(folder / "indexes"))
    files.index_once("fail")
    times = MANY // PER_SHARD
    for column in ("begin", "length", "target"):
        values = np.fromfile(files.folder / column, np.int64)
        with open(files.folder / column, "wb") as file:
            for _ in range(times):
                values.tofile(file)
    (np.arange(times + 1, dtype=np.int64) * PER_SHARD).tofile(files.folder / "starts")
    about = files.about() or {}
    about |= {"shards": about["shards"] * times, "samples": MANY}
    (files.folder / "index.json").write_text(json.dumps(about))
    return pattern


def measure_start(pattern: str, held_out: str) -> None:
    """Print {"seconds", "MB"} of the first batch, of a process that has imported all it needs."""
    import torch

    from lockstep.data.loader import BatchLoader, Converter
    from lockstep.data.partition import micro_batch_parts
    from lockstep.data.samples import Samples
    from lockstep.data.shards import ShardFiles, shards
    from lockstep.data.split import Split, hold_out

    torch.set_num_threads(1)
    before, begun = _memory(), time.monotonic()
    folder = str(Path(pattern).parent / "indexes")
    data: Any = shards(ShardFiles(pattern, pattern, True, "auto", "cls", "cls", folder), None, 1_000_000)
    if held_out == "0.1":
        data = hold_out(data, Split(0.1, None, 0, "auto")).train
    loader = BatchLoader(Samples(data), Converter(torch.device("cpu")), 1, 2)
    next(loader.epoch(0, BATCH, partial(micro_batch_parts, accumulation_steps=1, rank=1, size=2)))
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
    ways = [way for way in WAYS if way in ("shards", "image_folder") or find_spec(way)]
    rows = []
    for size, count in COUNTS.items():
        count //= 8 if args.quick else 1
        root = folder / str(size)
        make_images(root, size, count)
        make_shards(root)
        for ranks in (1, 2):
            found = harness.interleave({way: partial(speed, way, root, size, ranks) for way in ways}, args.rounds)
            ratio = [[ours / theirs for ours, theirs in zip(found["shards"], found[way], strict=True)] for way in ways]
            row = [f"{size}x{size}, {count}", ranks, harness.spread(found["shards"])]
            rows.append([*row, *map(harness.spread, ratio[1:])])
    return harness.table(["images", "ranks", "samples/s", *(f"against {way}" for way in ways[1:])], rows)


def starts(folder: Path, args: Any) -> str:
    pattern = make_large_index(folder)

    def start(held_out: str) -> dict[str, float]:
        command = [sys.executable, __file__, "start", str(pattern), held_out]
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
