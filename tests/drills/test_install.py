"""`pip install` of this folder, in a virtual environment of its own that sees the packages of this one."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from support.commands import ROOT

pytestmark = pytest.mark.drill


def test_an_editable_install_gives_the_command_and_the_package_and_a_copy_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "lockstep"  # pip writes beside the sources
    for folder in ("src", "conf"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    site = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    (site / "others.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))

    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(word) for word in words],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=200,
        )

    copied = run(programs / "pip", "install", "--no-deps", place)
    assert copied.returncode != 0
    assert "lockstep is used from its folder; type pip install -e . in it" in copied.stdout
    installed = run(programs / "pip", "install", "--no-deps", "-e", place)
    assert installed.returncode == 0, installed.stdout
    assert "epoch 1/1" in run(programs / "lockstep", "model=mlp", "trainer.epochs=1").stdout
    assert "mlp" in run(programs / "lockstep", "table", "outputs").stdout
    loaded = run(programs / "python", "-c", "import lockstep; print(lockstep.compose(['model=mlp']).model['width'])")
    assert loaded.stdout.strip() == "128"
