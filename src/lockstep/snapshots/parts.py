"""The files of a sharded snapshot: a folder with one part per rank, which the snapshot's own file describes.

`step_00000123.pt` holds what is small, and for each tensor its type, shape and blocks. The numbers are in the folder
`step_00000123.parts.<random>`, in one file of plain numbers per rank. A snapshot that is written again has another
folder, so the old one is whole until the new one is. The `.pt` is written last.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lockstep.distributed.host import cpu_count
from lockstep.strategies.stored_tensor import Block, FileBlock, StoredTensor, as_bytes

SECTIONS = ("model", "optimizer", "ema")  # of a snapshot's contents, whose tensors are in the parts
STORED = {"dtype", "shape", "blocks"}  # what the snapshot's own file holds of a tensor
INFIX = ".parts."
FORMAT_IN_PARTS = 3  # of the snapshot's own file


def blocks_of(contents: dict[str, Any]) -> Iterator[Block]:
    """What this rank saves of the contents of a snapshot, in which each tensor of `SECTIONS` is a Block."""
    for leaf in tree_leaves([contents[name] for name in SECTIONS]):
        if isinstance(leaf, Block) and leaf.values is not None:
            yield leaf


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

        index = tree_map_only(Block, write, {name: contents[name] for name in SECTIONS})
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return {"index": index, "files": {path.name: [position, digest.hexdigest()]}}


def described(folder: Path, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What the snapshot's own file holds of the parts in `folder`. reports: of `write_part`, one for each rank."""
    files = {name: found for report in reports for name, found in report["files"].items()}
    index: dict[str, Any] = merged([report["index"] for report in reports])
    return index | {"format": FORMAT_IN_PARTS, "parts": {"folder": folder.name, "files": files}}


def merged(indexes: list[Any]) -> Any:
    """One index of those of all ranks: dicts are united, and the blocks of a tensor are put together."""
    first = indexes[0]
    if _is_stored(first):
        return {**first, "blocks": [block for index in indexes for block in index["blocks"]]}
    if isinstance(first, dict):
        keys = dict.fromkeys(key for index in indexes for key in index)
        return {key: merged([index[key] for index in indexes if key in index]) for key in keys}
    if isinstance(first, list | tuple):
        return type(first)(merged(list(items)) for items in zip(*indexes, strict=True))
    return first


def open_parts(path: Path, contents: dict[str, Any], check: bool) -> dict[str, Any]:
    """`contents` of the snapshot `path`, with a StoredTensor for each tensor that is in its parts.

    check: whether to read the parts and to compare their checksums. Raises ValueError for a part that is missing, cut
    off or changed.
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
            for file, found in zip(files, pool.map(sha256, files), strict=True):
                if found != files[file][1]:
                    raise ValueError(f"the checksum of its part {folder.name}/{file.name} does not match")
    index = {name: contents[name] for name in SECTIONS}
    return {**contents, **tree_map(partial(_opened, folder), index, is_leaf=_is_stored)}


def sync_folder(folder: Path) -> None:
    """Without it a power cut may lose the names of new files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parts_of(path: Path) -> list[Path]:
    """The folders that hold the parts of the snapshot `path`, as its companion names them. Empty without any."""
    companion = read_companion(path) or {}
    names = [companion.get("parts"), *companion.get("replaced_parts", [])]
    return [path.with_name(_plain_name(name)) for name in names if name]


def read_companion(path: Path) -> dict[str, Any] | None:
    """The companion of the snapshot `path`. None if it is missing or damaged."""
    with suppress(OSError, ValueError):
        companion: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        return companion
    return None


def remove_unused_parts(folder: Path) -> None:
    """Delete the parts in `folder` that no snapshot names: a killed process was writing or deleting them.

    A snapshot whose companion is missing or damaged keeps its parts: they are whole, and the companion may come back.
    """
    for parts in folder.glob(f"*{INFIX}*"):
        snapshot = folder / f"{parts.name.partition(INFIX)[0]}.pt"
        is_named = parts in parts_of(snapshot) or read_companion(snapshot) is None
        if not (snapshot.exists() and is_named):
            shutil.rmtree(parts, ignore_errors=True)


def _is_stored(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == STORED


def _opened(folder: Path, value: Any) -> Any:
    if not _is_stored(value):
        return value
    blocks = [
        FileBlock(folder / _plain_name(name), int(position), tuple(offsets), tuple(shape))
        for name, position, offsets, shape in value["blocks"]
    ]
    dtype = getattr(torch, str(value["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value['dtype']} is no type of numbers")
    return StoredTensor(value["shape"], dtype, blocks)


def _plain_name(name: Any) -> str:
    """The name of a file, without folders: a snapshot may be a stranger's."""
    return Path(str(name)).name
