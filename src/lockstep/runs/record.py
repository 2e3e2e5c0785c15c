"""`run.json` in a run folder: what was run, with which code and packages, on what, and how it ended. No torch here."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.config.schema import NO_NUMBER
from lockstep.errors import ConfigError, differing
from lockstep.files import ROOT, is_users, short_hash, write_whole

NAME, FORMAT = "run.json", 2
SWEEP = "LOCKSTEP_SWEEP"  # the environment variable that tells a job of a sweep the sweep's folder
RUNNING, FINISHED, PAUSED, FAILED, KILLED = "running", "finished", "paused", "failed", "killed"
UNKNOWN = "unknown"  # began on another machine, and writes nothing any more
SILENT_SECONDS = 3600.0  # without a write of run.json by a run on another machine
PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "tensorboard", "tqdm", "scikit-learn")
WRITE_SECONDS = 1.0  # between two writes, but for those after the first epochs
FIRST_EPOCHS = 100
MOST_ROWS = 1000  # of the history; of more, every second one is dropped

Run = dict[str, Any]
"""The contents of a run.json, and "folder": the run folder's path. docs/runs.md has the keys."""


def read_run(folder: Path) -> Run:
    """The run of a folder. Raises ConfigError if there is no run.json, or none that this version reads."""
    try:
        found: Run = json.loads((folder / NAME).read_bytes())
        if found["format"] != FORMAT or not found["starts"]:
            raise ValueError(f"its format is not {FORMAT}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"{folder / NAME} is no record of a run ({type(error).__name__}: {error})"
        raise ConfigError(f"{what}; type python src/runs.py table to see the runs below outputs") from None
    return found | {"folder": str(folder)}


def find_runs(folders: Sequence[str | Path]) -> Iterator[Path]:
    """The run folders at or below `folders`: those with a run.json. Raises ConfigError for a folder that is missing."""
    for name in folders:
        if not os.path.isdir(name):
            raise ConfigError(f"{name} is no folder; type python src/runs.py table <a folder with runs>")
        for folder, below, files in os.walk(name):
            below[:] = [] if NAME in files else sorted(one for one in below if not one.startswith("."))
            if NAME in files:
                yield Path(folder)


def changes_no_number(word: str) -> bool:
    """Whether an override, or a key, says only where a run computes, what it shows and what it keeps."""
    return re.split(r"[=./@]", word.lstrip("+~"))[0] in NO_NUMBER


def best_of(run: Run) -> tuple[float | None, int | None]:
    """(objective, step) of the best evaluation. Of a run that ended before its first one, those of its end."""
    objective = run["objective"]
    if objective["best"] is None and objective["last"] is not None:
        return objective["last"], run["steps"]
    return objective["best"], objective["step"]


def state_of(run: Run) -> str:
    """How a run ended, in one word: finished, paused (by trainer.pause_after), stopped, diverged, failed, hang, killed,
    running if it goes on, or unknown if it began on another machine and has written nothing for an hour. A rank 0 that
    was killed could not write its end. Then its process is gone, or a failure report tells more."""
    start = run["starts"][-1]
    if start["state"] not in (RUNNING, FAILED):
        return str(start["state"])
    is_here = start["hosts"][:1] == [socket.gethostname()]
    if start["state"] == RUNNING and is_here and is_alive(start["pid"]):
        return RUNNING
    from lockstep.failures.report import read_report  # a table of runs that ended well does not need it

    report = read_report(Path(run["folder"]))
    if report is not None and report["run"]["time"] >= start["started"]:
        kind = str(report["first"]["kind"])
        return kind if kind in (KILLED, "hang") else FAILED
    if start["state"] == FAILED:
        return FAILED
    if is_here:
        return KILLED
    return RUNNING if time.time() - start["ended"] < SILENT_SECONDS else UNKNOWN


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


class RunRecord:
    """Rank 0 writes run.json with it: at the start, at most once a second while steps and epochs end, and at the end.
    It has methods of a Logger, for `Loggers` to call."""

    def start(self, info: Any) -> None:
        """`info.facts` are keys of run.json; "start" has those of this start."""
        facts, run, self.progress = info.facts, info.run, info.run.progress
        self.folder, step = Path(run.config.run_dir), self.progress.step
        before: Run = {"starts": [], "history": []}
        with suppress(ConfigError):  # a fresh folder, or a file that is damaged
            before = read_run(self.folder)
        if starts := before["starts"]:  # one has its values of the keys that the next one has changed
            changed = differing(before["config"], facts["config"])
            starts[-1]["config"] = {key: then for key, (then, _) in changed.items()}
            if starts[-1]["state"] == RUNNING:  # its rank 0 could not write its end
                starts[-1]["state"] = KILLED
        code, now = code_facts(), time.time()
        files = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
        users = {name: file for name, file in files.items() if file.endswith(".py") and is_users(file)}
        modules = {name: hashed(Path(file)) for name, file in users.items() if not file.startswith(f"{ROOT}/src/")}
        name = run.objective or f"test/{run.task.monitor}"  # where nothing is chosen, of the last weights
        mode = run.direction if run.objective else run.task.mode(name)
        self.begun = facts["start"] | {"started": now, "ended": now, "state": RUNNING, "exit_code": None}
        self.begun |= {"pid": os.getpid(), "from_step": step, "source": code["source"]}
        self.run: Run = {
            "format": FORMAT,
            **{key: value for key, value in facts.items() if key != "start"},
            "code": code | {"modules": modules},
            "environment": facts["environment"] | versions(),
            "objective": {"name": name, "mode": mode, "last": None},
            "history": [row for row in before["history"] if row["step"] <= step] if step else [],
            "test": facts["test"] if run.finished else None,  # another kill must not read the test set again
            "starts": [*starts, self.begun],
        }
        self._write()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._write(now=False)

    def epoch(self, summary: Any) -> None:
        history = self.run["history"]
        history.append({"epoch": summary.epoch, "step": summary.step, **summary.flat()})
        if len(history) > MOST_ROWS:
            del history[:-1:2]
        self._write(now=len(history) <= FIRST_EPOCHS)

    def test(self, test: Any) -> None:
        self.run["test"] = test  # at once: a kill before the end must not read the test set twice
        self._write()

    def end(self, info: Any, state: str) -> None:
        """`info.last`, or the test where nothing is chosen, has the last value of the objective."""
        objective, numbers = self.run["objective"], info.last or (self.run["test"] or {}).get("metrics", {})
        objective["last"] = numbers.get(objective["name"].partition("/")[2])
        self.begun |= {"state": state, "exit_code": info.exit_code}
        self._write(sync=True)

    def _write(self, now: bool = True, sync: bool = False) -> None:
        """now: else only if the last time is a second ago."""
        if now or time.time() - self.begun["ended"] > WRITE_SECONDS:
            progress = self.progress
            self.run["steps"] = self.begun["to_step"] = progress.step
            self.run["objective"] |= {"best": progress.best, "step": progress.best_step}
            self.begun["ended"] = time.time()
            write_whole(self.folder / NAME, json.dumps(self.run, indent=1), sync)


def versions() -> dict[str, str]:
    """{"python": "3.11.2", "torch": ...} of this process, without importing anything."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@cache  # of the code that a sweep's jobs share, too
def code_facts(root: Path = ROOT) -> dict[str, str]:
    """{"source": a hash of the Python files in src/ and the YAML files in conf/, "commit": where git knows it}."""
    paths = sorted(path for pattern in ("src/**/*.py", "conf/**/*.yaml") for path in root.glob(pattern))
    local = root / "conf" / "local"  # of this machine; the config shows what it sets
    hashes = [hashed(path, path.relative_to(root)) for path in paths if not path.is_relative_to(local)]
    git = ["git", "-C", str(root), "rev-parse", "HEAD", "HEAD:./src"]  # the latter fails in a repository around it
    facts = {"source": short_hash(*hashes)}
    with suppress(OSError, subprocess.SubprocessError):
        facts["commit"] = subprocess.run(git, check=True, capture_output=True, text=True, timeout=30).stdout.split()[0]
    return facts


def hashed(path: Path, name: object = "") -> str:
    """Of a file and its name. An editor may just be replacing it."""
    return short_hash(name, path.read_bytes() if path.exists() else b"")
