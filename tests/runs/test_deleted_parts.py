"""The table "delete this, lose that" of CONTRIBUTING.md: what is left imports, composes and trains."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import ROOT

_TABLE = (ROOT / "CONTRIBUTING.md").read_text().split("## Delete this, lose that")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `(.*?)` \| (?:`(.*?)` )?\|", _TABLE, re.MULTILINE)


def files_of(row: tuple[str, str]) -> list[Path]:
    """Of src/lockstep and conf, without ROOT."""
    modules, options = row
    found = [Path("src/lockstep") / name for name in modules.split()]
    for pattern in options.split():
        matching = sorted(path.relative_to(ROOT) for path in (ROOT / "conf").glob(pattern))
        assert matching, pattern
        found += matching
    return found


def imported_at_once(path: Path) -> set[str]:
    """What a module imports when it is imported: not in a function, and not for type checks alone."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split()[0])
def test_a_row_is_named_by_nothing_that_is_left(row: tuple[str, str]) -> None:
    files = files_of(row)
    names = {".".join(path.relative_to("src").with_suffix("").parts) for path in files if path.suffix == ".py"}
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]:
        if path.relative_to(ROOT) in files:
            continue
        if path.suffix == ".py":
            assert not imported_at_once(path) & names, path
        else:
            text = re.sub(r" *#.*", "", path.read_text())
            assert not [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)], path


def test_without_all_of_them_all_modules_import_and_a_command_trains(tmp_path: Path) -> None:
    for folder in ("src", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in {path for row in ROWS for path in files_of(row)}:
        (tmp_path / path).unlink()
    left = [path.relative_to(tmp_path / "src").with_suffix("") for path in (tmp_path / "src/lockstep").rglob("*.py")]
    modules = [".".join(path.parts) for path in left if path.stem not in ("__init__", "__main__")]
    words = ["trainer.max_steps=2", "logger=[]", "hydra.run.dir=run"]
    for command in (
        ["-c", f"import sys; sys.path.insert(0, 'src'); import {', '.join(modules)}"],
        ["src/train.py", *words],
    ):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "model.pt").exists()
