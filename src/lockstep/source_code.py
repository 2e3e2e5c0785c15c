"""Whose code a file is, and hashes of the code of this project and of the modules that a process has loaded."""

import hashlib
import site
import sys
import sysconfig
from contextlib import suppress
from functools import cache
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


# until issue 45
def source_hashes(root: Path = ROOT) -> dict[str, str]:
    """{file: hash} of the Python and YAML files in src/ and conf/, sorted by their names relative to `root`."""
    hashes = {}
    for part in PARTS:
        for path in (root / part).rglob("*"):
            if path.suffix not in (".py", ".yaml") or path.is_relative_to(root / "conf" / "local"):
                continue  # conf/local is of this machine; the config shows what it sets
            with suppress(OSError):  # an editor is just replacing it
                hashes[str(path.relative_to(root))] = hash_of_file(path)
    return dict(sorted(hashes.items()))


def hash_of_source(root: Path = ROOT) -> str:
    """One hash over the names and contents of the files of `source_hashes`."""
    return hashlib.sha256(str(source_hashes(root)).encode()).hexdigest()[:DIGITS]


# Names of modules of libraries. A forked rank that looked at 1600 modules again would copy 8 MB of memory.
_libraries: set[str] = set()


# until issue 45
def module_hashes(users_only: bool = False) -> dict[str, str]:
    """{module: hash of its file} of every loaded module that is neither Python's own nor an installed package.

    users_only: without this project's own.
    """
    hashes = {}
    for name in list(sys.modules):
        if name in _libraries:
            continue
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        digest = _hash_of_loaded(file)
        if digest is None and file:  # without a file it can be the fork server's __main__, which a rank replaces
            _libraries.add(name)
        if digest is not None and not (users_only and file.startswith(f"{ROOT / 'src'}/")):
            # A launcher's child imports the entry point under another name.
            hashes[Path(file).stem if name in ("__main__", "__mp_main__") else name] = digest
    return hashes


# until issue 45
@cache
def _hash_of_loaded(file: str) -> str | None:
    """None for a library. It is read once: a file that changes later is not the code that runs."""
    if not file.endswith(".py") or is_library(file):
        return None
    try:
        return hash_of_file(Path(file))
    except OSError:  # it was moved after the import
        return None


def hash_of_file(path: Path) -> str:
    """Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
