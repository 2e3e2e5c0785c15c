"""Whose code a file is: the user's, this project's, or a library's."""

import site
import sysconfig
from pathlib import Path

PROJECT = Path(__file__).parents[1]  # the folder src/lockstep
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
