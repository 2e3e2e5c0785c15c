"""Samples in shards: each once an epoch, the same batches on any ranks, each rank its own bytes, and what is wrong."""

import os
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.data.loader import BatchLoader, Converter
from lockstep.data.partition import generator, micro_batch_parts
from lockstep.data.samples import SampleError, Samples
from lockstep.data.shard_store import expanded
from lockstep.data.shards import ShardFiles, Shards, WindowedOrder, index_shards, shards
from lockstep.data.split import Split, hold_out
from lockstep.errors import ConfigError
from support.refusals import accepted, answer
from support.shards import PIXELS, uneven, write_lines, write_parquet, write_tars
from support.worlds import in_world

BATCH = 30


def opened(urls: Any, folder: Path, inputs: Any = "npy", targets: Any = "cls", **options: Any) -> Shards:
    """The samples of these shards, with an index in `folder`."""
    files = ShardFiles(urls, urls, True, options.get("format", "auto"), inputs, targets, str(folder / "indexes"))
    files.index_once(options.get("on_error", "fail"))
    return shards(files, options.get("size"), options.get("window", 100))


def loader(dataset: Any, workers: int = 0, **options: Any) -> BatchLoader:
    converter = Converter(torch.device("cpu"), torch.float64, torch.contiguous_format, None, None)
    return BatchLoader(Samples(dataset, "training data", 3, **options), converter, seed=3, workers=workers)


def batches(dataset: Any, epoch: int, rank: int, size: int, skip: int = 0, workers: int = 0) -> list[list[int]]:
    """The numbers of the samples of this rank's part of each batch."""
    parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=size)
    with closing(loader(dataset, workers)) as read:
        return [[int(row[0]) for row in batch.parts[0].inputs] for batch in read.epoch(epoch, BATCH, parts, skip)]


def test_any_ranks_that_stop_anywhere_read_the_same_global_batches_and_each_sample_once(tmp_path: Path) -> None:
    sizes = uneven(64)
    write_tars(tmp_path, "train", sizes)
    dataset = opened(str(tmp_path / "train-*.tar"), tmp_path)
    assert len(dataset) == sum(sizes)
    alone = batches(dataset, 1, 0, 1)
    assert Counter(sum(alone, [])) == Counter(range(sum(sizes)))
    assert batches(dataset, 2, 0, 1) != alone
    stops = torch.randint(0, len(alone), (20,), generator=generator(0)).tolist()
    for size, stop in zip([1, 2, 3, 5, 8] * 4, stops, strict=True):  # killed before batch `stop`, and so resumed
        ranks = [batches(dataset, 1, rank, size, stop * BATCH) for rank in range(size)]
        assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == alone[stop:]
    with_workers = [batches(dataset, 1, rank, 2, workers=2) for rank in range(2)]
    assert [sum(parts, []) for parts in zip(*with_workers, strict=True)] == alone


def bytes_read(folder: str, size: int, rank: int) -> int:
    """What the operating system counts for the epoch of a rank."""
    dataset = opened(f"{folder}/train-*.tar", Path(folder))
    parts = partial(micro_batch_parts, accumulation_steps=1, rank=rank, size=size)
    read = loader(dataset)
    before = _read_by_this_process()
    for _ in read.epoch(0, BATCH, parts):
        pass
    return _read_by_this_process() - before


def _read_by_this_process() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def rank_bytes(folder: str, size: int) -> int:
    return bytes_read(folder, size, int(os.environ["RANK"]))


def test_a_rank_reads_its_share_of_the_bytes(tmp_path: Path) -> None:
    paths = write_tars(tmp_path, "train", [300] * 4)
    opened(f"{tmp_path}/train-*.tar", tmp_path)
    total = sum(path.stat().st_size for path in paths)
    shares = in_world(3, rank_bytes, str(tmp_path), 3)
    assert max(shares) < 1.1 * total / 3
    assert sum(shares) > 0.9 * total


