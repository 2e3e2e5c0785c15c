"""Whose code a file is, and hashes of the code of this project and of the modules that a process has loaded."""

import sys
import sysconfig
from pathlib import Path

from lockstep.files import short_hash

PROJECT = Path(__file__).parent  # the folder src/lockstep
_OWN = (f"{PROJECT}/", f"{PROJECT.parent}/hydra_plugins/", f"{PROJECT.parent}/train.py")
_PYTHON = tuple(f"{sysconfig.get_path(scheme)}/" for scheme in ("stdlib", "platstdlib"))
_PACKAGES = ("/site-packages/", "/dist-packages/")  # also of a virtual environment that this process is not in


def is_library(file: str) -> bool:
    """Whether it is Python's own or an installed package. Code without a file, such as "<string>", counts too."""
    return file.startswith(("<", *_PYTHON)) or any(folder in file for folder in _PACKAGES)


def is_project(file: str) -> bool:
    """Whether it is a file of this project."""
    return file.startswith(_OWN)


def is_users(file: str) -> bool:
    """Whether it is neither of this project nor of a library."""
    return not is_library(file) and not is_project(file)


ROOT = Path(__file__).parents[2]  # the folder of src/ and conf/
PARTS = ("src", "conf")


def hash_of_source(root: Path = ROOT) -> str:
    """One hash over the names and contents of the Python and YAML files in src/ and conf/."""
    paths = [path for part in PARTS for path in (root / part).rglob("*") if path.suffix in (".py", ".yaml")]
    local = root / "conf" / "local"  # of this machine; the config shows what it sets
    found = [(path.relative_to(root), path) for path in sorted(paths) if not path.is_relative_to(local)]
    return short_hash([f"{name} {_hash_of_file(path)}" for name, path in found])


def module_hashes() -> dict[str, str | None]:
    """{module: hash of its file} of every loaded module outside of this project, of Python's own and of packages."""
    files = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    own = f"{ROOT / 'src'}/"
    users = {name: file for name, file in files.items() if file.endswith(".py") and is_users(file)}
    return {name: _hash_of_file(Path(file)) for name, file in users.items() if not file.startswith(own)}


def _hash_of_file(path: Path) -> str | None:
    try:
        return short_hash(path.read_bytes())
    except OSError:  # an editor is just replacing it
        return None
