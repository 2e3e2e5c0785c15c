"""Downloads by a torchvision that is played by the test: there is no network here."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.data.download import download
from lockstep.errors import ConfigError
from support.worlds import in_world

LAST_FILE = Path("MNIST/raw/t10k-labels-idx1-ubyte")


def slow_download(root: str, train: bool, download: bool) -> None:
    """Takes 0.3 s. Notes its start, and fails if another one is running."""
    folder = Path(root)
    with open(folder / "started", "a") as file:
        file.write(".")
    (folder / "running").touch(exist_ok=False)
    time.sleep(0.3)
    (folder / LAST_FILE).parent.mkdir(parents=True)
    (folder / LAST_FILE).touch()
    (folder / "running").unlink()


def torchvision_with(function: Any) -> SimpleNamespace:
    return SimpleNamespace(datasets=SimpleNamespace(MNIST=function, CIFAR10=function))


def download_as_a_node(data_dir: str) -> bool:
    """What the first rank of a machine does. Returns whether the data set was there when it was done."""
    sys.modules["torchvision"] = torchvision_with(slow_download)  # type: ignore[assignment]
    download(data_dir, "MNIST")
    return (Path(data_dir) / LAST_FILE).exists()


def test_machines_that_share_a_folder_download_once_and_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert in_world(3, download_as_a_node, str(folder)) == [True] * 3
    assert (folder / "started").read_text() == "."


def no_network(root: str, train: bool, download: bool) -> None:
    (Path(root) / "MNIST" / "raw").mkdir(parents=True)
    raise OSError("no route to host\nand more")


def test_a_failed_download_says_so_and_leaves_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with(no_network))
    said = r"MNIST is not in data_dir=.*cannot be downloaded \(no route to host\); type data_dir=.*or dataset=digits"
    with pytest.raises(ConfigError, match=said):
        download(str(tmp_path / "new"), "MNIST")
    assert not (tmp_path / "new").exists()


def test_a_failed_download_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with(no_network))
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigError):
        download(str(tmp_path), "MNIST")
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize(("name", "last"), [("MNIST", LAST_FILE), ("CIFAR10", Path("cifar-10-batches-py/test_batch"))])
def test_data_that_is_there_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, last: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with(no_network))
    (tmp_path / last).parent.mkdir(parents=True)
    (tmp_path / last).touch()
    download(str(tmp_path), name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [last.parts[0]]
