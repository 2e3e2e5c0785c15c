"""Whose code a file is, and hashes of the code of this project and of the modules that a process has loaded."""

import sys
import sysconfig
from pathlib import Path

from lockstep.files import short_hash

PROJECT = Path(__file__).parent  # the folder src/lockstep
ROOT = PROJECT.parents[1]  # the folder of src/ and conf/
_OWN = (f"{PROJECT}/", f"{ROOT}/src/hydra_plugins/", f"{ROOT}/src/train.py")
_PYTHON = tuple(f"{sysconfig.get_path(scheme)}/" for scheme in ("stdlib", "platstdlib"))


def is_library(file: str) -> bool:
    """Whether it is Python's own or an installed package. Code without a file, such as "<string>", counts too."""
    return file.startswith(("<", *_PYTHON)) or "/site-packages/" in file or "/dist-packages/" in file


def is_project(file: str) -> bool:
    """Whether it is a file of this project."""
    return file.startswith(_OWN)


def is_users(file: str) -> bool:
    """Whether it is neither of this project nor of a library."""
    return not is_library(file) and not is_project(file)


def hash_of_source(root: Path = ROOT) -> str:
    """One hash over the names and contents of the Python files in src/ and the YAML files in conf/."""
    paths = sorted(path for pattern in ("src/**/*.py", "conf/**/*.yaml") for path in root.glob(pattern))
    local = root / "conf" / "local"  # of this machine; the config shows what it sets
    return short_hash(*(hashed(path, path.relative_to(root)) for path in paths if not path.is_relative_to(local)))


def module_hashes() -> dict[str, str]:
    """{module: hash of its file} of every loaded module outside of this project, of Python's own and of packages."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    users = {name: file for name, file in files.items() if file.endswith(".py") and is_users(file)}
    return {name: hashed(Path(file)) for name, file in users.items() if not file.startswith(f"{ROOT}/src/")}


def hashed(path: Path, name: object = "") -> str:
    """Of a file and its name. An editor may just be replacing it."""
    return short_hash(name, path.read_bytes() if path.exists() else b"")
