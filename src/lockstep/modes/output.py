"""What a mode writes: whole or not at all, by rank 0."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.files import write_whole
from lockstep.runs.record import NAME

FOLDERS_OF_A_RUN = ("snapshots", ".hydra")
FILES_OF_A_RUN = frozenset({NAME, "model.pt", "model_best.pt", "metrics.csv", "digests.bin", "train.log"})
FILES_OF_A_RUN |= {"failure.json", "failure.txt", "uncommitted.diff"}

if TYPE_CHECKING:
    from lockstep.distributed.world import World


def write_output(world: "World", path: Path, text: Iterable[str], key: str) -> None:
    """Rank 0 writes the pieces of `text` to `path`. A collective. Raises ConfigError on all ranks if it cannot.

    key: the option that names another file.
    """
    problem = world.broadcast_json(_write(path, text, key) if world.is_rank_zero else None)
    if problem is not None:
        raise ConfigError(problem)


def _write(path: Path, text: Iterable[str], key: str) -> str | None:
    """None, or why the file could not be written."""
    try:
        write_whole(path, lambda file: file.writelines(piece.encode() for piece in text), shared=True)
    except OSError as error:
        return cannot_write(path, error, key)
    return None


def require_place(file: str | None, key: str) -> None:
    """Raise ConfigError for a `file` that cannot be one of a mode's. key: the option that names the file.

    Its folder must exist, and what it replaces may be no folder, no device, and no file that a training has written.
    """
    if file is None:
        return
    path = Path(file)
    if not path.parent.is_dir():
        raise ConfigError(cannot_write(path, FileNotFoundError(errno.ENOENT, file), key))
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file that can be replaced; type {key}=<a file that you can write>")
    folder = path.parent.resolve()
    of_run = folder.name in FOLDERS_OF_A_RUN and (folder.parent / NAME).exists()
    if of_run or (path.name in FILES_OF_A_RUN and (folder / NAME).exists()):
        raise ConfigError(f"{path} is part of a run, which a mode leaves as it is; type {key}=<another file>")


def cannot_write(path: Path, error: OSError, key: str) -> str:
    """The sentence for a file that cannot be written. key: the option that names another one."""
    return f"{path} cannot be written ({os.strerror(error.errno or 0)}); type {key}=<a file that you can write>"
