"""Downloads by a torchvision that is played by the test: there is no network here."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.data.builtin import LOCK, download, mnist, one_at_a_time
from lockstep.errors import ConfigError
from support.small_data import write_idx, write_small_data
from support.worlds import in_world

RAW = Path("MNIST/raw")


def slow_download(root: str, train: bool, download: bool) -> None:
    """Takes 0.3 s. Notes its start, and fails if another one is running."""
    folder = Path(root)
    with open(folder / "started", "a") as file:
        file.write(".")
    (folder / "running").touch(exist_ok=False)
    time.sleep(0.3)
    write_idx(folder / RAW, 3, 2)
    (folder / "running").unlink()


def torchvision_with(function: Any) -> SimpleNamespace:
    return SimpleNamespace(datasets=SimpleNamespace(MNIST=function, CIFAR10=function))


def download_as_a_node(data_dir: str) -> bool:
    """What the first rank of a machine does. Returns whether the data set was there when it was done."""
    sys.modules["torchvision"] = torchvision_with(slow_download)  # type: ignore[assignment]
    download(data_dir, "MNIST")
    return len(list((Path(data_dir) / RAW).iterdir())) == 4


def test_machines_that_share_a_folder_download_once_and_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert in_world(3, download_as_a_node, str(folder)) == [True] * 3
    assert (folder / "started").read_text() == "."


HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print(flush=True)
    sys.stdin.read()
"""


class Ending(logging.Handler):
    """Ends what another run does when anything is logged."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self.end = end

    def emit(self, record: logging.LogRecord) -> None:
        self.end()


@contextmanager
def other_run(lock: Path, finish: Callable[[], object]) -> Iterator[None]:
    """Inside the block another process holds `lock`. When anything is logged it does `finish` and ends."""
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        close = other.stdin.close
        ends_other = Ending(lambda: (finish(), close()))
        logging.getLogger().addHandler(ends_other)
        yield
        logging.getLogger().removeHandler(ends_other)
        assert other.wait() == 0


def test_who_waits_for_another_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / ".lock"
    with other_run(lock, lambda: None), caplog.at_level(logging.INFO), one_at_a_time(lock):
        assert caplog.messages == [f"waiting for another run that writes into {tmp_path}"]
    with one_at_a_time(lock):
        assert len(caplog.messages) == 1


def test_files_that_another_machine_still_writes_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with(no_network))
    write_idx(tmp_path / RAW, train=3, test=2)
    last = tmp_path / RAW / "t10k-labels-idx1-ubyte"
    content = last.read_bytes()
    last.write_bytes(b"")
    with other_run(tmp_path / LOCK, lambda: last.write_bytes(content)), caplog.at_level(logging.INFO):
        download(str(tmp_path), "MNIST")
    assert caplog.messages == [f"waiting for another run that writes into {tmp_path}"]


def test_files_that_are_cut_are_named_where_nothing_can_be_written(tmp_path: Path) -> None:
    write_idx(tmp_path / RAW, train=3, test=2)
    (tmp_path / RAW / "t10k-labels-idx1-ubyte").write_bytes(b"")
    (tmp_path / LOCK).mkdir()  # root could write to a folder without permissions
    with pytest.raises(ConfigError, match="t10k-labels-idx1-ubyte is not whole"):
        download(str(tmp_path), "MNIST")


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


@pytest.mark.parametrize("name", ["MNIST", "CIFAR10"])
def test_data_that_is_there_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with(no_network))
    folder = write_small_data(tmp_path)
    before = sorted(folder.rglob("*"))
    download(str(folder), name)
    assert sorted(folder.rglob("*")) == before


def test_files_that_are_missing_are_downloaded_and_those_that_are_cut_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", torchvision_with(no_network))
    raw = tmp_path / RAW
    write_idx(raw, train=3, test=2)
    images, labels = raw / "train-images-idx3-ubyte", raw / "train-labels-idx1-ubyte"
    content = labels.read_bytes()
    for damaged, said in (
        (content[:-1], f"{labels} is not whole: it has 10 bytes, and .*; type rm {labels}, and the command again"),
        (b"", f"{labels} is not whole: it has 0 bytes"),
        (content[:7] + b"\x04" + content[8:] + b"0", f"{images} has 3 images and {labels.name} has 4 labels; type rm "),
    ):
        labels.write_bytes(damaged)
        for read in (lambda: download(str(tmp_path), "MNIST"), lambda: mnist(str(tmp_path), "MNIST", train=False)):
            with pytest.raises(ConfigError, match=said):
                read()
    labels.unlink()
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        download(str(tmp_path), "MNIST")
    with pytest.raises(ConfigError, match="MNIST is not in data_dir"):
        mnist(str(tmp_path), "MNIST", train=False)
