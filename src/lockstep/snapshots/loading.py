"""All ranks load the same snapshot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.snapshots.finding import load_chosen

Found = tuple[dict[str, Any], Path]
"""The contents of a snapshot, and its path."""


def load_on_all_ranks(world: World, find: Callable[[], Found | None]) -> Found | None:
    """Rank 0 finds a good snapshot, and all ranks load it. A collective. None if `find` returns it.

    Raises a ConfigError of `find` on all ranks, and one if a rank cannot read the file.
    """
    found: Found | None = None
    answer: tuple[str | None, str | None] = (None, None)
    with world.disk_access():
        if world.is_rank_zero:
            found, answer = _answer(find)
    sentence, name = world.broadcast_json(answer)
    if sentence is not None:
        raise ConfigError(sentence)
    if name is None:
        return None
    path, problem = Path(name), None
    with world.disk_access():
        try:
            found = found or (load_chosen(path), path)
        except (OSError, ValueError) as error:
            problem = str(error)
    for rank, text in enumerate(world.all_gather_json(problem)):
        if text is not None:
            raise ConfigError(
                f"rank {rank} cannot read {path} ({text}), which rank 0 has read: a run that still trains may have "
                f"deleted or replaced it; type the command again, or on several machines resume=<a folder that all see>"
            )
    return found


def _answer(find: Callable[[], Found | None]) -> tuple[Found | None, tuple[str | None, str | None]]:
    """(what was found, (error, path))."""
    try:
        found = find()
    except ConfigError as error:
        return None, (str(error), None)
    return found, (None, None if found is None else str(found[1]))
