"""Snapshot files: written whole or not at all, listed, and swept.

A snapshot is `step_00000123.pt` and, beside it, its companion `step_00000123.json` with its SHA-256 and position. It
holds tensors and plain values only, so `torch.load(weights_only=True)` reads it. A sharded one has parts, too.
"""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lockstep.snapshots.parts import parts_of, read_companion, remove_unused_parts, sha256, sync_folder

log = logging.getLogger(__name__)

FORMAT = 2  # of the snapshots that this version writes and reads, beside FORMAT_IN_PARTS


def save_snapshot(
    folder: Path, name: str, contents: dict[str, Any], keep_last: int, damaged: Collection[Path] = (), **position: Any
) -> Path:
    """Write `contents` to folder/name.pt. A kill at any moment leaves a snapshot that loads.

    position: what the companion also contains, for people who read it. Of the numbered snapshots, the `keep_last`
    newest up to this one are kept; those that were found `damaged` count as the oldest. Raises OSError, for example on
    a full disk; the older snapshots, and one of this name, are untouched then. What only fails to remove older ones is
    a warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pt"
    replaced = accepted_checksums(path) if path.exists() else []
    replaced_parts = parts_of(path) if replaced else []
    temporary = _write_temporary(path, lambda file: torch.save({"format": FORMAT, **contents}, file))
    try:
        companion = {"sha256": sha256(temporary), **position}
        # Two files cannot be replaced at once. Until both are, the companion fits the old file and the new one.
        both = {"replaces": replaced, "replaced_parts": [parts.name for parts in replaced_parts]}
        _write_companion(path, companion | both)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    try:
        sync_folder(folder)  # before the older ones go
        if replaced:
            _write_companion(path, companion)
        _remove_folders(replaced_parts)
        _remove_older(path, keep_last, damaged)
    except OSError as error:
        reason = explain(error, folder)
        log.warning("%s is saved, but not all older ones are removed: %s; training goes on", path, reason)
    return path


def save_file(path: Path, contents: Any) -> None:
    """torch.save to `path`, whole or not at all. Raises OSError, for example on a full disk."""
    _replace(_write_temporary(path, lambda file: torch.save(contents, file)), path)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left in `folder`: unfinished files, companions and parts without a snapshot."""
    unfinished = [*folder.glob("*.pt.tmp"), *folder.glob("*.json.tmp")]
    lone = [path for path in folder.glob("step_*.json") if not path.with_suffix(".pt").exists()]
    for path in [*unfinished, *lone]:
        try:
            path.unlink()
        except OSError as error:
            log.warning("%s is of no snapshot and cannot be removed (%s); move it away", path, error)
    remove_unused_parts(folder)


def list_snapshots(folder: Path) -> list[Path]:
    """The numbered snapshots in `folder`, newest first. Only loading them shows whether they are damaged."""
    return sorted(filter(_is_numbered, folder.glob("step_*.pt")), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step of a numbered snapshot."""
    return int(path.stem.removeprefix("step_"))


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


def _remove_older(path: Path, keep_last: int, damaged: Collection[Path]) -> None:
    """Keep `path` and the `keep_last` - 1 numbered ones before it. Later ones stay: they were passed over, damaged."""
    if not _is_numbered(path):
        return
    older = [other for other in list_snapshots(path.parent) if step_of(other) < step_of(path)]
    older.sort(key=lambda other: other in damaged)  # stable: the good ones first, newest first
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


def accepted_checksums(path: Path) -> list[str]:
    """The checksums that the companion of `path` accepts; none if the companion is missing or damaged."""
    companion = read_companion(path) or {}
    return [companion["sha256"], *companion.get("replaces", [])] if "sha256" in companion else []
