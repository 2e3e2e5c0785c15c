"""What a shard is: tar as webdataset writes it, JSON lines, parquet or Arrow. Where samples lie, and what they hold."""

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from lockstep.data.image_files import IMAGES
from lockstep.errors import ConfigError

CHUNK = 2**22  # bytes that are read at once
BLOCK = 512  # bytes of a tar's header; its members begin at multiples of it
MOST_ZEROS = 2**20 + 2 * BLOCK  # at the end of a tar: two blocks, and what fills up a record of 1 MiB
NO_TARGET = -(2**63)  # in an index, of a sample whose target is no whole number
ROWS = ("parquet", "arrow")  # formats of tables
KEY = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)")  # the name of a member: its sample, and its extension

Read = Callable[[int, int], bytes]
"""(first byte, number of bytes) -> bytes of a shard."""


class CutShard(Exception):
    """A shard ends in the middle of a sample, or is none."""


Names = str | Sequence[str]
"""Of fields, as dataset.inputs has them."""


class Fields:
    """Values of the fields of a sample, decoded.

    size: pixels of the square that each image is resized and cropped to; None: images keep their size.
    """

    def __init__(self, size: int | None, *names: Names) -> None:
        self.size = size
        if any(f".{word}" in IMAGES for word in re.split(r"\W+", repr(names))):
            self.image  # noqa: B018  # imports torchvision before workers are forked

    @cached_property
    def image(self) -> Any:
        """What decodes an image."""
        from lockstep.data.images import ImageReader

        return ImageReader(self.size)

    def value(self, sample: Mapping[str, Any], names: Names) -> Any:
        """The value of a field; of the first one that is there for "jpg;png"; of a field in a field for "json.label".

        A tuple of values for a list of names. Raises ValueError for a field that is missing.
        """
        if not isinstance(names, str):
            return tuple(self.value(sample, name) for name in names)
        for name in names.split(";"):
            if name in sample:
                return self.decoded(name, sample[name])
            first, _, rest = name.partition(".")
            inner = self.decoded(first, sample[first]) if rest and first in sample else None
            if isinstance(inner, Mapping) and rest in inner:
                return inner[rest]
        raise ValueError(f"it has no {names}, but {', '.join(sample) or 'nothing'}")

    def decoded(self, name: str, value: Any) -> Any:
        """A member of a tar by its extension, an image of a column; anything else as it is."""
        if not isinstance(value, bytes):
            if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # as Hugging Face stores an image
                return self.decoded(name, value["bytes"])
            return value
        extension = name.rpartition(".")[2].lower()
        if extension == "cls":
            return int(value)
        if extension == "json":
            return json.loads(value)
        if extension in ("txt", "text"):
            return value.decode()
        if extension == "npy":
            return np.load(io.BytesIO(value), allow_pickle=False)
        return self.image(_image_name(name, is_jpeg=value[:2] == b"\xff\xd8"), value)


@cache
def _image_name(name: str, is_jpeg: bool) -> Path:
    """What an image is called that is a member or a column."""
    path = Path(f"sample.{name}")
    return path if path.suffix.lower() in IMAGES else path.with_suffix(".jpg") if is_jpeg else path


class Format(Protocol):
    """How samples lie in a shard.

    reads_shards: whether a sample is read from its shard, not from what `scan` has written.
    classes: names of the classes, if the shards say them.
    """

    reads_shards: bool

    @property
    def classes(self) -> Sequence[str] | None: ...

    def scan(self, read: Read, size: int, name: str) -> Iterator[tuple[int, int, int]]:
        """(first byte, bytes, target) of each sample of a shard of `size` bytes, in their order.

        Raises CutShard where the shard ends too early, or is no shard.

        name: of the file into which it writes what it needs of this shard, without its end.
        """

    def fields(self, stored: bytes, shard: str, begin: int, length: int) -> Mapping[str, Any]:
        """{name: value} of the bytes of one sample, which lies there; a member of a tar is bytes. shard: its `name`."""


