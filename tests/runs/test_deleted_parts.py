"""The table "delete this, lose that" of CONTRIBUTING.md: what is left imports, composes and trains."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import ROOT
from support.pages import COMMANDS, section

TABLE = section((ROOT / "CONTRIBUTING.md").read_text(), "Delete this, lose that")


def files_of(modules, options):
    """Of src/lockstep and conf, without ROOT."""
    found = [Path("src/lockstep") / name for name in modules.split()]
    for pattern in options.split():
        matching = [path.relative_to(ROOT) for path in (ROOT / "conf").glob(pattern)]
        assert matching, pattern
        found += matching
    return found


ROWS = [files_of(*row) for row in re.findall(r"^\| `(.*?)` \| (?:`(.*?)` )?\|", TABLE, re.MULTILINE)]


def module_of(path):
    return ".".join(path.relative_to("src").with_suffix("").parts)


def imported_at_once(path):
    """What a module imports when it is imported: not in a function, and not for type checks alone."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_a_row_is_named_by_nothing_that_is_left():
    files = [path for folder in ("src", "tests/fast", "tests/support") for path in (ROOT / folder).rglob("*.py")]
    imports = {path.relative_to(ROOT): imported_at_once(path) for path in files}
    yaml = {path.relative_to(ROOT): re.sub(" *#.*", "", path.read_text()) for path in (ROOT / "conf").rglob("*.yaml")}
    assert len(ROWS) > 15
    for files in ROWS:
        names = {module_of(path) for path in files if path.suffix == ".py"}
        assert not [path for path, found in imports.items() if path not in files and found & names], files
        named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
        assert not [path for path, text in yaml.items() if path not in files and named.search(text)], files


@pytest.mark.drill
def test_without_all_of_them_all_modules_import_and_a_command_trains(tmp_path):
    for folder in ("src", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in {path for files in ROWS for path in files}:
        (tmp_path / path).unlink()
    left = [path.relative_to(tmp_path) for path in (tmp_path / "src/lockstep").rglob("*.py")]
    modules = ", ".join(module_of(path) for path in left if path.stem not in ("__init__", "__main__"))
    words = ["trainer.max_steps=2", "logger=[]", "hydra.run.dir=run"]
    for command in (["-c", f"import sys; sys.path.insert(0, 'src'); import {modules}"], ["src/train.py", *words]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "model.pt").exists()


@pytest.mark.drill
def test_under_another_name_a_command_trains_in_processes_of_its_own(tmp_path):
    for folder in ("src", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    train = f"{sys.executable} src/train.py launch=fork launch.nproc_per_node=2 trainer.max_steps=2 logger=[console]"
    typed = ["git init -q", "git add .", *COMMANDS.findall(TABLE), train]
    words = ["bash", "-ec", "\n".join(typed)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "rank 0 of 2" in done.stdout) == (0, True), done.stdout + done.stderr
    files = [path for kind in ("py", "yaml") for path in tmp_path.rglob(f"*.{kind}")]
    assert files
    assert not [path for path in files if "lockstep" in path.read_text()]
