"""What a mode writes: whole or not at all, by rank 0."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

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
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # another command may write the same file
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        return cannot_write(path, error, key)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return None


def require_folder(file: str | None, key: str) -> None:
    """Raise ConfigError if `file` would be in a folder that does not exist. key: the option that names the file."""
    if file is not None and not Path(file).parent.is_dir():
        raise ConfigError(cannot_write(Path(file), FileNotFoundError(errno.ENOENT, file), key))


def cannot_write(path: Path, error: OSError, key: str) -> str:
    """The sentence for a file that cannot be written. key: the option that names another one."""
    return f"{path} cannot be written ({os.strerror(error.errno or 0)}); type {key}=<a file that you can write>"
