"""The files of a snapshot: written whole or not at all, read after their checksums were compared, and removed.

A snapshot is `step_00000123.pt`, an archive of torch.save with a CRC-32 of each of its records. It holds tensors and
plain values only, so `torch.load(weights_only=True)` reads it.

The `.pt` of a sharded snapshot holds what is small, and for each tensor its type, shape and blocks. The numbers are in
the folder `step_00000123.parts.<random>`, in one file of plain numbers per rank. A snapshot that is written again has
another folder, so the old one is whole until the new one is. The `.pt` is written last.
"""

import hashlib
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.distributed.host import cpu_count
from lockstep.files import explain_disk_error, sync_folder, write_whole
from lockstep.strategies.tensor_bytes import Block, FileBlock, StoredTensor, as_bytes, map_only

log = logging.getLogger(__name__)

FORMAT = 4  # of the snapshots that this version writes and reads, beside FORMAT_IN_PARTS
FORMAT_IN_PARTS = 5
SECTIONS = ("model", "optimizer", "ema")  # of a snapshot's contents, whose tensors are in the parts
STORED = {"dtype", "shape", "blocks"}  # what the snapshot's own file holds of a tensor
INFIX = ".parts."

# Which snapshots there are.


def list_snapshots(folder: Path) -> list[Path]:
    """The numbered snapshots in `folder`, newest first. Only loading them shows whether they are damaged."""
    return sorted(filter(_is_numbered, folder.glob("step_*.pt")), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step of a numbered snapshot."""
    return int(path.stem.removeprefix("step_"))


def parts_of(path: Path) -> list[Path]:
    """The folders with parts of the snapshot `path`. Empty without any."""
    return list(path.parent.glob(f"{path.stem}{INFIX}*"))


def _is_numbered(path: Path) -> bool:
    return re.fullmatch(r"step_\d+", path.stem) is not None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain_name(name: Any) -> str:
    """The name of a file, without folders: a snapshot may be a stranger's."""
    return Path(str(name)).name


# Writing.


def save_snapshot(
    folder: Path, name: str, contents: dict[str, Any], keep_last: int, damaged: Collection[Path] = ()
) -> Path:
    """Write `contents` to folder/name.pt. A kill at any moment leaves a snapshot that loads.

    keep_last: of the numbered snapshots, so many stay, the newest up to this one.
    damaged: snapshots that were found damaged, which count as the oldest.
    Raises OSError, for example on a full disk; the older snapshots, and one of this name, are untouched then. What only
    fails to remove older ones is a warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pt"
    write_whole(path, lambda file: torch.save({"format": FORMAT, **contents}, file))
    try:
        own = contents["parts"]["folder"] if "parts" in contents else None
        _remove_folders([parts for parts in parts_of(path) if parts.name != own])
        if _is_numbered(path):
            _remove_older(path, keep_last, damaged)
    except OSError as error:
        reason = explain_disk_error(error, folder)
        log.warning("%s is saved, but not all older ones are removed: %s; training goes on", path, reason)
    return path


def bytes_in_parts(contents: dict[str, Any]) -> int:
    """What this rank saves of the contents of a snapshot, in which each tensor of `SECTIONS` is a Block."""
    sizes: list[int] = []
    map_only(Block, lambda block: sizes.append(block.nbytes), [contents[name] for name in SECTIONS])
    return sum(sizes)


def write_part(path: Path, contents: dict[str, Any]) -> dict[str, Any]:
    """Write this rank's blocks to `path`, one after the other. Returns their index and the file's SHA-256.

    Raises OSError, for example on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, position = hashlib.sha256(), 0
    with open(path, "wb") as file:

        def write(block: Block) -> dict[str, Any]:
            nonlocal position
            dtype = str(block.dtype).removeprefix("torch.")
            stored: dict[str, Any] = {"dtype": dtype, "shape": list(block.shape), "blocks": []}
            if block.values is not None and block.values.numel():
                content = as_bytes(block.values.contiguous())
                file.write(content)
                digest.update(content)
                stored["blocks"] = [[path.name, position, list(block.offsets), list(block.values.shape)]]
                position += len(content)
            return stored

        index = map_only(Block, write, {name: contents[name] for name in SECTIONS})
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return {"index": index, "files": {path.name: [position, digest.hexdigest()]}}


def describe_parts(folder: Path, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What the snapshot's own file holds of the parts in `folder`. reports: of `write_part`, one for each rank."""
    files = {name: found for report in reports for name, found in report["files"].items()}
    index: dict[str, Any] = _united([report["index"] for report in reports])
    return index | {"format": FORMAT_IN_PARTS, "parts": {"folder": folder.name, "files": files}}


def _united(indexes: list[Any]) -> Any:
    """One index of those of all ranks: dicts are united, and the blocks of a tensor are put together."""
    first = indexes[0]
    if _is_stored(first):
        return {**first, "blocks": [block for index in indexes for block in index["blocks"]]}
    if isinstance(first, dict):
        keys = dict.fromkeys(key for index in indexes for key in index)
        return {key: _united([index[key] for index in indexes if key in index]) for key in keys}
    if isinstance(first, list | tuple):
        return type(first)(_united(list(items)) for items in zip(*indexes, strict=True))
    return first


def _is_stored(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == STORED


# Reading.


def load_verified(path: Path, check_parts: bool = True) -> Any:
    """The contents of the snapshot `path` on the CPU, with a StoredTensor for each tensor that is in its parts.

    check_parts: whether to read the parts and to compare their checksums.
    Raises ValueError, or what torch.load raises, if it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile:
        raise ValueError("it is cut off, or no file of torch.save") from None
    if damaged is not None:
        raise ValueError("its checksum does not match")
    contents = load_plain(path)
    return open_parts(path, contents, check_parts) if isinstance(contents, dict) else contents


def load_plain(path: Path) -> Any:
    """What torch.save has written to `path`, on the CPU. Raises many types; ValueError if loading it could run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":  # in its message torch advises to switch the check off
            raise ValueError("it holds more than tensors and plain values, and loading that could run code") from None
        raise


def open_parts(path: Path, contents: dict[str, Any], check: bool) -> dict[str, Any]:
    """`contents` of the snapshot `path`, with a StoredTensor for each tensor that is in its parts.

    check: whether to read the parts and to compare their checksums.
    Raises ValueError for a part that is missing, cut off or changed.
    """
    if "parts" not in contents:
        return contents
    folder = path.with_name(_plain_name(contents["parts"]["folder"]))
    files = {folder / _plain_name(name): found for name, found in contents["parts"]["files"].items()}
    for file, (length, _) in files.items():
        if not file.is_file():
            raise ValueError(f"its part {folder.name}/{file.name} is missing")
        if file.stat().st_size != length:
            raise ValueError(f"its part {folder.name}/{file.name} is cut off")
    if check:
        with ThreadPoolExecutor(cpu_count()) as pool:
            for file, found in zip(files, pool.map(_sha256, files), strict=True):
                if found != files[file][1]:
                    raise ValueError(f"the checksum of its part {folder.name}/{file.name} does not match")

    def opened(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(opened, value))
        if not _is_stored(value):
            return {key: opened(item) for key, item in value.items()} if isinstance(value, dict) else value
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']} is no type of numbers")
        blocks = [
            FileBlock(folder / _plain_name(name), int(position), tuple(offsets), tuple(shape))
            for name, position, offsets, shape in value["blocks"]
        ]
        return StoredTensor(value["shape"], dtype, blocks)

    return {**contents, **opened({name: contents[name] for name in SECTIONS})}


# Removing.


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left in `folder`: unfinished files, and parts without a snapshot.

    A snapshot that cannot be read keeps its parts: they are whole, and it may come back.
    """
    for path in folder.glob("*.pt.tmp"):
        try:
            path.unlink()
        except OSError as error:
            log.warning("%s is of no snapshot and cannot be removed (%s); move it away", path, error)
    for parts in folder.glob(f"*{INFIX}*"):
        snapshot = folder / f"{parts.name.partition(INFIX)[0]}.pt"
        with suppress(Exception):  # torch.load raises many types for a damaged file
            if not snapshot.exists() or load_plain(snapshot).get("parts", {}).get("folder") != parts.name:
                shutil.rmtree(parts, ignore_errors=True)


def _remove_older(path: Path, keep_last: int, damaged: Collection[Path]) -> None:
    """Keep `path` and the `keep_last` - 1 numbered ones before it. Later ones stay: they were passed over, damaged."""
    older = [other for other in list_snapshots(path.parent) if step_of(other) < step_of(path)]
    older.sort(key=lambda other: other in damaged)  # stable: the good ones first, newest first
    for old in older[max(keep_last, 1) - 1 :]:
        parts = parts_of(old)
        old.unlink()
        _remove_folders(parts)


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
