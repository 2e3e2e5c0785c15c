"""What a mode writes: whole or not at all, by rank 0."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed.run_folder import unwritable
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.distributed.world import World


def write_output(world: "World", path: Path, text: str, key: str) -> None:
    """Rank 0 writes `text` to `path`. A collective. Raises ConfigError on all ranks if it cannot.

    key: the option that names another file.
    """
    problem = world.broadcast_json(_write(path, text, key) if world.is_rank_zero else None)
    if problem is not None:
        raise ConfigError(problem)


def _write(path: Path, text: str, key: str) -> str | None:
    """None, or why the file could not be written."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        return unwritable(path, error, key)
    return None
