"""`make mine`, typed in a copy of the tree: a net of one's own inside of it needs no flag."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import ROOT, Command

FOLDERS = ["src", "conf", "deploy", "docs", "tests", "Makefile", "pyproject.toml"]
FILES = ["src/mine.py", "conf/model/mine.yaml", "tests/test_mine.py"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of this one, after `make mine`."""
    folder = tmp_path_factory.mktemp("copy")
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in set(listed.stdout.splitlines()) - set(FILES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["make", "mine"], cwd=folder, check=True)
    return folder


def test_its_files_are_the_users(copy: Path) -> None:
    again = subprocess.run(["make", "mine"], cwd=copy, capture_output=True, text=True)
    assert again.returncode != 0
    assert "src/mine.py is there already; move it, then type make mine" in again.stderr
    assert len((copy / FILES[1]).read_text().splitlines()) == 4
    ignored = subprocess.run(["git", "check-ignore", *FILES], cwd=ROOT, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (1, "")


def test_its_test_passes(copy: Path, start: Callable[..., Command]) -> None:
    start(sys.executable, "-m", "pytest", "-q", "tests/test_mine.py", cwd=copy).finish()


def test_it_is_trained_without_a_flag(copy: Path, start: Callable[..., Command]) -> None:
    """Ranks of launch=spawn are new processes. That any starter's ranks import the user's: test_own_folder.py."""
    words = [sys.executable, str(copy / "src" / "train.py"), "launch=spawn", "launch.nproc_per_node=2", "backend=gloo"]
    output = start(*words, "model=mine", "model.width=8", "trainer.max_steps=1", "logger=[]").finish().output
    assert "rank 0 of 2" in output
