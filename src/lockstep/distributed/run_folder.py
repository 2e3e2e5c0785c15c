"""Whether a run folder can be written to, and what to type if not. No torch here."""

import errno
import os
from pathlib import Path

from lockstep.errors import CannotStartNow, path_word

SWEEP_FOLDER = "LOCKSTEP_SWEEP_FOLDER"  # the environment variable that tells the ranks of a job which sweep it is in
BAR_COLUMNS = "LOCKSTEP_BAR_COLUMNS"  # the one that tells a job whose output is captured how long a bar it shall draw
LEAST_BYTES = 2**16  # free on the disk of a run folder at the start: for the first lines of its logs


def check_run_folder(folder: str | Path) -> None:
    """Raise ConfigError if this process cannot write to `folder`, or to where it would be created. Writes nothing."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        if not os.access(existing, os.W_OK | os.X_OK):
            is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if is_read_only else errno.EACCES, "")
        space = os.statvfs(existing)
        if space.f_blocks and space.f_bavail * space.f_frsize < LEAST_BYTES:
            raise OSError(errno.ENOSPC, "")
    except OSError as error:
        raise CannotStartNow(unwritable(folder, error)) from None


def unwritable(folder: str | Path, error: OSError, key: str = "hydra.run.dir") -> str:
    """The sentence for a run folder that cannot be written to. key: the option that names another folder."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"free some space there, or type {key}=<a folder on another disk>"
    elif error.errno == errno.EROFS:
        advice = f"type {key}=<a folder on a disk that is not mounted read-only>"
    else:
        advice = f"type {key}=<a folder you can write to>"
    return f"the run folder {folder} cannot be written ({reason}); {advice}"


def go_on_words(folder: str | Path) -> str:
    """What to add to the command to go on in the run folder, or in the sweep that it is in."""
    sweep = os.environ.get(SWEEP_FOLDER)
    return path_word("hydra.run.dir", folder) if sweep is None else f"-m {path_word('sweep.resume', sweep)}"
