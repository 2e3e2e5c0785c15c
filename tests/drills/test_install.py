"""`pip install` of this folder, in a virtual environment of its own that sees the packages of this one."""

import shutil
import subprocess
import sys
import venv

import pytest

from support.commands import ROOT

pytestmark = pytest.mark.drill


def test_an_editable_install_gives_the_command_and_the_package_and_a_copy_is_refused(tmp_path):
    place, programs = tmp_path / "lockstep", tmp_path / "venv" / "bin"  # pip writes beside the sources
    for folder in ("src", "conf"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    venv.create(tmp_path / "venv", with_pip=True)
    site = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    (site / "others.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))

    def run(program, *words, fails=False):
        command = [str(programs / program), *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=200)
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    refused = run("pip", "install", "--no-deps", place, fails=True)
    assert "lockstep is used from its folder; type pip install -e . in it" in refused
    run("pip", "install", "--no-deps", "-e", place)
    assert "epoch 1/1" in run("lockstep", "model=mlp", "trainer.epochs=1")
    assert "mlp" in run("lockstep", "table", "outputs")
    loaded = run("python", "-c", "import lockstep; print(lockstep.compose(['model=mlp']).model['width'])")
    assert loaded.strip() == "128"