class Tar:
    """A sample is the members in a row that have one name, up to its first dot: a/0001.jpg and a/0001.cls."""

    reads_shards, classes = True, None

    def __init__(self, inputs: Names, targets: Names, folder: Path) -> None:
        self.targets = targets if isinstance(targets, str) else ""

    def scan(self, read: Read, size: int, name: str) -> Iterator[tuple[int, int, int]]:
        key, begin, end, target = None, 0, 0, NO_TARGET
        wanted = self.targets.split(";")
        for start, name, data, length in members(read, size):
            parts = KEY.fullmatch(name)
            if parts is None:
                continue
            if parts[1] != key:
                if key is not None:
                    yield begin, end - begin, target
                key, begin, target = parts[1], start, NO_TARGET
            end = data + -(-length // BLOCK) * BLOCK
            if target == NO_TARGET:
                target = _target(parts[2], read, data, length, wanted)
        if key is not None:
            yield begin, end - begin, target

    def fields(self, stored: bytes, shard: str, begin: int, length: int) -> Mapping[str, Any]:
        found = {}
        read: Read = lambda begin, length: stored[begin : begin + length]  # noqa: E731
        for _, name, data, length in members(read, len(stored), is_whole=False):
            parts = KEY.fullmatch(name)
            if parts is not None:
                found[parts[2]] = stored[data : data + length]
        return found


def _target(extension: str, read: Read, data: int, length: int, wanted: Sequence[str]) -> int:
    """The whole number that a member holds, if it is the target."""
    if extension.rpartition(".")[2] not in ("cls", "json"):
        return NO_TARGET
    if extension not in (word for name in wanted for word in (name, name.partition(".")[0])):
        return NO_TARGET
    try:
        return whole_number({extension: json.loads(read(data, length))}, wanted)
    except ValueError:
        return NO_TARGET  # reading the sample names it


def whole_number(values: Mapping[str, Any], names: Sequence[str]) -> int:
    """The value of the first of these fields that is there, if it is a whole number; else NO_TARGET."""
    for name in names:
        first, _, rest = name.partition(".")
        value = values.get(name, values.get(first))
        if name not in values and isinstance(value, Mapping):
            value = value.get(rest)
        if type(value) is int:
            return value
    return NO_TARGET


def lines(read: Read, size: int) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of a shard of `size` bytes, with the end of the line."""
    place, rest = 0, b""
    while place < size:
        chunk = read(place, min(CHUNK, size - place))
        begin = place - len(rest)
        place += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield begin, line + b"\n"
            begin += len(line) + 1
    if rest:
        yield size - len(rest), rest


class JsonLines:
    """A sample is a line with an object, such as {"text": "...", "label": 3}."""

    reads_shards, classes = True, None

    def __init__(self, inputs: Names, targets: Names, folder: Path) -> None:
        self.targets = targets.split(";") if isinstance(targets, str) else []

    def scan(self, read: Read, size: int, name: str) -> Iterator[tuple[int, int, int]]:
        for begin, line in lines(read, size):
            if line.isspace():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                if begin + len(line) == size and not line.endswith(b"\n"):
                    raise CutShard(f"its last line, from byte {begin} on, is no JSON ({error})") from None
                values = None  # reading the sample names it
            target = whole_number(values, self.targets) if isinstance(values, dict) else NO_TARGET
            yield begin, len(line), target

    def fields(self, stored: bytes, shard: str, begin: int, length: int) -> Mapping[str, Any]:
        values = json.loads(stored)
        if not isinstance(values, dict):
            raise ValueError("the line is no object with fields")
        return values


class ShardFile(io.RawIOBase):
    """A shard as a file object."""

    def __init__(self, read: Read, size: int) -> None:
        self.read_bytes, self.size, self.place = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self.place))
        buffer[:count] = self.read_bytes(self.place, count) if count else b""
        self.place += count
        return count


def row_tables(kind: str, read: Read, size: int, columns: Set[str]) -> Iterator[Any]:
    """Some columns of each row group of a parquet file, or of each batch of a file or stream of Arrow, as a table.

    kind: parquet or arrow. Raises CutShard, and what `read` raises, which must be no OSError.
    """
    import pyarrow
    import pyarrow.parquet

    source, group = pyarrow.PythonFile(ShardFile(read, size), "r"), -1
    try:
        if kind == "parquet":
            file = pyarrow.parquet.ParquetFile(source, pre_buffer=False)
            names = [name for name in file.schema_arrow.names if name in columns]
            groups = range(file.num_row_groups)
            tables = (file.read_row_group(number, names, use_threads=False) for number in groups)
        else:
            is_file = size > 6 and read(0, 6) == b"ARROW1"
            opened = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
            names = [name for name in opened.schema.names if name in columns]
            batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
            tables = (pyarrow.Table.from_batches([batch]).select(names) for batch in batches)
        group = 0
        for table in tables:
            yield table
            group += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition(". ")[0]
        raise CutShard(reason if group < 0 else f"row group {group} cannot be read ({reason})") from None


class Rows:
    """A sample is a row of a parquet or Arrow file. `scan` writes the columns, row group by row group, into a file of
    Arrow, which a row is read from: in parquet a row group is compressed as a whole, and a stream has no table of its
    parts.

    kind: parquet or arrow.
    """

    reads_shards = False

    def __init__(self, kind: str, inputs: Names, targets: Names, folder: Path) -> None:
        require_package("pyarrow", f"dataset.format={kind}")
        both = [name for names in (inputs, targets) for name in ([names] if isinstance(names, str) else names)]
        self.columns = {name.partition(".")[0] for names in both for name in names.split(";")}
        self.targets = targets.split(";") if isinstance(targets, str) else []
        self.kind, self.folder = kind, folder
        self.files: dict[str, Any] = {}  # {name of a shard: what reads its rows}

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, as Hugging Face keeps them beside a column of class numbers."""
        for path in sorted(self.folder.glob("*.rows"))[:1]:  # a shard without rows has none
            about = _opened(path).schema.metadata or {}
            features = json.loads(about.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
            names = (features.get(name, {}).get("names") for name in self.targets)
            return next(filter(None, names), None)
        return None

    def scan(self, read: Read, size: int, name: str) -> Iterator[tuple[int, int, int]]:
        import pyarrow

        batch_number, path = 0, str(self.folder / f"{name}.rows")
        with ExitStack() as stack:
            out = None
            for table in map(_decoded, row_tables(self.kind, read, size, self.columns)):
                out = out or stack.enter_context(pyarrow.ipc.new_file(path, table.schema))
                first_names = {name.partition(".")[0] for name in self.targets}
                known = table.select([name for name in table.column_names if name in first_names])
                targets = known.to_pylist() or [{}] * len(table)
                for batch in table.combine_chunks().to_batches():
                    out.write_batch(batch)
                    for row in range(len(batch)):
                        yield batch_number, row, whole_number(targets[row], self.targets)
                    targets, batch_number = targets[len(batch) :], batch_number + 1

    def fields(self, stored: bytes, shard: str, begin: int, length: int) -> Mapping[str, Any]:
        """begin, length: the numbers of the batch and of the row in it."""
        if shard not in self.files:
            try:
                self.files[shard] = _opened(self.folder / f"{shard}.rows")
            except FileNotFoundError:  # another run has made the index again
                raise OSError("it has changed since its samples were counted; type the command again") from None
        (row,) = self.files[shard].get_batch(begin).slice(length, 1).to_pylist()
        return cast(Mapping[str, Any], row)


def _decoded(table: Any) -> Any:
    """A table with values where it has numbers of a dictionary: a file of Arrow takes one dictionary for a column."""
    import pyarrow

    is_coded = pyarrow.types.is_dictionary
    plain = [field.with_type(field.type.value_type) if is_coded(field.type) else field for field in table.schema]
    return table.cast(pyarrow.schema(plain, table.schema.metadata))


def _opened(path: Path) -> Any:
    """A file of Arrow, mapped into memory."""
    import pyarrow

    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))


