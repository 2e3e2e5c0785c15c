"""Samples in shards, files of many samples each: an index says where each sample begins, so that any one can be read
by its number, and an order that needs no list of all samples.

The index lies in a folder of its own, not beside the shards: those are often read-only. It is made once; all ranks and
runs map it into memory.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lockstep.config.schema import Count
from lockstep.data.builtin import one_at_a_time, say
from lockstep.data.partition import generator as seeded_generator
from lockstep.data.samples import EVALUATION, Key
from lockstep.data.shard_formats import FORMATS, NO_TARGET, CutShard, Fields, Format, format_of
from lockstep.data.shard_store import Shard, ShardReader, expanded, reading_ahead, states, stem
from lockstep.data.workers import DatasetReader
from lockstep.distributed.host import cpu_count
from lockstep.errors import ConfigError, first_of
from lockstep.files import is_url

log = logging.getLogger(__name__)

VERSION = 4  # one more when the same shards give another index
COLUMNS = ("begin", "length", "target")  # of the index: int64, a number for each sample

Urls = str | list[str]
Kind = Literal["auto", "tar", "jsonl", "parquet", "arrow"]
Fieldnames = str | list[str]


class IndexedFiles:
    """The shards of one half of a data set, and their index.

    urls: shards of training samples, a pattern such as train-*.tar or train-{000..063}.tar, or a list of them.
    test_urls: those of test samples.
    train: whether these are the training samples.
    format: what a shard is; auto: by the end of its name.
    settings: what else the index depends on.
    index_dir: folder of the indexes, which all runs can write to.
    """

    counts = "samples"  # what it says of each

    def __init__(
        self, urls: Urls, test_urls: Urls, train: bool, format: str, settings: Sequence[Any], index_dir: str
    ) -> None:
        self.key, self.urls = ("urls", urls) if train else ("test_urls", test_urls)
        self.name, self.kind = "train" if train else "test", format
        asked = [self.urls] if isinstance(self.urls, str) else list(self.urls)
        self.places = [url if is_url(url) else os.path.abspath(url) for url in asked]
        state = repr((VERSION, self.places, format, *settings))
        self.folder = Path(index_dir) / f"{self.name}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"

    def format(self, kind: str, folder: Path) -> Format:
        """How samples of this kind of shards are found and read. folder: of the index."""
        raise NotImplementedError

    def kind_of(self, name: str) -> str:
        """The format of the shard with this name."""
        return format_of(name, self.kind)

    def about(self) -> dict[str, Any] | None:
        """What index.json says; None without an index."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "index.json").read_text())
        except (OSError, ValueError):
            return None
        return found

    @cached_property
    def names(self) -> list[str]:
        """The shards that the patterns name."""
        return expanded(self.places)

    def index_once(self, on_error: str) -> None:
        """Make the index unless it is there, and right. Raises ConfigError for shards that cannot be read."""
        shards = states(self.names, self.key)
        if not shards:
            raise ConfigError(
                f"dataset.{self.key}={self.urls} names no file (searched in {Path().absolute()}); "
                f"type dataset.{self.key}=<a pattern such as data/{self.name}-*.tar>"
            )
        about, as_listed = self.about(), [list(shard) for shard in shards]
        try:
            if about is None or about["shards"] != as_listed:  # else the folder may be one that is only read
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with one_at_a_time(self.folder.parent / ".index.lock"):
                    about = self.about()
                    if about is None or about["shards"] != as_listed:
                        about = self._index(shards, about)
        except OSError as error:
            raise ConfigError(
                f"the index of {shards[0][0]} cannot be made in {self.folder.parent} ({error}); "
                f"type dataset.index_dir=<a folder with room that can be written to>"
            ) from None
        if about["cut"] and on_error == "fail":
            raise ConfigError(
                f"{first_of(about['cut'])}; write what is wrong again, or type dataset.on_error=skip to go without"
            )
        for sentence in about["cut"]:
            log.warning("%s; what is whole before that place is used", sentence)

    def _index(self, shards: Sequence[Shard], before: dict[str, Any] | None) -> dict[str, Any]:
        """Write the index. Other processes read the shards: one that has computed must not fork ranks.

        before: what the index that is there says. What it has of shards that are as they were is taken over.
        """
        kinds = {self.kind_of(name): name for name, _, _ in shards}
        if len(kinds) > 1:
            some = " and ".join(f"{name} ({kind})" for kind, name in kinds.items())
            raise ConfigError(
                f"dataset.{self.key} names shards of {len(kinds)} kinds, {some}; type dataset.{self.key}=<those of one>"
            )
        (kind,) = kinds
        begun, temporary = time.monotonic(), self.folder.with_name(f"{self.folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        known, earlier = dict[Shard, int](), None
        if before is not None and before["format"] == kind:
            earlier = ShardIndex.opened(self)
            is_cut = [any(name in sentence for sentence in before["cut"]) for name, _, _ in before["shards"]]
            known = {tuple(shard): number for number, shard in enumerate(before["shards"]) if not is_cut[number]}
        written: dict[str, list[Path]] = {}  # {`stem` of a shard: what `scan` has written of it}
        for path in self.folder.iterdir() if known else ():
            written.setdefault(path.stem, []).append(path)
        new = [number for number, shard in enumerate(shards) if shard not in known]
        some = f"{len(new)} of {len(shards)}" if len(new) < len(shards) else f"{len(shards)}"
        first = f", {shards[new[0]][0]} first," if new else ""
        say(f"counting the {self.counts} of {some} shards once{first} for {self.folder}")
        counts, cut, digest = list[int](), list[str](), hashlib.sha256()
        has_targets = True
        scanner = _Scanner(shards, self.format(kind, temporary), self.key)
        reader = DatasetReader(scanner, min(cpu_count(), len(new)), pin_memory=False)
        files = {name: open(temporary / name, "wb") for name in COLUMNS}  # noqa: SIM115  # closed below
        try:
            read = reader.read([(EVALUATION, number)] for number in new)
            for shard in tqdm(shards, "shards", disable=None, leave=False):
                if shard in known:
                    assert earlier is not None
                    positions, problem = earlier.of_shard(known[shard]), None
                    for path in written.get(stem(shard), ()):
                        _link_or_copy(path, temporary / path.name)
                else:
                    positions, problem = next(read)
                if isinstance(problem, OSError):  # of the folder
                    raise problem
                cut += [problem] if problem else []
                counts.append(len(positions))
                for column, file in zip(positions.T.contiguous().numpy(), files.values(), strict=True):
                    column.tofile(file)
                has_targets &= bool((positions[:, 2] != NO_TARGET).all())
                digest.update(f"{os.path.basename(shard[0])} {shard[1]}".encode() + positions.numpy().tobytes())
        finally:
            reader.close()
            for file in files.values():
                file.close()
        np.array([0, *accumulate(counts)], dtype=np.int64).tofile(temporary / "starts")
        about = {
            "shards": [list(shard) for shard in shards],
            "format": kind,
            "samples": sum(counts),
            "cut": cut,
            "has_targets": has_targets,
            "digest": digest.hexdigest()[:16],
        }
        (temporary / "index.json").write_text(json.dumps(about))
        # A run that uses it has mapped some files, and finds the others by the states of their shards in the new one.
        earlier_folder = self.folder.with_name(f"{self.folder.name}.old")
        shutil.rmtree(earlier_folder, ignore_errors=True)
        if self.folder.exists():
            os.replace(self.folder, earlier_folder)
        os.replace(temporary, self.folder)
        shutil.rmtree(earlier_folder, ignore_errors=True)
        say(f"counted {about['samples']} {self.counts} in {time.monotonic() - begun:.2f} s")
        return about


class ShardFiles(IndexedFiles):
    """Shards of samples.

    inputs: members of a tar (by extension), fields of a line or columns; a;b is the first one there, [a,b] are both.
    targets: those that are the target, as inputs.
    """

    def __init__(
        self,
        urls: Urls,
        test_urls: Urls,
        train: bool,
        format: Kind,
        inputs: Fieldnames,
        targets: Fieldnames,
        index_dir: str,
    ) -> None:
        super().__init__(urls, test_urls, train, format, (inputs, targets), index_dir)
        self.inputs, self.targets = inputs, targets

    def format(self, kind: str, folder: Path) -> Format:
        return FORMATS[kind](self.inputs, self.targets, folder)


class HuggingFaceFiles(ShardFiles):
    """The parquet and Arrow files of one split of a data set of Hugging Face's, in a local folder or at an address.

    path: folder of the data set, as `hf download` or `save_to_disk` writes it.
    train_split: word in the names of the files, or of their folders, of training samples.
    test_split: that of test samples.
    inputs: columns; [a,b] are both.
    targets: column that is the target, as inputs.
    """

    def __init__(
        self,
        path: str,
        train_split: str,
        test_split: str,
        train: bool,
        inputs: Fieldnames,
        targets: Fieldnames,
        index_dir: str,
    ) -> None:
        key, split = ("train_split", train_split) if train else ("test_split", test_split)
        # What `map` has computed lies beside the data, as cache-<hash>.arrow.
        listed = expanded([f"{path}/**/*.parquet", f"{path}/**/*.arrow"])
        found = [file for file in listed if not os.path.basename(file).startswith("cache-")]
        words = "|".join(map(re.escape, (train_split, test_split)))
        said = [re.findall(rf"(?<![^\W_])(?:{words})(?![^\W_])", file.removeprefix(path)) for file in found]
        # The last one counts: the name of a file before that of its folder.
        files = [file for file, names in zip(found, said, strict=True) if names[-1:] == [split]]
        if not found:
            raise ConfigError(
                f"dataset.path={path} is no folder with parquet or Arrow files (searched in {Path().absolute()}), and "
                f"nothing is downloaded; type hf download <name> --repo-type dataset --local-dir <folder>, and "
                f"dataset.path=<folder>"
            )
        if not files:
            raise ConfigError(
                f"no file in {path} has the word {split} of dataset.{key} in its name or folder, such as {found[0]}; "
                f"type dataset.{key}=<a word in the names of its files>, or dataset=shards dataset.urls=<those files>"
            )
        super().__init__(files, files, train, "auto", inputs, targets, index_dir)
        self.key = "path"


def _link_or_copy(path: Path, other: Path) -> None:
    try:
        os.link(path, other)
    except OSError:  # not every file system has links
        shutil.copyfile(path, other)


class _Scanner:
    """What a worker does: it reads a shard from its beginning to its end."""

    def __init__(self, shards: Sequence[Shard], format: Format, key: str) -> None:
        self.shards, self.format, self.key = shards, format, key

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, str | OSError | None] | ConfigError:
        """((samples, 3) of COLUMNS, what is wrong with the shard, or with the folder of the index)."""
        ((_, number),) = keys
        name, size, _ = self.shards[number]
        reader, positions, problem = ShardReader(self.shards), list[tuple[int, int, int]](), None

        def read(begin: int, length: int) -> bytes:
            try:
                return reader.read(number, begin, length)
            except Exception as error:  # an OSError would be one of the folder
                advice = f"type dataset.{self.key}=<those that can be read>, or the command again"
                raise ConfigError(f"the shard {name} cannot be read ({error}); {advice}") from error

        ahead = reading_ahead(read, size) if is_url(name) else read
        try:
            for position in self.format.scan(ahead, size, stem(self.shards[number])):
                positions.append(position)  # noqa: PERF402  # those before an error are kept
        except CutShard as error:
            problem = f"the shard {name} is cut or damaged after {len(positions)} samples: {error}"
        except ConfigError as error:  # returned: a DataLoader would put a traceback into its words
            return error
        except OSError as error:
            return torch.empty(0, 3, dtype=torch.int64), error
        return torch.tensor(positions, dtype=torch.int64).reshape(-1, 3), problem

    def collate(self, read: Any) -> Any:
        return read


