"""The folder of a sweep: its lock, and `sweep.json`, which tells what the sweep is."""

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.distributed.run_folder import unwritable
from lockstep.errors import ConfigError
from lockstep.files import write_whole
from lockstep.runs.record import is_locked
from lockstep.source_code import source_hashes
from lockstep.sweeps.table import read_rows

RECORD = "sweep.json"
SCHEMA = 2
LOCK_SECONDS = 20.0  # for the ranks of a sweep that was killed to end
# Parts of the config that change no number of a job.
NOT_COMPARED = ("launch.", "backend.", "sweep.", "profiler.", "logger", "logging.", "snapshot.", "data_dir", "run_dir")
COMPARED = (
    "sweep.search",
    "sweep.eta",
    "sweep.first_rung",
    "sweep.seed",
    "sweep.constraints",
)  # all the same: another search does not fit the table
OF_ONE_COMMAND = ("sweep.resume=", "sweep.retry=", "sweep.changes=", "hydra.sweep.dir=")  # not repeated by a resume
SHOWN = 6  # differences that a message names


def lock_sweep(folder: Path) -> IO[str]:
    """Lock the folder of a sweep, which is created if it is missing. The kernel releases it when this process ends.

    Raises ConfigError if another sweep holds it, or if it cannot be written to. The lock is a POSIX record lock:
    forked jobs do not inherit it, so it never outlives this process.
    """
    try:
        if (folder / "train.log").exists() or (folder / "snapshots").exists():
            raise ConfigError(f"{folder} is the folder of a run, not of a sweep; type hydra.sweep.dir=<another folder>")
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115  (it stays open as long as the lock is held)
    except OSError as error:
        raise ConfigError(unwritable(folder, error, "hydra.sweep.dir")) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either for a lock that another process holds
        file.seek(0)
        raise ConfigError(
            f"another sweep holds {folder} ({file.read()}); wait for its end, or type hydra.sweep.dir=<another folder>"
        ) from None
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def wait_for_lock(folder: Path) -> None:
    """Wait until the ranks of a sweep that was killed have ended, and hold the lock of this run folder no more."""
    deadline = time.monotonic() + LOCK_SECONDS
    while is_locked(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


@dataclass(frozen=True)
class Code:
    """{file: hash} of this project's Python files (what conf/ says is in the config), and {module: hash} of the user's
    modules that the jobs import.
    """

    files: dict[str, str]
    modules: dict[str, str]


def read_code(modules: dict[str, str]) -> Code:
    """modules: see `Code`."""
    return Code({file: digest for file, digest in source_hashes().items() if file.endswith(".py")}, modules)


def check_record(folder: Path, config: dict[str, Any], code: Code, accept_changes: bool) -> None:
    """Raise ConfigError if the sweep in `folder` was begun with another base config or other code.

    A sweep without rows has no job that could differ.
    config: the flat config of a job without what the sweep varies. A module of the user's that only one of the two
    commands imports is no difference: the jobs of a longer list may need it.
    """
    if not read_rows(folder):
        return
    record = read_record(folder)
    if record is None:
        raise ConfigError(f"{folder} has no {RECORD}, so it cannot go on; type hydra.sweep.dir=<another folder>")
    config = json.loads(json.dumps(_compared(config), default=str))
    differences = _differences(record["config"], config) + _differences(record["code"], code.files, "the code of ")
    shared = record["modules"].keys() & code.modules.keys()
    differences += [f"the code of {name}" for name in sorted(shared) if record["modules"][name] != code.modules[name]]
    if differences and not accept_changes:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ConfigError(
            f"the sweep in {folder} was begun with another config or other code: "
            f"{'; '.join(differences[:SHOWN])}{more}; "
            f"type hydra.sweep.dir=<another folder>, or sweep.changes=accept to go on with what is there now"
        )


def write_record(folder: Path, arguments: list[str], config: dict[str, Any], code: Code) -> None:
    """Write what the sweep is. arguments: the words after `src/train.py`. config, code: as for `check_record`."""
    kept = [word for word in arguments if not word.startswith(OF_ONE_COMMAND)]
    contents = {"schema": SCHEMA, "arguments": kept, "config": _compared(config)}
    contents |= {"code": code.files, "modules": code.modules}
    write_whole(folder / RECORD, json.dumps(contents, indent=1, default=str), sync=True)


def read_record(folder: Path) -> dict[str, Any] | None:
    """What `sweep.json` holds; None without one."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def recorded_arguments(folder: Path) -> list[str]:
    """The words of the last command of the sweep in `folder`. Raises ConfigError for another folder."""
    record = read_record(folder)
    if record is None:
        raise ConfigError(
            f"sweep.resume={folder} is not the folder of a sweep; type sweep.resume=<a folder with {RECORD}>"
        )
    return list(map(str, record["arguments"]))


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key in COMPARED or not key.startswith(NOT_COMPARED)}


def _differences(saved: dict[str, Any], ours: dict[str, Any], what: str = "") -> list[str]:
    return [
        f"{what}{key}" if what else f"{key} ({saved.get(key, 'nothing')} then, {ours.get(key, 'nothing')} now)"
        for key in sorted({*saved, *ours})
        if key not in saved or key not in ours or saved[key] != ours[key]
    ]