def members(read: Read, size: int, is_whole: bool = True) -> Iterator[tuple[int, str, int, int]]:
    """(where its headers begin, name, where its bytes begin, how many) of each file in a tar of `size` bytes.

    is_whole: a piece of a tar has no zeros at its end, and was checked when the whole was. tarfile takes ten times as
    long for a member. Raises CutShard.
    """
    place = begin = 0
    longer: dict[str, str] = {}  # what a header says of the next one, such as a long name
    while place + BLOCK <= size:
        header = read(place, BLOCK)
        if header[0] == 0 and not header.strip(b"\0"):
            if is_whole:
                _require_end(read, place, size)
            return
        # POSIX 1003.1, ustar: the sum is that of the header with spaces in its place.
        if is_whole and _octal(header[148:156]) != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
            raise CutShard(f"no header of a tar at byte {place}")
        name, data = header[:100].partition(b"\0")[0].decode(errors="surrogateescape"), place + BLOCK
        if header[257:263] == b"ustar\0" and header[345]:
            name = header[345:500].partition(b"\0")[0].decode(errors="surrogateescape") + "/" + name
        length = int(longer["size"]) if "size" in longer else _octal(header[124:136])
        place = data + -(-length // BLOCK) * BLOCK
        if data + length > size:
            raise CutShard(f"{name} ends at byte {data + length}, and the shard at {size}")
        kind = header[156:157]
        if kind == b"L":  # a long name, as GNU tar writes it
            longer = {"path": read(data, length).rstrip(b"\0").decode(errors="surrogateescape")}
        elif kind == b"x":  # as POSIX has it
            records = re.findall(rb"\d+ ([^=]+)=(.*)\n", read(data, length))
            longer = {name.decode(): value.decode(errors="surrogateescape") for name, value in records}
        else:
            if kind in (b"0", b"\0"):  # a file
                yield begin, longer.get("path", name), data, length
            begin, longer = place, {}
    if is_whole:
        raise CutShard(f"it ends at byte {size} without the zeros that end a tar")


def _require_end(read: Read, place: int, size: int) -> None:
    """Raise CutShard unless the zeros from byte `place` on are those that end a tar."""
    rest = read(place, min(size - place, MOST_ZEROS))
    zeros = len(rest) - len(rest.lstrip(b"\0"))
    if zeros < len(rest):
        more = f"and it goes on at byte {place + zeros}"
        raise CutShard(f"zeros from byte {place} on are the end of a tar, {more}: a hole, or tars that are joined")
    if size - place > MOST_ZEROS:
        raise CutShard(f"from byte {place} on it has over 1 MiB of zeros, as a download that did not come to its end")


def _octal(field: bytes) -> int:
    """A number of a header: octal digits, or of 8 GB and more its bytes. Raises CutShard."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise CutShard("no header of a tar where one must be") from None


def require_package(name: str, what: str) -> None:
    """Raise ConfigError if the package that reads `what` is not installed."""
    if find_spec(name) is None:
        raise ConfigError(f"{what} needs the package {name}; type pip install {name}")


FORMATS: dict[str, Callable[[Names, Names, Path], Format]] = {
    "tar": Tar,
    "jsonl": JsonLines,
    **{kind: partial(Rows, kind) for kind in ROWS},
}
ENDS = {f".{kind}": kind for kind in FORMATS} | {".ndjson": "jsonl", ".json": "jsonl"}


def format_of(name: str, kind: str) -> str:
    """The format of a shard. kind: dataset.format. Raises ConfigError for one that is not known."""
    found = ENDS.get(Path(name).suffix.lower()) if kind == "auto" else kind
    if found is None:
        raise ConfigError(
            f"the end of {name} does not say what it is; type dataset.format=tar, or another one of "
            f"{', '.join(FORMATS)}"
        )
    return found
