"""One run per run folder: a file lock that the kernel releases when its process ends."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lockstep.distributed.run_folder import unwritable
from lockstep.distributed.world import World
from lockstep.errors import CannotStartNow

log = logging.getLogger(__name__)


class HeldFolder:
    """The run folder while this run holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: IO[str] | None = None

    def lock(self) -> str | None:
        """Lock the folder, which is created if it is missing. Returns what is wrong, None if nothing is."""
        self.file, problem = _try_lock(self.folder)
        return problem

    def restore(self) -> None:
        """Make the folder again, and lock it, if it was deleted or moved away. Only for the rank that holds the lock.

        Raises CannotStartNow if it cannot be made, or if another run holds a new one by now.
        """
        if self.file is None or self._is_there(self.file):
            return
        _close(self.file)
        problem = self.lock()
        if problem is not None:
            raise CannotStartNow(f"the run folder was deleted, and nothing can be saved any more: {problem}")
        with suppress(OSError):  # then the log lines are lost, and the training is not
            (self.folder / "logs").mkdir(exist_ok=True)
        log.warning(
            "the run folder %s was deleted or moved away. It is made again, without what it held; training goes on",
            self.folder,
        )

    def _is_there(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.stat(self.folder / ".lock"), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False
        except OSError:  # a network file system that does not answer now
            return True


@contextmanager
def hold_run_folder(folder: str | Path, world: World) -> Iterator[HeldFolder]:
    """Rank 0 holds a lock on `folder` while the block runs. Every rank calls this.

    Raises CannotStartNow on every rank if another run holds the folder, or if it cannot be written to. The lock is a
    POSIX record lock: a forked DataLoader worker does not inherit it, so it cannot outlive the rank. Closing any file
    object of `.lock` in this process releases it.
    """
    held = HeldFolder(Path(folder))
    problem = held.lock() if world.is_rank_zero else None
    try:
        problem = world.broadcast_json(problem)
        if problem is not None:
            raise CannotStartNow(problem)
        yield held
    finally:
        if held.file is not None:
            _close(held.file)


def _try_lock(folder: Path) -> tuple[IO[str] | None, str | None]:
    """(the locked file, None) or (None, what is wrong). The text in the file only tells people who holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115  (it stays open as long as the lock is held)
    except OSError as error:
        return None, unwritable(folder, error)
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
        problem = unwritable(folder, error)
    _close(file)
    return None, problem


def _close(file: IO[str]) -> None:
    """Close a file whose text could perhaps not be written."""
    with suppress(OSError):
        file.close()
