"""Snapshot files: written whole or not at all, found in a folder, verified when they are loaded.

A snapshot is `step_00000123.pt` and, beside it, its companion `step_00000123.json` with its SHA-256 and position. It
holds tensors and plain values only, so `torch.load(weights_only=True)` reads it. A sharded one has parts, too.
"""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lockstep.errors import ConfigError
from lockstep.snapshots.parts import FORMAT_IN_PARTS, open_parts, parts_of, remove_unused_parts, sha256, sync_folder

log = logging.getLogger(__name__)

FORMAT = 2  # of the snapshots that this version writes and reads, beside FORMAT_IN_PARTS


def save_snapshot(folder: Path, name: str, contents: dict[str, Any], keep_last: int, **position: Any) -> Path:
    """Write `contents` to folder/name.pt. A kill at any moment leaves a snapshot that loads.

    position: what the companion also contains, for people who read it. Of the numbered snapshots, the `keep_last`
    newest up to this one are kept. Raises OSError, for example on a full disk; the older snapshots are untouched then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pt"
    replaced = _accepted_checksums(path) if path.exists() else []
    replaced_parts = parts_of(path) if replaced else []
    temporary = _write_temporary(path, lambda file: torch.save({"format": FORMAT, **contents}, file))
    try:
        companion = {"sha256": sha256(temporary), **position}
        # Two files cannot be replaced at once. Until both are, the companion fits the old file and the new one.
        both = {"replaces": replaced, "replaced_parts": [parts.name for parts in replaced_parts]}
        _write_companion(path, companion | both)
        _replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if replaced:
        _write_companion(path, companion)
    _remove_folders(replaced_parts)
    _remove_older(path, keep_last)
    return path


def save_file(path: Path, contents: Any) -> None:
    """torch.save to `path`, whole or not at all. Raises OSError, for example on a full disk."""
    _replace(_write_temporary(path, lambda file: torch.save(contents, file)), path)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left in `folder`: unfinished files, companions and parts without a snapshot."""
    for unfinished in folder.glob("*.pt.tmp"):
        unfinished.unlink()
    for unfinished in folder.glob("*.json.tmp"):
        unfinished.unlink()
    for companion in folder.glob("step_*.json"):
        if not companion.with_suffix(".pt").exists():
            companion.unlink()
    remove_unused_parts(folder)


def list_snapshots(folder: Path) -> list[Path]:
    """The numbered snapshots in `folder`, newest first. Only loading them shows whether they are damaged."""
    return sorted(filter(_is_numbered, folder.glob("step_*.pt")), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step of a numbered snapshot."""
    return int(path.stem.removeprefix("step_"))


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
        raise ConfigError(
            f"none of the {len(paths)} snapshots in {paths[0].parent} can be read; "
            f"to start afresh move that folder away, to resume type resume=<another snapshot>"
        )
    return None


def load_chosen(path: Path) -> dict[str, Any]:
    """The contents of a snapshot that rank 0 has found good. Raises ValueError for a damaged one."""
    contents: dict[str, Any] = _load_verified(path, check_parts=False)
    return contents


def explain(error: OSError, folder: Path) -> str:
    """`error` in words, with what to do about it. It ends in a request, so that " and ..." can follow."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error}; free some space"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error}; {folder} cannot be written: make it writable"
    return f"{error}; check {folder}"


def _write_temporary(path: Path, write: Callable[[BinaryIO], None]) -> Path:
    """A temporary file in the folder of `path`, filled by `write` and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):  # on a full disk torch.save raises an error that does not say so
            raise error.__context__ from None
        raise
    return temporary


def _replace(temporary: Path, path: Path) -> None:
    os.replace(temporary, path)
    sync_folder(path.parent)


def _write_companion(path: Path, companion: dict[str, Any]) -> None:
    target = path.with_suffix(".json")
    _replace(_write_temporary(target, lambda file: _write_json(file, companion)), target)


def _write_json(file: BinaryIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value).encode())


def _remove_older(path: Path, keep_last: int) -> None:
    """Keep `path` and the `keep_last` - 1 numbered ones before it. Later ones stay: they were passed over, damaged."""
    if not _is_numbered(path):
        return
    older = [other for other in list_snapshots(path.parent) if step_of(other) < step_of(path)]
    for old in older[max(keep_last, 1) - 1 :]:
        parts = parts_of(old)
        old.unlink()
        old.with_suffix(".json").unlink(missing_ok=True)
        _remove_folders(parts)


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _is_numbered(path: Path) -> bool:
    return re.fullmatch(r"step_\d+", path.stem) is not None


def _accepted_checksums(path: Path) -> list[str]:
    """The checksums that the companion of `path` accepts; none if the companion is missing or damaged."""
    try:
        companion = json.loads(path.with_suffix(".json").read_text())
        return [companion["sha256"], *companion.get("replaces", [])]
    except (OSError, ValueError, KeyError):
        return []


def _load_verified(path: Path, check_parts: bool) -> Any:
    """The contents of `path`. Raises ValueError or what torch.load raises if it is damaged."""
    accepted = _accepted_checksums(path)
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
