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
    venv.create(tmp_path / "venv")
    site = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    (site / "others.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))

    def run(program, *words, fails=False):
        done = subprocess.run([program, *words], cwd=tmp_path, text=True, capture_output=True, timeout=200)
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps"]
    refused = run(*pip, "--no-build-isolation", place, fails=True)
    assert "lockstep is used from its folder; type pip install -e . in it" in refused
    run(*pip, "-e", place)
    assert "epoch 1/1" in run(programs / "lockstep", "model=mlp", "trainer.epochs=1")
    assert "mlp" in run(programs / "lockstep", "table", "outputs")
    loaded = run(programs / "python", "-c", "import lockstep; print(lockstep.compose(['model=mlp']).model['width'])")
    assert loaded.strip() == "128"
