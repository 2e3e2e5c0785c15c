"""Whose code a file is, and hashes of the code of this project and of the modules that a process has loaded."""

import hashlib
import site
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

PROJECT = Path(__file__).parent  # the folder src/lockstep
_OWN = (f"{PROJECT}/", f"{PROJECT.parent}/hydra_plugins/", f"{PROJECT.parent}/train.py")
_SCHEMES = ("stdlib", "platstdlib", "purelib", "platlib")
LIBRARIES = tuple({f"{path}/" for path in (*map(sysconfig.get_path, _SCHEMES), *site.getsitepackages())})
PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")  # also of a virtual environment that this process is not in


def is_library(file: str) -> bool:
    """Whether it is Python's own or an installed package. Code without a file, such as "<string>", counts too."""
    return file.startswith(("<", *LIBRARIES)) or any(folder in file for folder in PACKAGE_FOLDERS)


def is_project(file: str) -> bool:
    """Whether it is a file of this project."""
    return file.startswith(_OWN)


def is_users(file: str) -> bool:
    """Whether it is neither of this project nor of a library."""
    return not is_library(file) and not is_project(file)


ROOT = Path(__file__).parents[2]  # the folder of src/ and conf/
PARTS = ("src", "conf")
DIGITS = 16  # hex digits of a hash


def hash_of_source(root: Path = ROOT) -> str:
    """One hash over the names and contents of the Python and YAML files in src/ and conf/."""
    whole = hashlib.sha256()
    for path in sorted(path for part in PARTS for path in (root / part).rglob("*")):
        # conf/local is of this machine; the config shows what it sets.
        if path.suffix in (".py", ".yaml") and not path.is_relative_to(root / "conf" / "local"):
            whole.update(f"{path.relative_to(root)} {_hash_of_file(path)} ".encode())
    return whole.hexdigest()[:DIGITS]


def module_hashes() -> dict[str, str | None]:
    """{module: hash of its file} of every loaded module outside of this project, of Python's own and of packages."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    users = {name: file for name, file in files.items() if file.endswith(".py") and is_users(file)}
    return {name: _hash_of_file(Path(file)) for name, file in users.items() if not file.startswith(f"{ROOT / 'src'}/")}


def _hash_of_file(path: Path) -> str | None:
    with suppress(OSError):  # an editor is just replacing it
        return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
    return None
