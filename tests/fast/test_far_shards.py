"""Shards on a server that is slow, fails requests and is gone for a while: the same batches, nothing lost, one line."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import micro_batch_parts
from lockstep.data.samples import Samples
from lockstep.data.shards import ShardFiles, Shards, shards
from lockstep.errors import ConfigError
from support.far_store import far_store
from support.shards import write_tars

torch = pytest.importorskip("torch")
pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
SIZES = [30, 45, 25]


def opened(urls: str, folder: Path, inputs: str = "npy", targets: str = "cls") -> Shards:
    files = ShardFiles(urls, urls, True, "auto", inputs, targets, str(folder / "indexes"))
    files.index_once("fail")
    return shards(files, None, 1000)


def epoch(dataset: Shards, workers: int = 0, rank: int = 0, size: int = 1) -> list[list[int]]:
    converter = Converter(torch.device("cpu"), torch.float64)
    read = BatchLoader(Samples(dataset, "training data", 3), converter, seed=3, workers=workers)
    parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=size)
    try:
        return [[int(row[0]) for row in batch.parts[0].inputs] for batch in read.epoch(0, 20, parts)]
    finally:
        read.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_fails_and_vanishes_changes_nothing(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_tars(tmp_path, "train", SIZES)
    expected = epoch(opened(f"{tmp_path}/train-*.tar", tmp_path))
    with far_store(tmp_path) as store:
        dataset = opened(f"{store.url}/train-{{000..002}}.tar", tmp_path)
        assert len(dataset) == sum(SIZES)
        before = store.sent
        timer = threading.Timer(0.05, store.vanish, [4.0])
        timer.start()
        begun = time.monotonic()
        assert epoch(dataset, workers) == expected
        assert time.monotonic() - begun > 4
        total = sum(path.stat().st_size for path in paths)
        if workers == 0:
            assert caplog.text.count("asking again for up to 100 s") == 1
            assert store.sent - before < 1.1 * total
        begun = time.monotonic()
        assert epoch(dataset, 0, 0, 2) == [batch[:10] for batch in expected]  # 50 requests of 10 ms
        assert time.monotonic() - begun < 5


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", [3])
    with far_store(tmp_path, fails=10**9) as store:
        with pytest.raises(ConfigError, match=r"the shard http://.*/gone.tar cannot be read .*; type dataset.urls="):
            opened(f"{store.url}/gone.tar", tmp_path)
        dataset = opened(f"{store.url}/train-000.tar", tmp_path)
        (tmp_path / "train-000.tar").unlink()
        with pytest.raises(FileNotFoundError, match=r"train-000.tar"):
            dataset[1]
    with pytest.raises(ConfigError, match=r"nothing://a.tar cannot be read \(Protocol not known: nothing"):
        opened("nothing://a.tar", tmp_path)


def test_a_server_without_ranges_is_named(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_tars(tmp_path, "train", [3])
    numbers = torch.rand(40_000, generator=torch.Generator().manual_seed(0))  # more than is read of it at once
    parquet.write_table(pyarrow.table({"x": numbers.numpy()}), tmp_path / "a.parquet")
    with far_store(tmp_path, fails=10**9, has_ranges=False) as store:
        with pytest.raises(OSError, match=r"the server of http://.*train-000.tar does not answer ranges \(\d+ bytes c"):
            opened(f"{store.url}/train-000.tar", tmp_path)[1]
        said = r"the shard http://.*a.parquet cannot be read \(the server of .* ranges .*; type dataset.urls=<those"
        with pytest.raises(ConfigError, match=said):
            opened(f"{store.url}/a.parquet", tmp_path, "x", "x")
