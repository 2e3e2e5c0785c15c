"""One run per run folder: a file lock that the kernel releases when its process ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lockstep.distributed.world import World
from lockstep.errors import ConfigError

OTHER_FOLDER = "type hydra.run.dir=<a folder you can write to>"


@contextmanager
def hold_run_folder(folder: str | Path, world: World) -> Iterator[None]:
    """Rank 0 holds a lock on `folder` while the block runs. Every rank calls this.

    Raises ConfigError on every rank if another run holds the folder, or if it cannot be written to. The lock is a
    POSIX record lock: a forked DataLoader worker does not inherit it, so it cannot outlive the rank. Closing any file
    object of `.lock` in this process releases it.
    """
    file, problem = _try_lock(Path(folder)) if world.is_rank_zero else (None, None)
    try:
        problem = world.broadcast_object(problem)
        if problem is not None:
            raise ConfigError(problem)
        yield
    finally:
        if file is not None:
            file.close()


def _try_lock(folder: Path) -> tuple[IO[str] | None, str | None]:
    """(the locked file, None) or (None, what is wrong). The text in the file only tells people who holds the lock."""
    try:
        file = open(folder / ".lock", "a+")  # noqa: SIM115  (it stays open as long as the lock is held)
    except OSError as error:
        return None, f"cannot write to the run folder {folder} ({error.strerror}); {OTHER_FOLDER}"
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return file, None
    except (BlockingIOError, PermissionError):  # POSIX allows either for a lock that another process holds
        file.seek(0)
        problem = f"another run holds {folder} ({file.read()}); wait for its end, or type another hydra.run.dir="
    except OSError as error:
        problem = f"cannot lock the run folder {folder} ({error.strerror}); {OTHER_FOLDER}"
    _close(file)
    return None, problem


def _close(file: IO[str]) -> None:
    """Close a file whose text could perhaps not be written."""
    with suppress(OSError):
        file.close()