def index_all(on_error: str, *parts: IndexedFiles | None) -> None:
    """Make the indexes of the parts of a data set. Raises ConfigError for a shard that is named twice.

    A part may be typed for another one, as in `dataset.train='${dataset.test}'`.
    """
    kept = {files.folder: files for files in parts if files is not None}.values()
    named: dict[str, str] = {}  # {shard: key in the config}
    for files in kept:
        for name in files.names:
            if name in named:
                raise ConfigError(
                    f"the shard {name} is named by dataset.{named[name]} and again by dataset.{files.key}, so its "
                    f"samples would be used twice; type dataset.{named[name]}=<patterns that have no file in common>"
                )
            named[name] = files.key
    for files in kept:
        files.index_once(on_error)


def index_shards(
    train: ShardFiles, test: ShardFiles, on_error: Literal["fail", "skip"], validation: ShardFiles | None
) -> None:
    """`dataset.prepare` of shards: count the samples of each shard, unless that is done.

    train: as dataset.train.files.
    test: as dataset.test.files.
    on_error: as dataset.on_error.
    validation: as dataset.validation.files, where those are shards of their own.
    """
    index_all(on_error, train, test, validation)


class WindowedOrder:
    """The indices of an epoch's samples, as a list of which slices are read: shards in random order, and the samples of
    several of them, a window, in random order. A slice costs what its window costs, wherever it lies.

    starts: (shards + 1,) the first sample of each shard, and the end.
    window: samples; a new window begins with the first shard after each multiple of it.
    """

    def __init__(self, starts: Tensor, window: int, generator: torch.Generator) -> None:
        self.starts = starts
        self.shards = torch.randperm(len(starts) - 1, generator=generator)
        self.seed = int(torch.randint(2**62, (), generator=generator))
        sizes = starts.diff()[self.shards]
        ends = sizes.cumsum(0)
        _, counts = ((ends - sizes) // window).unique_consecutive(return_counts=True)
        self.last = counts.cumsum(0)  # of each window, the number of shards up to its end
        self.ends = ends[self.last - 1]
        self._window: tuple[int, Tensor] | None = None

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(int(self.ends[-1]))
        pieces = [torch.empty(0, dtype=torch.int64)]
        while start < stop:
            number = int(torch.searchsorted(self.ends, start, right=True))
            before = int(self.ends[number - 1]) if number else 0
            piece = self._of_window(number)[start - before : stop - before]
            pieces.append(piece)
            start += len(piece)
        return torch.cat(pieces)

    def _of_window(self, number: int) -> Tensor:
        if self._window is None or self._window[0] != number:
            first = int(self.last[number - 1]) if number else 0
            shards = self.shards[first : self.last[number]].tolist()
            ranges = [self.starts[shard : shard + 2].tolist() for shard in shards]
            samples = torch.cat([torch.arange(start, stop) for start, stop in ranges])
            shuffled = torch.randperm(len(samples), generator=seeded_generator(self.seed, number))
            self._window = number, samples[shuffled]
        return self._window[1]


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The index of some shards, mapped into memory.

    about: what index.json says.
    begin, length, target: (N,) int64 of each sample.
    starts: (shards + 1,) the first sample of each shard, and the end.
    """

    about: dict[str, Any]
    begin: Any
    length: Any
    target: Any
    starts: Any

    @classmethod
    def opened(cls, files: IndexedFiles) -> "ShardIndex":
        """Raises ConfigError if there is none."""
        about = files.about()
        if about is None:
            raise ConfigError(
                f"the samples of dataset.{files.name} are not counted in {files.folder}; keep dataset.prepare as it is"
            )
        columns = {  # an empty file cannot be mapped
            name: np.zeros(0, np.int64)
            if name != "starts" and not about["samples"]
            else np.memmap(files.folder / name, np.int64, "c")
            for name in (*COLUMNS, "starts")
        }
        if files.about() != about:  # another run has made the index again meanwhile
            return cls.opened(files)
        return cls(about, starts=columns.pop("starts"), **columns)

    @property
    def targets(self) -> Tensor | None:
        """(N,) int64; None where some sample has none that is a whole number."""
        return torch.from_numpy(self.target) if self.about["has_targets"] else None

    def of_shard(self, number: int) -> Tensor:
        """(samples, 3) of COLUMNS."""
        part = slice(*map(int, self.starts[number : number + 2]))
        return torch.from_numpy(np.stack([self.begin[part], self.length[part], self.target[part]], 1))


class Shards(torch.utils.data.Dataset[tuple[Any, Any]]):
    """The samples of `files`, read by their numbers. Training shuffles windows of `window` samples.

    size: pixels of the square that each image is resized and cropped to; None: images keep their size.
    """

    def __init__(self, files: ShardFiles, size: int | None, window: int) -> None:
        self.index, self.window = ShardIndex.opened(files), window
        self.format = files.format(self.index.about["format"], files.folder)
        self.names = files.inputs, files.targets
        self.fields = Fields(size, *self.names)
        self.stems = list(map(stem, self.index.about["shards"]))
        self.reader = ShardReader(self.index.about["shards"])
        self.is_far = self.format.reads_shards and any(is_url(name) for name, _, _ in self.index.about["shards"])
        self.fetched: dict[int, bytes | Exception] = {}

    def __len__(self) -> int:
        return int(self.index.about["samples"])

    @property
    def targets(self) -> Tensor | None:
        """(N,) int64, None if some sample has no whole number as its target."""
        return self.index.targets

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the classes, if the shards say them."""
        return self.format.classes

    @property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of the shards, and of where their samples are."""
        return f"{self.index.about['digest']} of {len(self)} samples in {len(self.index.about['shards'])} shards"

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        """(inputs, target). Raises OSError, with the name of the shard, for a sample that cannot be read."""
        shard, begin, length = self._place(number)
        fetched = self.fetched.pop(number, None)
        if isinstance(fetched, Exception):
            raise fetched
        stored = fetched or (self.reader.read(shard, begin, length) if self.format.reads_shards else b"")
        try:
            sample = self.format.fields(stored, self.stems[shard], begin, length)
            inputs, targets = (self.fields.value(sample, names) for names in self.names)
        except Exception as error:
            reason = f"{self.index.about['shards'][shard][0]}, bytes {begin} to {begin + length}: {error}"
            raise OSError(reason) from error
        return inputs, targets

    def _place(self, number: int) -> tuple[int, int, int]:
        """(shard, first byte, number of bytes) of a sample."""
        shard = int(np.searchsorted(self.index.starts, number, side="right")) - 1
        return shard, int(self.index.begin[number]), int(self.index.length[number])

    def fetch(self, numbers: Sequence[int]) -> None:
        """Ask for the bytes of these samples at once, where an answer takes long. `__getitem__` then has them."""
        if self.is_far:
            self.fetched = dict(zip(numbers, self.reader.read_all(list(map(self._place, numbers))), strict=True))

    def epoch_order(self, generator: torch.Generator, numbers: Tensor | None) -> WindowedOrder:
        """The order of an epoch. numbers: (n,) of the samples in a part of the data set, None for all."""
        starts = torch.from_numpy(self.index.starts)
        return WindowedOrder(starts if numbers is None else torch.searchsorted(numbers, starts), self.window, generator)


def shards(files: ShardFiles, size: Count | None, window: Count) -> Shards:
    """The samples of `files`, whose index `index_shards` has made.

    files: a node of `ShardFiles`.
    size: pixels of the square that each image is resized and cropped to; null: images keep their size.
    window: samples that are shuffled together, of shards in random order; fewer samples than that are all shuffled.
    """
    return Shards(files, size, window)
