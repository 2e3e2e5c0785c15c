"""`make mine`, typed in a copy of the tree: a net of one's own inside of it needs no flag."""

import shutil
import subprocess
import sys

import pytest

from support.commands import ROOT

FOLDERS = ["src", "conf", "deploy", "docs", "tests", "Makefile", "pyproject.toml"]
FILES = ["src/mine.py", "conf/model/mine.yaml", "tests/test_mine.py"]


@pytest.mark.drill
def test_its_files_are_the_users_its_test_passes_and_it_is_trained_without_a_flag(tmp_path, start):
    """Ranks of launch=spawn are new processes. That any starter's ranks import the user's: test_own_work.py."""
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in set(listed.stdout.splitlines()) - set(FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["make", "mine"], cwd=tmp_path, check=True)
    again = subprocess.run(["make", "mine"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode != 0
    assert "src/mine.py is there already; move it, then type make mine" in again.stderr
    assert len((tmp_path / FILES[1]).read_text().splitlines()) == 4
    ignored = subprocess.run(["git", "check-ignore", *FILES], cwd=ROOT, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (1, "")
    start(sys.executable, "-m", "pytest", "-q", "tests/test_mine.py", cwd=tmp_path).finish()
    words = [sys.executable, str(tmp_path / "src" / "train.py"), "launch=spawn", "launch.nproc_per_node=2"]
    words += ["backend=gloo", "model=mine", "model.width=8", "trainer.max_steps=1", "logger=[]"]
    assert "rank 0 of 2" in start(*words).finish().output
