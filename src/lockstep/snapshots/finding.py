"""Finds the snapshots to resume from, and loads them after their checksums were compared."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.snapshots.files import FORMAT, accepted_checksums, list_snapshots
from lockstep.snapshots.parts import FORMAT_IN_PARTS, open_parts, sha256

log = logging.getLogger(__name__)


def find_snapshots(resume: str | Path | None, run_dir: Path) -> list[Path]:
    """The snapshots to try for this run, best first: its own, else those that `resume` names. Empty: a fresh start.

    resume: a run folder, a folder of snapshots, a snapshot file, or None. Raises ConfigError if there is nothing in it
    to resume from.
    """
    own = list_snapshots(run_dir / "snapshots")
    if own or resume is None:
        return own
    path = Path(resume)
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
        _require_companion(path)
        return [path]
    is_folder = os.path.isdir(path)
    found = list_snapshots(path / "snapshots") or list_snapshots(path) if is_folder else []
    if not found:
        what = "holds no finished snapshot" if is_folder else "does not exist"
        raise ConfigError(
            f"resume={resume} {what}; to start afresh leave resume= out, "
            f"to resume type resume=<a run folder or one of its snapshots/step_*.pt>"
        )
    return found


def load_first_good(paths: list[Path]) -> tuple[dict[str, Any], Path] | None:
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
        _require_format(path, contents)
        return contents, path
    if paths:
        raise ConfigError(f"none of the {len(paths)} snapshots in {paths[0].parent} can be read; {_way_out(paths)}")
    return None


def _way_out(damaged: list[Path]) -> str:
    """What to type if none of `damaged` can be read. Those of a folder are tried again as long as they are there."""
    folder = damaged[0].parent
    if damaged != list_snapshots(folder):  # one was named
        return "type resume=<another snapshot>"
    best, moved = folder / "best.pt", f"{folder}.damaged"
    start = f"to start afresh type mv {folder} {moved} and the command again"
    with suppress(Exception):  # no best.pt, or a damaged one
        _load_verified(best, check_parts=True)
        return f"{start}; to go on from best.pt, which can be read, type that and resume={moved}/best.pt"
    return f"{start}; to go on from elsewhere type that and resume=<another snapshot>"


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


def _require_format(path: Path, contents: Any) -> None:
    found = contents.get("format", 1) if isinstance(contents, dict) else "unknown"
    if found not in (FORMAT, FORMAT_IN_PARTS):
        raise ConfigError(
            f"{path} has the snapshot format {found}, and this version reads format {FORMAT} and {FORMAT_IN_PARTS}; "
            f"type resume=<a snapshot of this version>, or to start afresh hydra.run.dir=<a new folder>"
        )


def _require_companion(path: Path) -> None:
    """Raise ConfigError for a file without a companion, and say what it is instead of a snapshot."""
    if path.with_suffix(".json").exists():
        return
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # any file may have been named
        contents = None
    run_dir = path.parent if list_snapshots(path.parent / "snapshots") else "<the run folder>"
    if isinstance(contents, dict) and "model" in contents and "optimizer" in contents:
        run_dir = "<the run folder>"
        what = f"has no {path.with_suffix('.json').name} with its checksum beside it; copy that file there, or"
    elif isinstance(contents, dict) and contents and all(torch.is_tensor(value) for value in contents.values()):
        what = "holds only weights, and training also needs the optimizer's state;"
    else:
        what = "is not a snapshot;"
    raise ConfigError(f"resume={path} {what} type resume={run_dir}")
