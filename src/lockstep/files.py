"""Whose code a file is, and files that are written whole or not at all. No torch here."""

import fcntl
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Contents = str | bytes | memoryview | Callable[[BinaryIO], object]
"""What a file shall hold, or a function that writes it to the open file."""


PROJECT = Path(__file__).parent  # the folder src/lockstep
ROOT = PROJECT.parents[1]  # the folder of src/ and conf/
_OWN = (f"{PROJECT}/", f"{ROOT}/src/hydra_plugins/", f"{ROOT}/src/train.py")
_PYTHON = tuple(f"{sysconfig.get_path(scheme)}/" for scheme in ("stdlib", "platstdlib"))


def is_library(file: str) -> bool:
    """Whether it is Python's own or an installed package. Code without a file, such as "<string>", counts too."""
    return file.startswith(("<", *_PYTHON)) or "/site-packages/" in file or "/dist-packages/" in file


def is_project(file: str) -> bool:
    return file.startswith(_OWN)


def is_users(file: str) -> bool:
    return not is_library(file) and not is_project(file)


def is_url(name: object) -> bool:
    """Whether it is an address such as s3://bucket/train-000.tar, which fsspec opens."""
    return "://" in str(name)


def short_hash(*values: Any) -> str:
    """16 letters for a file's name, which depend on the values: on bytes, or on what `repr` says of others."""
    whole = hashlib.sha256()
    for value in values:
        whole.update(value if isinstance(value, bytes) else repr(value).encode())
    return whole.hexdigest()[:16]


def write_whole(path: Path, contents: Contents, sync: bool = True, shared: bool = False) -> None:
    """Replace the file `path` at once: a kill at any moment leaves the old one or the new one. sync: a power cut, too.
    shared: another process may write it now. Raises OSError, for example on a full disk; then the old one is left."""
    # The name is fixed if it can be: the next process writes over what a killed one has left.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            if callable(contents):
                contents(file)
            else:
                file.write(contents.encode() if isinstance(contents, str) else contents)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):  # on a full disk torch.save raises an error that does not say so
            raise error.__context__ from None
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Without it a power cut may lose the names of new files."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Make `folder`, and let one process at a time into the block, of all machines that share the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
