"""The run folder: one config in it, and the lock by which one run holds it. No torch here."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import yaml  # type: ignore[import-untyped]

from lockstep.config.check import flatten, word
from lockstep.config.record import RECORD, ConfigRecord, sets
from lockstep.config.schema import NO_NUMBER, SHARED_BY
from lockstep.errors import ConfigError, differing, show

if TYPE_CHECKING:
    from lockstep.distributed.world import World

log = logging.getLogger(__name__)

LIMITS = ("trainer.epochs", "trainer.max_steps", "trainer.max_time", "trainer.pause_after", "evaluation.patience")

LEAST_BYTES = 2**16  # free on the disk of a run folder at the start: for the first lines of its logs


def folder_of_run(resume: str) -> Path:
    """The run folder of `resume`: a run folder, its snapshots/, or a file in one of them. Raises ConfigError."""
    path = Path(resume).expanduser()
    for folder in (path, path.parent, path.parent.parent):
        if (folder / RECORD / "overrides.yaml").is_file():
            return folder
    what = "is in no run folder" if path.exists() else "does not exist"
    raise ConfigError(f"resume={resume} {what}; type resume=<a run folder, with {RECORD}/ inside, or a snapshot in it>")


def require_same_run(record: ConfigRecord, run_dir: str, elsewhere: str | None = None) -> None:
    """Raise ConfigError if `run_dir` has snapshots of a run of other values. elsewhere: what to type to train with
    these."""
    folder = Path(run_dir)
    path = folder / RECORD / "config.yaml"
    if not path.is_file() or not any(folder.glob("snapshots/step_*")):
        return
    then, now = (flatten(yaml.safe_load(text) or {}) for text in (path.read_text(), record.files["config.yaml"]))
    for key, (before, value) in differing(then, now).items():
        if not sets(key, (*NO_NUMBER, *SHARED_BY, *LIMITS)) and not key.endswith("run_dir"):
            elsewhere = elsewhere or f"hydra.run.dir=<a new folder>, with resume={folder} to begin with its snapshot"
            what = f"{folder} holds a run with {key}={show(before)}, and here it is {show(value)}"
            raise ConfigError(f"{what}; type {word(key, before)} to go on with it, or {elsewhere}")


def unwritable(folder: str | Path, error: OSError, key: str = "hydra.run.dir") -> str:
    """The sentence for a run folder that cannot be written to. key: the option that names another folder."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"the run folder {folder} cannot be written ({reason}); type {key}=<a folder you can write to, with room>"


def lock(folder: Path, what: str = "run") -> IO[str]:
    """The file that holds the folder of a run, or of a sweep (`what`), while it is open. The folder is created if it is
    missing. It is a POSIX record lock: a forked DataLoader worker does not inherit it, so it cannot outlive the rank.
    Closing any file object of `.lock` in this process releases it. Raises ConfigError."""
    key, file = f"hydra.{what}.dir", None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115  (it stays open as long as the lock is held)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(" " * LEAST_BYTES)  # a full disk refuses them
        file.flush()
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")  # for people who look
        file.flush()
    except OSError as error:
        problem = unwritable(folder, error, key)
        if file is not None:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # Lustre without flock, some NFS
                log.warning("%s cannot be locked (%s): other runs are not kept out", folder, error.strerror)
                return file
            if error.errno in (errno.EAGAIN, errno.EACCES):  # as POSIX allows for a held lock
                file.seek(0)
                held = f"another {what} holds {folder} ({file.read()})"
                problem = f"{held}; wait for its end, or type {key}=<another folder>"
            with suppress(OSError):  # its text could perhaps not be written
                file.close()
        raise ConfigError(problem) from None
    return file


@contextmanager
def hold_run_folder(folder: str | Path, world: "World") -> Iterator[None]:
    """Rank 0 holds a lock on `folder` while the block runs. Every rank calls this. Raises ConfigError on all."""
    with ExitStack() as held:
        with world.refusals_on_all():
            if world.is_rank_zero:
                held.enter_context(lock(Path(folder)))
        yield
