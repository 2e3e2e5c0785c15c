"""`run.json` in a run folder: what was run, with what, on what, and how it ended."""

import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.files import write_whole

NAME = "run.json"
FORMAT = 1
REPEATED = "LOCKSTEP_AGAIN"  # names a run's folder to its repetition, which is refused if it would be another run
# What readers of a record rely on, and its types.
KEYS: dict[str, Any] = {"command": str, "cwd": str, "steps": int, "samples_per_second": float | int | None}
KEYS |= dict.fromkeys(("overrides", "flags", "lives", "improvements"), list)
KEYS |= dict.fromkeys(("config", "data", "code", "environment", "objective"), dict)
LIFE: dict[str, Any] = {"state": str, "exit_code": int | None, "hosts": list, "launcher": str}
LIFE |= {"world_size": int, "from_step": int, "started": float | int}
OBJECTIVE: dict[str, Any] = {"name": str, "mode": str, "best": float | int | None, "step": int | None}
RUNNING, FINISHED, PAUSED, FAILED, KILLED = "running", "finished", "paused", "failed", "killed"
STATES = {"killed": KILLED, "hang": "hang", "silent": "hang"}  # by the kind of a failure report
# struct flock of <fcntl.h> on 64-bit systems, and where its l_type is.
FLOCK, LOCK_TYPE = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi", 0)

Run = dict[str, Any]
"""The contents of a run.json, and "folder": the run folder's path."""


def write_run(folder: Path, run: Run, sync: bool = False) -> None:
    """Write run.json, whole or not at all. sync: it is on the disk when this returns. Raises OSError."""
    write_whole(folder / NAME, json.dumps({"format": FORMAT, **run}, indent=1), sync)


def read_run(folder: Path) -> Run:
    """The run of a folder. Raises ConfigError if there is no run.json, or none that this version reads."""
    path = folder / NAME
    try:
        found: Run = json.loads(path.read_bytes())
    except OSError as error:
        what = "does not exist" if not folder.exists() else f"has no {NAME} ({error.strerror})"
        raise ConfigError(f"{folder} {what}; type python src/runs.py table to see the runs below outputs") from None
    except ValueError:
        raise ConfigError(f"{path} cannot be read: it is no JSON; type rm {path} if the run is not needed") from None
    if not _is_record(found):
        raise ConfigError(f"{path} is no record of format {FORMAT}; type rm {path} if the run is not needed")
    found["folder"] = str(folder)
    return found


def _is_record(found: Any) -> bool:
    """Whether it is a record of this format, and holds what is read of it: people edit files, and disks fail."""
    if not _has(found, KEYS) or found.get("format") != FORMAT or not found["lives"]:
        return False
    return all(_has(life, LIFE) for life in found["lives"]) and _has(found["objective"], OBJECTIVE)


def _has(found: Any, kinds: Mapping[str, Any]) -> bool:
    return isinstance(found, dict) and all(name in found and isinstance(found[name], kinds[name]) for name in kinds)


def find_runs(folders: Sequence[str]) -> Iterator[Path]:
    """The run folders at or below `folders`: those with a run.json. Raises ConfigError for a folder that is missing."""
    for name in folders:
        if not os.path.isdir(name):
            raise ConfigError(f"{name} is no folder; type python src/runs.py table <a folder with runs>")
        yield from _below(name, set())


def _below(folder: str, seen: set[str]) -> Iterator[Path]:
    """seen: the folders without a run of their own that were looked into: links may lead back to them."""
    if os.path.exists(os.path.join(folder, NAME)):
        yield Path(folder)
        return
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    for path in _folders_in(folder):
        yield from _below(path, seen)


def _folders_in(folder: str) -> list[str]:
    """Those that can be read: one may be removed meanwhile, or be a link that leads nowhere."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if not entry.name.startswith(".") and entry.is_dir():
                    found.append(entry.path)
    return sorted(found)


def state_of(run: Run) -> str:
    """How a run ended, in one word: finished, paused (by trainer.pause_after), stopped, diverged, failed, hang, killed,
    or running if it goes on.

    A rank 0 that was killed could not write its end. Then nobody holds the folder's lock.
    """
    life = run["lives"][-1]
    if life["state"] not in (RUNNING, FAILED):
        return str(life["state"])
    is_here = life["hosts"][:1] == [socket.gethostname()]
    if life["state"] == RUNNING and (not is_here or is_locked(Path(run["folder"]))):
        return RUNNING
    failure = _failure(run)
    if failure is None:
        return FAILED if life["state"] == FAILED else KILLED
    return STATES.get(failure["first"]["kind"], FAILED)


def exit_code_of(run: Run) -> int | None:
    """The exit code of the run's command, None if it is not known. That of a failure is in its report."""
    failure = _failure(run)
    if failure is not None:
        return int(failure["exit_code"])
    code: int | None = run["lives"][-1]["exit_code"]
    return code


def _failure(run: Run) -> dict[str, Any] | None:
    """The failure report of the run's last life."""
    if run["lives"][-1]["state"] not in (RUNNING, FAILED):
        return None
    from lockstep.failures.report import read_report  # a table of runs that ended well does not need it

    report = read_report(Path(run["folder"]))
    return report if report is not None and report["run"]["time"] >= run["lives"][-1]["started"] else None


def is_locked(folder: Path) -> bool:
    """Whether another process holds the lock of a run folder, such as a rank of a run that was killed a moment ago.

    Asking takes no lock: a run that starts now is not disturbed.
    """
    fields: list[int] = [0] * 5
    fields[LOCK_TYPE] = fcntl.F_WRLCK
    try:
        with open(folder / ".lock") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(FLOCK, *fields))
    except OSError:
        return False
    return int(struct.unpack(FLOCK, answer)[LOCK_TYPE]) != fcntl.F_UNLCK
