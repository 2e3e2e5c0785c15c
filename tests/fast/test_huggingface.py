"""dataset=huggingface: folders that the package `datasets` has written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
from PIL import Image

from lockstep.data.dataset import class_names
from lockstep.data.shards import HuggingFaceFiles, ShardFiles, Shards, shards
from lockstep.errors import ConfigError


def rows(count: int, first: int = 0) -> datasets.Dataset:
    """Row n has a grey picture of n, the class n % 2, and the token numbers n, n, n."""
    numbers = range(first, first + count)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["even", "odd"]),
            "ids": datasets.List(datasets.Value("int64")),
        }
    )
    columns = {
        "image": [Image.new("RGB", (8, 8), (number,) * 3) for number in numbers],
        "label": [number % 2 for number in numbers],
        "ids": [[number] * 3 for number in numbers],
    }
    return datasets.Dataset.from_dict(columns, features)


def saved(folder: Path) -> None:
    datasets.DatasetDict({"train": rows(30), "test": rows(8, 30)}).save_to_disk(
        folder, num_shards={"train": 3, "test": 1}
    )
    shutil.copy(folder / "test" / "data-00000-of-00001.arrow", folder / "train" / "cache-1234.arrow")  # as `map` does


def copied(folder: Path) -> None:
    """As a copy of a repository: <configuration>/train-00000-of-00003.parquet."""
    (folder / "train_and_test").mkdir(parents=True)
    for number in range(3):
        rows(10, 10 * number).to_parquet(
            folder / "train_and_test" / f"train-{number:05}-of-00003.parquet", batch_size=4
        )
    rows(8, 30).to_parquet(folder / "train_and_test" / "test-00000-of-00001.parquet")


def opened(folder: Path, train: bool, inputs: str = "image", **splits: str) -> Shards:
    names = {"train_split": "train", "test_split": "test"} | splits
    files = HuggingFaceFiles(
        str(folder), **names, train=train, inputs=inputs, targets="label", index_dir=f"{folder}.index"
    )
    files.index_once("fail")
    return shards(files, 8, 100)


@pytest.mark.parametrize("write", [saved, copied])
def test_each_row_is_read_as_datasets_reads_it(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "cache-of-mine" / "data_set")
    for is_train, expected in ((True, rows(30)), (False, rows(8, 30))):
        found = opened(tmp_path / "cache-of-mine" / "data_set", is_train)
        assert len(found) == len(expected)
        assert class_names(found) == ["even", "odd"]
        assert found.targets is not None
        assert found.targets.tolist() == list(expected["label"])
        for number, row in enumerate(expected):
            image, label = found[number]
            assert image.tolist() == [[[row["image"].getpixel((0, 0))[0]] * 8] * 8] * 3
            assert label == row["label"]
    assert opened(tmp_path / "cache-of-mine" / "data_set", True, "ids")[7] == ([7, 7, 7], 1)


def test_a_folder_or_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    copied(tmp_path / "data_set")
    with pytest.raises(
        ConfigError, match=r"dataset.path=imdb is no folder with .* nothing is downloaded; type hf downl"
    ):
        opened(Path("imdb"), True)
    with pytest.raises(ConfigError, match=r"the word dev of dataset.test_split .* such as .*test-00000-of-00001"):
        opened(tmp_path / "data_set", False, test_split="dev")
    with pytest.raises(OSError, match=r"it has no sound, but label"):
        opened(tmp_path / "data_set", True, "sound")[0]
    (tmp_path / "data_set" / "train.arrow").touch()
    with pytest.raises(ConfigError, match=r"dataset.path names shards of 2 kinds, .* \(arrow\); type dataset.path=<th"):
        opened(tmp_path / "data_set", True)


def test_a_stream_of_arrow_that_is_cut_is_named_and_a_file_of_arrow_is_read(tmp_path: Path) -> None:
    table = pyarrow.table({"values": [[1.0, 2.0], [3.0, 4.0]] * 500, "label": [0, 1] * 500})
    with pyarrow.ipc.new_file(tmp_path / "train.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=100)
    found = _of(tmp_path / "train.arrow", tmp_path)
    assert (len(found), found[501]) == (1000, ([3.0, 4.0], 1))
    assert torch.equal(found.targets if found.targets is not None else torch.empty(0), torch.arange(1000) % 2)
    assert found.classes is None
    with pyarrow.ipc.new_stream(tmp_path / "cut.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=100)
    whole = (tmp_path / "cut.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut.arrow is cut or damaged after [45]00 samples: row group [45] c"):
        _of(tmp_path / "cut.arrow", tmp_path)


def _of(path: Path, folder: Path) -> Shards:
    files = ShardFiles(str(path), str(path), True, "auto", "values", "label", str(folder / "indexes"))
    files.index_once("fail")
    return shards(files, None, 100)
