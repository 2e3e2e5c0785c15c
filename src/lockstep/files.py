"""Files that are replaced whole: whenever the process is killed, a reader finds the old contents or the new ones."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, sync: bool = False, temporary: Path | None = None) -> Iterator[Path]:
    """Gives the path of a temporary file to write, and puts that file in the place of `path` when the block ends.

    An error in the block leaves the file at `path` as it was, and removes the temporary one.

    sync: only when the new contents are on the disk, which takes some ms; a power cut then loses neither file.
    temporary: in the same folder. Give one where two processes may write the same file. Raises OSError.
    """
    temporary = temporary or path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        if sync:
            _sync(temporary)
        os.replace(temporary, path)
        if sync:
            _sync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_whole(path: Path, text: str, sync: bool = False) -> None:
    """Write a text file as `replacing` does. A character that UTF-8 cannot hold is written as its escape.

    Raises OSError.
    """
    with replacing(path, sync) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
