"""One run folder, one run: a lock that its holder's death releases."""

import fcntl
import os
import socket
from contextlib import contextmanager
from pathlib import Path

from lockstep.refusal import Refusal


@contextmanager
def hold(folder, world):
    """Hold `folder` for this world while the block runs. Raises Refusal on every rank where another run holds it.

    The kernel keeps the lock (flock), so a killed holder leaves none behind; the file's text only tells who it is.
    """
    holder, file = None, None
    if world.leads:
        file = open(Path(folder) / ".lock", "a+")  # noqa: SIM115  (open as long as the lock is held)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}")
            file.flush()
        except BlockingIOError:
            file.seek(0)
            holder = file.read()
    try:
        holder = world.from_leader(holder)
        if holder is not None:
            raise Refusal(f"another run holds {folder} ({holder}); wait for its end, or type another hydra.run.dir=")
        yield
    finally:
        if file is not None:
            file.close()
