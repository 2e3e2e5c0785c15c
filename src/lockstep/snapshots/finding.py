"""Finds the snapshots to resume from, and loads them after their checksums were compared."""

import logging
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import ConfigError, path_value, path_word
from lockstep.snapshots.files import FORMAT, accepted_checksums, list_snapshots
from lockstep.snapshots.parts import FORMAT_IN_PARTS, open_parts, sha256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keys:
    """The words by which a caller names snapshots, for the sentences of errors.

    run: that of a run. which: that of one of its snapshots; None for a training, which takes the newest, and can start
    afresh.
    """

    run: str = "resume"
    which: str | None = None

    @property
    def trains(self) -> bool:
        return self.which is None


TRAINING = Keys()


def find_snapshots(resume: str | Path | None, run_dir: Path) -> list[Path]:
    """The snapshots to try for this run, best first: its own, else those that `resume` names. Empty: a fresh start.

    resume: a run folder, a folder of snapshots, a snapshot file, or None. Raises ConfigError if there is nothing in it
    to resume from.
    """
    own = list_snapshots(run_dir / "snapshots")
    if own or resume is None:
        return own
    return named_snapshots(resume, TRAINING, TRAINING.run)


def named_snapshots(name: str | Path, keys: Keys, key: str) -> list[Path]:
    """The snapshots that a name stands for, newest first: a run folder, a folder of snapshots, or a snapshot file.

    key: the one of `keys` by which it was named. Raises ConfigError if there is none.
    """
    path = Path(name)
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
        _require_companion(path, keys, key)
        return [path]
    is_folder = os.path.isdir(path)
    found = list_snapshots(path / "snapshots") or list_snapshots(path) if is_folder else []
    if not found:
        what = "holds no finished snapshot" if is_folder else "does not exist"
        way = "to start afresh leave resume= out, to resume type" if keys.trains else "type"
        raise ConfigError(f"{key}={name} {what}; {way} {key}=<a run folder or one of its snapshots/step_*.pt>")
    return found


def load_first_good(paths: list[Path], keys: Keys = TRAINING) -> tuple[dict[str, Any], Path] | None:
    """(contents on the CPU, path) of the first of `paths` that is not damaged; None if `paths` is empty.

    A damaged snapshot is passed over with a warning. Raises ConfigError if all are damaged, since a silent fresh start
    would lose the run, and for a snapshot of another format.
    """
    for path in paths:
        try:
            contents = _load_verified(path, check_parts=True)
        except Exception as error:  # torch.load raises many types for a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning("snapshot %s is damaged (%s) and passed over", path, reason)
            continue
        _require_format(path, contents, keys)
        return contents, path
    if paths:
        raise ConfigError(
            f"none of the {len(paths)} snapshots in {paths[0].parent} can be read; {_way_out(paths, keys)}"
        )
    return None


def _way_out(damaged: list[Path], keys: Keys) -> str:
    """What to type if none of `damaged` can be read. Those of a folder are tried again as long as they are there."""
    folder = damaged[0].parent
    if damaged != list_snapshots(folder):  # one was named
        return f"type {keys.which or keys.run}=<another snapshot>"
    best, moved = folder / "best.pt", f"{folder}.damaged"
    if keys.which is not None:
        return f"type {keys.which}={'best' if _is_good(best) else '<another snapshot>'}"
    start = f"to start afresh type {shlex.join(['mv', str(folder), moved])} and the command again"
    if _is_good(best):
        typed = path_word("resume", f"{moved}/best.pt")
        return f"{start}; to go on from best.pt, which can be read, type that and {typed}"
    return f"{start}; to go on from elsewhere type that and resume=<another snapshot>"


def _is_good(path: Path) -> bool:
    with suppress(Exception):  # it is not there, or damaged
        _load_verified(path, check_parts=True)
        return True
    return False


def load_chosen(path: Path) -> dict[str, Any]:
    """The contents of a snapshot that rank 0 has found good. Raises ValueError for a damaged one."""
    contents: dict[str, Any] = _load_verified(path, check_parts=False)
    return contents


def _load_verified(path: Path, check_parts: bool) -> Any:
    """The contents of `path`. Raises ValueError or what torch.load raises if it is damaged."""
    accepted = accepted_checksums(path)
    if not accepted:
        raise ValueError(f"{path.with_suffix('.json').name} with its checksum is missing or damaged")
    if sha256(path) not in accepted:
        raise ValueError("its checksum does not match")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if "weights_only" in str(error):  # torch advises to switch the check off
            raise ValueError("it holds more than tensors and plain values, and loading that could run code") from None
        raise
    return open_parts(path, contents, check_parts) if isinstance(contents, dict) else contents


def _require_format(path: Path, contents: Any, keys: Keys) -> None:
    found = contents.get("format", 1) if isinstance(contents, dict) else "unknown"
    if found not in (FORMAT, FORMAT_IN_PARTS):
        way = f"type {keys.run}=<a snapshot of this version>"
        afresh = ", or to start afresh hydra.run.dir=<a new folder>" if keys.trains else ""
        raise ConfigError(
            f"{path} has the snapshot format {found}, and this version reads format {FORMAT} and {FORMAT_IN_PARTS}; "
            f"{way}{afresh}"
        )


def _require_companion(path: Path, keys: Keys, key: str) -> None:
    """Raise ConfigError for a file without a companion, and say what it is instead of a snapshot."""
    if path.with_suffix(".json").exists():
        return
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # any file may have been named
        contents = None
    run_dir = path_value(path.parent) if list_snapshots(path.parent / "snapshots") else "<the run folder>"
    if isinstance(contents, dict) and "model" in contents and "optimizer" in contents:
        run_dir = "<the run folder>"
        what = f"has no {path.with_suffix('.json').name} with its checksum beside it; copy that file there, or"
    elif isinstance(contents, dict) and contents and all(torch.is_tensor(value) for value in contents.values()):
        what = "holds only weights, and "
        what += "training also needs the optimizer's state;" if keys.trains else "a snapshot also tells their step;"
    else:
        what = "is not a snapshot;"
    instead = f"{key}=last" if key == keys.which else f"{key}={run_dir}"
    raise ConfigError(f"{key}={path} {what} type {instead}")