def test_a_window_is_shuffled_whole_and_costs_no_list_of_all_samples() -> None:
    starts = torch.tensor([0, *[1000] * 100]).cumsum(0)
    order = WindowedOrder(starts, 10_000, generator(1, 2))
    whole = order[:100_000]
    assert torch.equal(whole.sort().values, torch.arange(100_000))
    assert torch.equal(order[54_321:54_400], whole[54_321:54_400])
    windows = whole.view(10, 10_000)
    assert all(len((window // 1000).unique()) == 10 for window in windows)
    # In a random order two samples in a row are of one shard of ten in every tenth case.
    same_shard = (windows[:, 1:] // 1000 == windows[:, :-1] // 1000).double().mean()
    assert abs(float(same_shard) - 0.1) < 0.005
    other = WindowedOrder(starts, 10_000, generator(1, 3))[:100_000]
    assert not torch.equal(other[:10_000].sort().values, windows[0].sort().values)
    assert WindowedOrder(starts, 10**9, generator(1, 2)).ends.tolist() == [100_000]


def test_validation_folds_and_classes(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", uneven(16))
    dataset = opened(str(tmp_path / "train-*.tar"), tmp_path)
    assert dataset.targets is not None
    assert torch.equal(dataset.targets, torch.arange(len(dataset)) % 2)
    held_out = [hold_out(dataset, Split(None, (fold, 3), 0, "auto")) for fold in range(3)]
    assert torch.cat([fold.numbers for fold in held_out]).sort().values.tolist() == list(range(len(dataset)))
    for fold in held_out:
        assert "by class" in fold.how
        trained = sum(batches(fold.train, 0, 0, 1), [])
        assert Counter(trained) == Counter(fold.train.numbers.tolist())
        assert trained != sorted(trained)


@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        ("jpg;npy", "cls", (torch.full((4,), 5.0), 1)),
        ("txt", "json.label", ("5", 1)),
        (["npy", "json.number"], "txt;cls", ((torch.full((4,), 5.0), 5), "5")),
        ("png", "json", (torch.full((3, PIXELS, PIXELS), 180), {"number": 5, "label": 1})),
    ],
)
def test_fields_are_chosen_by_name(tmp_path: Path, inputs: Any, targets: Any, expected: Any) -> None:
    write_tars(tmp_path, "train", [3, 4])
    sample = opened([str(tmp_path / "train-{000..001}.tar")], tmp_path, inputs, targets)[5]
    as_lists: Callable[[Any], Any] = lambda value: (  # noqa: E731
        [as_lists(part) for part in value] if isinstance(value, tuple) else getattr(value, "tolist", lambda: value)()
    )
    assert as_lists(sample) == as_lists(expected)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_tars_of_each_kind_with_long_names_and_folders(tmp_path: Path, format: int) -> None:
    name = "/".join(["a" * 60] * (2 if format == tarfile.USTAR_FORMAT else 4)) + "/ö"
    (tmp_path / "1").write_text("1")
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "train.tar", "w", format=format) as tar:
        for number in range(3):
            tar.add(tmp_path / "folder", f"folder{number}")
            tar.add(tmp_path / "1", f"{name}{number}.cls")
            tar.add(tmp_path / "1", f"{name}{number}.seg.txt")
    os.truncate(tmp_path / "train.tar", 2**20)  # as GNU tar writes it with --record-size=1M
    dataset = opened(str(tmp_path / "train.tar"), tmp_path, "seg.txt")
    assert [dataset[number] for number in range(len(dataset))] == [("1", 1)] * 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_lines_and_rows_are_samples_as_members_of_a_tar_are(tmp_path: Path, kind: str) -> None:
    sizes = [0, *uneven(8)] if kind == "jsonl" else uneven(8)
    (write_lines if kind == "jsonl" else write_parquet)(tmp_path, "train", sizes)
    write_tars(tmp_path, "train", sizes)
    dataset = opened(f"{tmp_path}/train-*.{kind}", tmp_path, "values", "about.label")
    assert dataset.targets is not None
    assert torch.equal(dataset.targets, torch.arange(sum(sizes)) % 2)
    assert dataset[5] == ([5.0] * 4, 1)
    assert dataset.classes is None
    ranks = [batches(dataset, 1, rank, 2, BATCH, workers=1) for rank in range(2)]
    alone = batches(opened(f"{tmp_path}/train-*.tar", tmp_path), 1, 0, 1) if kind == "parquet" else None
    numbers = [sum(parts, []) for parts in zip(*ranks, strict=True)]
    assert alone is None or numbers == alone[1:]
    assert sorted(sum(numbers, sum(batches(dataset, 1, 0, 1)[:1], []))) == list(range(sum(sizes)))


def test_pictures_in_a_column_and_columns_that_nothing_needs(tmp_path: Path) -> None:
    write_parquet(tmp_path, "train", [20])
    dataset = opened(f"{tmp_path}/train-*.parquet", tmp_path, "image", "about.label", size=PIXELS)
    assert torch.equal(dataset[3][0], torch.zeros(3, PIXELS, PIXELS, dtype=torch.uint8))
    assert set(dataset.format.fields(b"", dataset.stems[0], 0, 0)) == {"image", "about"}


def test_lines_and_parquet_that_are_cut_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = write_lines(tmp_path, "train", [4])
    cut(path, path.stat().st_size - 10)
    with pytest.raises(ConfigError, match=r"train-000.jsonl is cut or damaged after 3 samples: its last line, from by"):
        opened(f"{path}", tmp_path, "values", "about.label")
    (path,) = write_lines(tmp_path, "train", [4])
    path.write_text(path.read_text().replace('"values": [1.0', '"values": [1.0.'))
    dataset = opened(f"{path}", tmp_path, "values", "about.label")
    with pytest.raises(OSError, match=r"train-000.jsonl, bytes \d+ to \d+: Expecting ',' delimiter"):
        dataset[1]
    (path,) = write_parquet(tmp_path, "train", [4])
    cut(path, path.stat().st_size - 10)
    with pytest.raises(ConfigError, match="train-000.parquet is cut or damaged after 0 samples: Parquet magic bytes"):
        opened(f"{path}", tmp_path, "values", "about.label")
    whole, (path,) = write_parquet(tmp_path, "whole", [4])[0], write_parquet(tmp_path, "train", [4])
    stored = path.read_bytes()
    footer = int.from_bytes(stored[-8:-4], "little") + 8
    path.write_bytes(stored[:-footer] + b"\xff" * (footer - 8) + stored[-8:])
    with pytest.raises(ConfigError, match="train-000.parquet is cut or damaged after 0 samples: Couldn't deserialize"):
        opened(f"{path}", tmp_path, "values", "about.label")
    assert len(opened([f"{path}", f"{whole}"], tmp_path, "values", "about.label", on_error="skip")) == 4


def test_a_column_of_which_each_row_group_has_its_own_dictionary(tmp_path: Path) -> None:
    import pyarrow.parquet

    names = ["cat", "dog", "dog", "fox", "fox", "cat"]
    columns = [pyarrow.array(part).dictionary_encode() for part in (names[:3], names[3:])]
    parts = [pyarrow.table({"x": [0.0] * 3, "y": column}) for column in columns]
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", parts[0].schema) as file:
        for part in parts:
            file.write_table(part)
    dataset = opened(f"{tmp_path}/a.parquet", tmp_path, "x", "y")
    assert [dataset[number][1] for number in range(6)] == names


def test_patterns_name_shards_in_their_order(tmp_path: Path) -> None:
    assert expanded("a{08..10}{x,y}") == ["a08x", "a08y", "a09x", "a09y", "a10x", "a10y"]
    for name in ("b2", "b1"):
        (tmp_path / name).touch()
    assert expanded([f"{tmp_path}/b*", "c"]) == [f"{tmp_path}/b1", f"{tmp_path}/b2", "c"]


def test_an_index_is_made_once_and_again_when_a_shard_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pattern = str(tmp_path / "train-*.tar")
    write_tars(tmp_path, "train", [3, 4])
    first = opened(pattern, tmp_path)
    again = opened(pattern, tmp_path)
    assert caplog.text.count("counted 7 samples") == 1
    assert again.fingerprint == first.fingerprint
    write_tars(tmp_path, "train", [3, 5])
    with pytest.raises(OSError, match=r"train-001.tar has changed since its samples were counted"):
        first[5]
    other = opened(pattern, tmp_path)
    assert len(other) == 8
    assert other.fingerprint != first.fingerprint


def test_a_training_reads_its_own_rows_while_the_index_is_made_again(tmp_path: Path) -> None:
    fields, pattern = ("values", "about.label"), f"{tmp_path}/train-*.parquet"
    paths = write_parquet(tmp_path, "train", [5, 6, 7])
    running, other = (opened(pattern, tmp_path, *fields) for _ in range(2))
    assert running[0][0][0] == 0
    write_parquet(tmp_path, "train-000b", [8])
    assert len(opened(pattern, tmp_path, *fields)) == 26
    assert [running[number][0][0] for number in range(18)] == list(range(18))
    paths[1].write_bytes(paths[2].read_bytes())
    opened(pattern, tmp_path, *fields)
    with pytest.raises(OSError, match=r"train-001.parquet, .* it has changed since its samples were counted; type the"):
        other[5]
    assert other[11][0][0] == 11


def test_a_shard_that_is_written_again_in_its_place_is_not_read(tmp_path: Path) -> None:
    (path,) = write_lines(tmp_path, "train", [4])
    dataset = opened(f"{path}", tmp_path, "values", "about.label")
    assert dataset[1] == ([1.0] * 4, 1)
    path.write_text(path.read_text().replace("1.0", "7.0"))
    with pytest.raises(OSError, match=r"train-000.jsonl has changed since its samples were counted; type the command"):
        dataset[1]


@pytest.mark.parametrize(("kind", "fields"), [("tar", ("npy", "json.label")), ("parquet", ("values", "about.label"))])
def test_only_shards_that_are_new_or_have_changed_are_counted_again(
    tmp_path: Path, kind: str, fields: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write = write_tars if kind == "tar" else write_parquet
    pattern = f"{tmp_path}/train-*.{kind}"
    paths = write(tmp_path, "train", [9, 8, 7, 6])
    kept, status = paths[2].read_bytes(), paths[2].stat()
    opened(pattern, tmp_path, *fields)
    paths[0].unlink()
    write(tmp_path, "train-003b", [5])
    paths[3].write_bytes(paths[1].read_bytes())
    paths[2].write_bytes(b"x" * len(kept))  # it would be noticed if it were read
    os.utime(paths[2], ns=(status.st_mtime_ns, status.st_mtime_ns))
    dataset = opened(pattern, tmp_path, *fields)
    assert "of 2 of 4 shards once" in caplog.text
    paths[2].write_bytes(kept)
    os.utime(paths[2], ns=(status.st_mtime_ns, status.st_mtime_ns))
    (tmp_path / "other").mkdir()
    anew = opened(pattern, tmp_path / "other", *fields)
    assert dataset.fingerprint == anew.fingerprint
    assert dataset.targets is not None
    assert anew.targets is not None
    assert torch.equal(dataset.targets, anew.targets)
    samples = [list(dataset[number][0]) for number in range(len(dataset))]
    assert samples == [list(anew[number][0]) for number in range(len(anew))]
    assert [sample[0] for sample in samples] == [*range(9, 24), *range(9, 17), *range(5)]
    paths[1].unlink()
    assert len(opened(pattern, tmp_path, *fields)) == 20
    assert "of 0 of 3 shards once" in caplog.text


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def with_hole(path: Path) -> bytes:
    return path.read_bytes()[:5120] + bytes(5120) + path.read_bytes()[10240:]


WRONG: Sequence[tuple[Callable[[Path], object], str]] = [
    (lambda path: cut(path, 9740), r"train-001.tar is cut or damaged after 1 samples: some/folder/.* ends at byte"),
    (lambda path: cut(path, 5120), r"train-001.tar is cut or damaged after 0 samples: it ends at byte 5120 without"),
    (lambda path: path.write_bytes(b"x" * 2000), r"train-001.tar is cut or damaged after 0 samples: no header of a"),
    (
        lambda path: path.write_bytes(2 * path.read_bytes()),
        r"after 3 samples: zeros from byte 20480 on .* byte 30720: ",
    ),
    (lambda path: path.write_bytes(with_hole(path)), r"after 0 samples: zeros from byte 5120 on .* at byte 10240: "),
    (
        lambda path: [cut(path, size) for size in (9740, 2**21)],
        r"after 1 samples: from byte 10240 on it has over 1 MiB",
    ),
]


@pytest.mark.parametrize(("damage", "said"), WRONG)
def test_a_shard_that_is_cut_is_named_or_used_as_far_as_it_is_whole(
    tmp_path: Path, damage: Callable[[Path], object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(write_tars(tmp_path, "train", [3, 4, 2])[1])
    pattern = str(tmp_path / "train-*.tar")
    for _ in range(2):  # an index is there the second time
        with pytest.raises(ConfigError, match=f"{said}.*type loader.on_error=skip"):
            opened(pattern, tmp_path)
    skipping = opened(pattern, tmp_path, on_error="skip")
    assert len(skipping) == 5 + int(said.partition("after ")[2][0])
    assert "what is whole before that place is used" in caplog.text


def test_a_shard_that_goes_away_is_named_with_the_sample_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_tars(tmp_path, "train", [3, 4, 2])
    dataset = opened(str(tmp_path / "train-*.tar"), tmp_path)
    paths[1].unlink()
    failing = Samples(dataset, "training data", 3)
    with pytest.raises(SampleError, match=r"sample 4 of the training data cannot be read: .*train-001.tar"):
        failing.read([(0, 4, 0)])
    assert len(evaluated(loader(dataset, on_error="skip"))) == 5
    assert "sample 4 of the training data cannot be read" in caplog.text
    assert "it is left out" in caplog.text


def test_more_samples_in_a_row_than_are_tried_are_skipped_on_all_ranks_alike(tmp_path: Path) -> None:
    paths = write_lines(tmp_path, "train", [300, 300])
    dataset, other = (opened(f"{tmp_path}/train-*.jsonl", tmp_path, "values", "about.label") for _ in range(2))
    paths[1].unlink()
    keys = [(0, number, 0) for number in range(600)]
    numbers = Samples(dataset, "training data", 3, on_error="skip").read(keys).numbers
    assert numbers[:300] == list(range(300))
    assert max(numbers) < 300
    again = Samples(dataset, "training data", 3, on_error="skip")  # as a rank that reads a part of them
    assert again.read(keys[301::2]).numbers == numbers[301::2]
    paths[0].unlink()
    with pytest.raises(ConfigError, match="none of 100 samples of the training data that were tried can be read; "):
        Samples(other, "training data", 3, on_error="skip").read(keys[:1])


def evaluated(read: BatchLoader) -> Tensor:
    return torch.cat([targets for _, targets in read.eval_batches(4)])


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", [3])
    dataset = opened(str(tmp_path / "train-*.tar"), tmp_path, inputs="jpg")
    with pytest.raises(OSError, match=r"train-000.tar, bytes 0 to \d+: it has no jpg, but png, npy, cls, txt, json"):
        dataset[0]
    assert opened(str(tmp_path / "train-*.tar"), tmp_path, targets="txt").targets is None


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ("none-*.tar", r"dataset.urls=none-\*.tar names no file .*; type dataset.urls="),
        ("none.tar", r"the shard .*none.tar cannot be read \(No such file or directory\); type dataset.urls="),
        (__file__, r"the end of .*test_shards.py does not say what it is; type dataset.format=tar"),
    ],
)
def test_shards_that_cannot_be_are_refused(tmp_path: Path, urls: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(urls, tmp_path)


@pytest.mark.parametrize("again", ["train-001.jsonl", "./train-001.jsonl", "../data/train-001.jsonl", "train-*1.jsonl"])
def test_a_shard_that_is_named_twice_is_refused(tmp_path: Path, again: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder, "train", [3, 4])
    pattern, index = f"{folder}/train-*.jsonl", str(tmp_path / "indexes")
    said = r"the shard .*data/train-001.jsonl is named by dataset.urls and again by dataset.{}, .*; type dataset.urls="

    def part(urls: Any, test_urls: str, half: bool) -> ShardFiles:
        return ShardFiles(urls, test_urls, half, "auto", "values", "cls", index)

    with pytest.raises(ConfigError, match=said.format("urls")):
        index_shards(part([pattern, f"{folder}/{again}"], "", True), part("", "", False), "fail", None)
    test = part("", f"{folder}/{again}", False)
    with pytest.raises(ConfigError, match=said.format("test_urls")):
        index_shards(part(pattern, "", True), test, "fail", None)
    assert not list(tmp_path.glob("indexes/*"))  # it is said before they are read
    index_shards(test, test, "fail", None)  # mode=evaluate dataset.train='${dataset.test}'


def test_shards_are_typed_as_one_pattern_or_as_a_list() -> None:
    assert accepted("dataset=shards", "dataset.urls=a-*.tar").dataset.train["files"]["urls"] == "a-*.tar"
    assert accepted("dataset=shards", "dataset.urls=[a.tar,b.tar]").dataset.train["files"]["urls"] == ["a.tar", "b.tar"]
    assert "urls=3 should be a valid string or a valid array; type " in str(answer("dataset=shards", "dataset.urls=3"))


def test_an_index_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", [3])
    opened(f"{tmp_path}/train-*.tar", tmp_path)
    (tmp_path / "indexes" / ".index.lock").unlink()
    (tmp_path / "indexes" / ".index.lock").mkdir()  # as root, a read-only folder can be written to
    assert len(opened(f"{tmp_path}/train-*.tar", tmp_path)) == 3
    with pytest.raises(ConfigError, match=r"cannot be made in .*; type dataset.index_dir=<a folder with room that"):
        opened(f"{tmp_path}/train-0*.tar", tmp_path)


def test_what_is_not_counted_is_refused(tmp_path: Path) -> None:
    files = ShardFiles("train.tar", "test.tar", True, "auto", "jpg", "cls", str(tmp_path))
    with pytest.raises(ConfigError, match="the samples of dataset.train are not counted in .*; keep dataset.prepare"):
        shards(files, None, 100)
