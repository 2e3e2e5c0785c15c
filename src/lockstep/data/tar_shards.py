"""Samples in tar files, as webdataset writes them: the members that have one name up to its first dot are a sample.

An index, made once, says where the members lie, so that any sample is read by its number. All ranks map it into memory.
"""

import json
import os
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.config.schema import Count
from lockstep.data.source import DataSource, Splits
from lockstep.data.vision import on_all_cores, read_image
from lockstep.errors import ConfigError
from lockstep.files import is_url, one_at_a_time, short_hash, write_whole

NONE = -(2**63)  # no whole number
NO_ROWS = np.empty((0, 6), np.int64)
DECODERS: dict[str, Any] = {"cls": json.loads, "json": json.loads, "txt": bytes.decode}  # others are images
Tar = tuple[str, int, str]  # name, bytes, and what tells that it has changed
# The tars read last, in each process; one that falls out is closed when nobody reads from it.
_opened = lru_cache(32)(partial(open, mode="rb", buffering=0))


class TarSamples(Dataset[tuple[Any, Any]]):
    """members: the extensions of inputs and targets. columns: (6, N) int64: of each sample its tar, the first byte and
    the bytes of both members, and its class. The attribute `targets` has these, where all are whole numbers in .cls."""

    def __init__(self, tars: list[Tar], columns: torch.Tensor, members: tuple[str, str], size: int | None) -> None:
        self.tars, self.columns, self.shards, self.members, self.size = tars, columns, columns[0], members, size
        self.targets = columns[5] if (columns[5] > NONE).all() else None

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        tar, *places, target = self.columns[:, index].tolist()
        inputs = self._value(self.tars[tar][0], self.members[0], *places[:2])
        return inputs, self._value(self.tars[tar][0], self.members[1], *places[2:]) if self.targets is None else target

    def _value(self, name: str, extensions: str, begin: int, length: int) -> Any:
        if is_url(name):
            system, path = fsspec.core.url_to_fs(name)  # again: one from before a fork must not be used
            stored = system.cat_file(path, start=begin, end=begin + length)
        else:
            stored = os.pread(_opened(name).fileno(), length, begin)
        if not length or len(stored) != length:
            raise OSError(f"{name} has {len(stored)} of {length} bytes of its .{extensions}")
        decode = DECODERS.get(extensions.lower().rpartition(".")[2])
        return decode(stored) if decode else read_image(stored, self.size)


@dataclass(kw_only=True)
class TarShards(DataSource):
    """urls: of tars, or addresses that fsspec reads, with *. inputs, targets: extensions of members; "jpg;png" is
    either. cls is a number, json an object, txt a text, and any other an image, as of `read_image` with `size`.
    index_dir: a folder that all runs can write to."""

    urls: str | list[str]
    test_urls: str | list[str]
    val_urls: str | list[str] | None
    inputs: str
    targets: str
    size: Count | None
    index_dir: str

    def prepare(self) -> None:
        scan = partial(_scan, [self.inputs.lower().split(";"), self.targets.lower().split(";")])
        for urls, place in self._indexes():
            tars = _tars(urls)
            with one_at_a_time(place.parent):
                # Not without need: another machine may have the file mapped, and NFS would end its ranks.
                if place.exists() and torch.load(place, mmap=True, weights_only=True)["tars"] == tars:
                    continue
                rows = np.concatenate([NO_ROWS, *on_all_cores(scan, "indexing tars", range(len(tars)), tars)])
                columns = torch.from_numpy(np.ascontiguousarray(rows.T))  # without threads: ranks are forked
                write_whole(place, partial(torch.save, {"tars": tars, "columns": columns}))

    def splits(self) -> Splits:
        found = [torch.load(place, mmap=True, weights_only=True) for _, place in self._indexes()]
        names = [tar[0] for index in found for tar in index["tars"]]
        if len(names) != len({*names}):
            raise ConfigError("a tar is in two splits; type dataset.urls and test_urls that have no file in common")
        return Splits(*(TarSamples(**index, members=(self.inputs, self.targets), size=self.size) for index in found))

    def _indexes(self) -> Iterator[tuple[Any, Path]]:
        for urls in filter(None, (self.urls, self.test_urls, self.val_urls)):
            yield urls, Path(self.index_dir, f"{short_hash(os.getcwd(), urls, self.inputs, self.targets)}.tars")


def _tars(urls: str | list[str]) -> list[Tar]:
    def state(file: Any) -> Tar:
        about = file.fs.info(file.path)
        return file.full_name.removeprefix("file://"), about["size"], str(about.get("ETag") or about.get("mtime"))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(state, fsspec.open_files(urls)))


def _scan(extensions: list[list[str]], number: int, tar: Tar) -> Any:
    rows = dict[str, list[int]]()
    try:
        with fsspec.open(tar[0]) as file, tarfile.open(fileobj=file, mode="r:") as opened:
            for member in iter(opened.next, None):
                opened.members.clear()  # type: ignore[attr-defined]  # a million of them would take a gigabyte
                parts = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)  # key and extension
                for place, choice in enumerate(extensions):
                    if parts and member.isfile() and parts[2].lower() in choice:
                        row = rows.setdefault(parts[1], [number, 0, 0, 0, 0, NONE])
                        row[1 + 2 * place : 3 + 2 * place] = member.offset_data, member.size
                        if place == 1 and choice == ["cls"]:
                            label = opened.extractfile(member).read().strip()  # type: ignore[union-attr]
                            row[5] = int(label) if label.isdigit() else NONE
            file.seek(opened.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes anything for the end
                raise tarfile.ReadError("its end is missing, or it is damaged")
    except tarfile.TarError as error:
        raise ValueError(f"{tar[0]}: {error}") from error
    return np.array(list(rows.values()), dtype=np.int64).reshape(-1, 6)
