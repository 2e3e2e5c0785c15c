"""`run.json` in a run folder: what was run, with which code and packages, on what, and how it ended."""

import fcntl
import hashlib
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.files import write_whole
from lockstep.source_code import DIGITS, PARTS, ROOT, hash_of_source, module_hashes

NAME = "run.json"
FORMAT = 1
# What readers of a record rely on, and its types.
KEYS: dict[str, Any] = {"command": str, "cwd": str, "steps": int, "samples_per_second": float | int | None}
KEYS |= dict.fromkeys(("overrides", "flags", "lives"), list)
KEYS |= dict.fromkeys(("config", "data", "code", "environment", "objective"), dict)
LIFE: dict[str, Any] = {"state": str, "exit_code": int | None, "hosts": list, "launcher": str}
LIFE |= {"world_size": int, "from_step": int, "started": float | int}
OBJECTIVE: dict[str, Any] = {"name": str, "mode": str, "best": float | int | None, "step": int | None}
RUNNING, FINISHED, PAUSED, FAILED, KILLED = "running", "finished", "paused", "failed", "killed"
UNKNOWN = "unknown"  # began on another machine, and writes nothing any more
SILENT_SECONDS = 3600.0  # without a change in the folder of a run on another machine
STATES = {"killed": KILLED, "hang": "hang"}  # by the kind of a failure report
# struct flock of <fcntl.h> on 64-bit systems, and where its l_type is.
FLOCK, LOCK_TYPE = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi", 0)
PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "tensorboard", "tqdm", "scikit-learn")
DIFF = "uncommitted.diff"
LARGEST_DIFF = 2**18  # bytes; of a longer one only its hash is kept
NAMED = 50  # untracked files in a record
GIT_SECONDS = 30.0

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
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # it may be removed meanwhile, or be a link that leads nowhere
                if not entry.name.startswith(".") and entry.is_dir():
                    found.append(entry.path)
    for path in sorted(found):
        yield from _below(path, seen)


def best_of(run: Run) -> tuple[float | None, int | None]:
    """(objective, step) of the best evaluation. Of a run that ended before its first one, those of its end."""
    objective = run["objective"]
    if objective["best"] is None and objective.get("last") is not None:
        return objective["last"], run["steps"]
    return objective["best"], objective["step"]


def metric_on_test(run: Run, metric: str | None = None) -> float | None:
    """A metric on the test set, as the run reports it at its end. None if it has not been tested.

    metric: such as accuracy; None for that of the objective.
    """
    test = run.get("test")
    metrics = test.get("metrics") if isinstance(test, dict) else None  # older runs have no such key
    value = metrics.get(metric or run["objective"]["name"].partition("/")[2]) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else None


def state_of(run: Run) -> str:
    """How a run ended, in one word: finished, paused (by trainer.pause_after), stopped, diverged, failed, hang, killed,
    running if it goes on, or unknown if it began on another machine and has written nothing for an hour.

    A rank 0 that was killed could not write its end. Then nobody holds the folder's lock.
    """
    life, folder = run["lives"][-1], Path(run["folder"])
    if life["state"] not in (RUNNING, FAILED):
        return str(life["state"])
    is_here = life["hosts"][:1] == [socket.gethostname()]
    if life["state"] == RUNNING and is_here and is_locked(folder):
        return RUNNING
    failure = _failure(run)
    if failure is not None:
        return STATES.get(failure["first"]["kind"], FAILED)
    if life["state"] == FAILED or is_here:
        return FAILED if life["state"] == FAILED else KILLED
    return RUNNING if time.time() - changed_at(folder) < SILENT_SECONDS else UNKNOWN


def changed_at(folder: Path) -> float:
    """When a file of a run folder was written last, in seconds since 1970."""
    times = [0.0]
    for part in (folder, folder / "logs", folder / "snapshots"):
        with suppress(OSError), os.scandir(part) as entries:
            for entry in entries:
                with suppress(OSError):  # it may be removed meanwhile; what a link names may be anywhere
                    times.append(entry.stat(follow_symlinks=False).st_mtime)
    return max(times)


def seconds_of(run: Run) -> float:
    """How long the lives of a run have trained. One that was killed lasted until the newest file of its folder."""
    total = 0.0
    for life in run["lives"]:
        ended = life["ended"]
        if ended is None and life is run["lives"][-1]:
            ended = changed_at(Path(run["folder"]))
        total += max(0.0, ended - life["started"]) if ended is not None else 0.0
    return round(total, 2)


def run_exit_code(run: Run) -> int | None:
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


@cache
def versions() -> dict[str, str]:
    """{"python": "3.11.2", "torch": ...} of this process, without importing anything."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_facts(root: Path = ROOT) -> tuple[dict[str, Any], bytes]:
    """(facts for run.json, the uncommitted diff of src/ and conf/ or nothing). Takes some ms.

    The facts are "source", a hash of src/ and conf/, "modules", those of the user, and where git knows these folders
    "commit", "diff_sha256", "diff_bytes" and "untracked", a list of files.
    """
    facts: dict[str, Any] = {"source": hash_of_source(root), "modules": module_hashes(users_only=True)}
    commit = _git(root, "rev-parse", "HEAD", "HEAD:./src")
    if commit is None:  # no git, no repository, or one that does not have this folder
        return facts, b""
    changes = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *PARTS) or b""
    status = changes.decode(errors="replace").splitlines()
    untracked = [line[3:] for line in status if line.startswith("??")]
    facts |= {"commit": commit.decode().split()[0], "untracked": untracked[:NAMED]}
    if len(status) == len(untracked):
        return facts, b""
    diff = _git(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", *PARTS) or b""
    facts |= {"diff_sha256": hashlib.sha256(diff).hexdigest()[:DIGITS], "diff_bytes": len(diff)}
    return facts, diff if len(diff) <= LARGEST_DIFF else b""


@cache
def loaded_code_facts() -> tuple[dict[str, Any], bytes]:
    """`code_facts` when this process asked first: it had loaded the code by then, and so have its forks.

    The user's modules may be loaded later.
    """
    return code_facts()


def _git(root: Path, *words: str) -> bytes | None:
    """What git prints, None if it cannot answer. It takes no lock: another git may work in the same folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            ["git", *words],
            cwd=root,
            env=kept | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout if answer.returncode == 0 else None
