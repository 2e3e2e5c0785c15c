"""Documents in shards as token numbers: each shard once, into a file beside its index; and windows over all of them."""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Count
from lockstep.data.dataset import IGNORED
from lockstep.data.shard_formats import (
    ENDS,
    NO_TARGET,
    ROWS,
    CutShard,
    Format,
    Read,
    lines,
    require_package,
    row_tables,
)
from lockstep.data.shard_store import stem
from lockstep.data.shards import IndexedFiles, ShardIndex, Urls, WindowedOrder, index_all
from lockstep.data.text import Text
from lockstep.errors import ConfigError

SYMBOLS = ("characters", "bytes")
TIKTOKEN_END = "<|endoftext|>"  # the number after those of a file of tiktoken

Documents = Literal["auto", "text", "jsonl", "parquet", "arrow"]


class Vocabulary(Protocol):
    """What the token numbers of a text stand for, as `Text` has it."""

    @property
    def symbols_hash(self) -> str:
        """With another one the same numbers are another text."""

    def encode(self, text: str) -> Tensor:
        """Token numbers (length,) int64."""

    def decode(self, tokens: Tensor) -> str:
        """The text of token numbers (length,)."""


class FileVocabulary:
    """That of a file of a tokenizer: of Hugging Face (tokenizer.json), or of tiktoken (.tiktoken).

    A file of tiktoken has no pattern that cuts a text into words: it gets that of GPT-2.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.symbols_hash = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        if path.endswith(".tiktoken"):
            require_package("tiktoken", path)
        else:
            require_package("tokenizers", path)

    def _unreadable(self, reason: Any) -> ConfigError:
        return ConfigError(
            f"dataset.tokenizer={self.path} cannot be read ({reason}); type dataset.tokenizer=bytes, or "
            f"dataset.tokenizer=<a tokenizer.json or a .tiktoken file>"
        )

    @cached_property
    def coder(self) -> Any:
        """Made where it is used: a process that has made one of Hugging Face's should not be forked."""
        try:
            return self._tiktoken() if self.path.endswith(".tiktoken") else self._hugging_face()
        except Exception as error:  # that of tokenizers is a plain one
            raise self._unreadable(error) from error

    def _tiktoken(self) -> Any:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        # Not load_tiktoken_bpe: it keeps what it has read once for each path, however the file changes.
        lines = map(bytes.split, Path(self.path).read_bytes().splitlines())
        ranks = {base64.b64decode(word): int(rank) for word, rank in filter(None, lines)}
        return tiktoken.Encoding(
            Path(self.path).stem,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={TIKTOKEN_END: len(ranks)},
        )

    def _hugging_face(self) -> Any:
        import tokenizers

        coder = tokenizers.Tokenizer.from_file(self.path)
        coder.no_truncation()  # what the file says of them is for batches of texts
        coder.no_padding()
        return coder

    @property
    def size(self) -> int:
        """The number of tokens."""
        return int(self.coder.n_vocab if self.path.endswith(".tiktoken") else self.coder.get_vocab_size())

    def numbers(self, text: str) -> list[int]:
        """As `encode`."""
        if self.path.endswith(".tiktoken"):
            return list(self.coder.encode(text, allowed_special="all"))
        return list(self.coder.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> Tensor:
        return torch.tensor(self.numbers(text), dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        return str(self.coder.decode(tokens.tolist()))


class TokenFiles(IndexedFiles):
    """Shards of documents.

    field: the text in a line of JSON, or the column of a table; a text file is one document.
    tokenizer: characters, bytes, or a file: tokenizer.json of Hugging Face, or one that ends in .tiktoken.
    separator: text that is put after each document, such as the special token of its end; null: nothing.
    """

    counts = "documents"

    def __init__(
        self,
        urls: Urls,
        test_urls: Urls,
        train: bool,
        format: Documents,
        field: str,
        tokenizer: str,
        separator: str | None,
        index_dir: str,
    ) -> None:
        self.file = None if tokenizer in SYMBOLS else FileVocabulary(tokenizer)
        state = None if self.file is None else self.file.symbols_hash
        super().__init__(urls, test_urls, train, format, ("tokens", field, tokenizer, separator, state), index_dir)
        self.field, self.tokenizer, self.separator = field, tokenizer, separator or ""

    def format(self, kind: str, folder: Path) -> Format:
        return Tokens(self, kind, folder)

    def kind_of(self, name: str) -> str:
        return ENDS.get(Path(name).suffix.lower(), "text") if self.kind == "auto" else self.kind

    @property
    def points(self) -> np.ndarray[Any, Any]:
        """The sorted code points of the characters in these shards."""
        found = [np.fromfile(file, np.uint32) for file in self.folder.glob("*.symbols")]
        return np.unique(np.concatenate([np.zeros(0, np.uint32), *found]))


class Tokens:
    """Writes the tokens of a shard into a file. What it finds are the documents: first token, number of tokens."""

    reads_shards, classes = False, None

    def __init__(self, files: TokenFiles, kind: str, folder: Path) -> None:
        self.files, self.kind, self.folder = files, kind, folder
        # Characters are written as code points: which there are is known when all shards are read.
        self.type = np.uint8 if files.tokenizer == "bytes" else np.uint32

    def scan(self, read: Read, size: int, name: str) -> Iterator[tuple[int, int, int]]:
        first, points = 0, np.zeros(0, np.uint32)
        with open(self.folder / f"{name}.tokens", "wb") as out:
            for document in self._documents(read, size):
                tokens = self._tokens(document + self.files.separator)
                if self.files.tokenizer == "characters":
                    points = np.union1d(points, tokens)
                tokens.tofile(out)
                yield first, len(tokens), NO_TARGET
                first += len(tokens)
        if self.files.tokenizer == "characters":
            points.astype(np.uint32).tofile(self.folder / f"{name}.symbols")

    def _tokens(self, text: str) -> np.ndarray[Any, Any]:
        if self.files.file is not None:
            return np.array(self.files.file.numbers(text), dtype=self.type)
        return np.frombuffer(text.encode("utf-32-le" if self.type is np.uint32 else "utf-8"), self.type)

    def _documents(self, read: Read, size: int) -> Iterator[str]:
        field = self.files.field
        if self.kind == "text":
            try:
                yield read(0, size).decode() if size else ""
            except UnicodeDecodeError as error:
                raise CutShard(f"no text in UTF-8 (byte {error.start})") from None
            return
        if self.kind in ROWS:
            require_package("pyarrow", f"dataset.format={self.kind}")
            tables = row_tables(self.kind, read, size, {field})
            found: Iterator[Any] = (row for table in tables for row in table.to_pylist())
        else:
            found = (json.loads(line) for _, line in lines(read, size) if not line.isspace())
        try:
            for row in found:
                if not isinstance(row, Mapping) or not isinstance(row.get(field), str):
                    raise CutShard(f"a document has no text {field}; type dataset.field=<where it is>")
                row[field].encode()
                yield row[field]
        except UnicodeEncodeError as error:  # JSON can say half of a pair of surrogates
            half = f"{error.object[error.start]!a} at character {error.start}"
            raise CutShard(f"the next document has half a character, {half}") from None
        except ValueError as error:
            raise CutShard(f"a line is no JSON ({error})") from None

    def fields(self, stored: bytes, shard: str, begin: int, length: int) -> Mapping[str, Any]:
        raise NotImplementedError  # windows are read, not documents


class TokenWindows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of `block` tokens side by side over all documents, from shard to shard: each token but the first is a
    target once. The last window is filled up with targets of -100, which are not counted.

    text: what the numbers stand for. window: samples that training shuffles together.
    """

    def __init__(self, files: TokenFiles, text: Vocabulary, points: Any, block: int, window: int) -> None:
        self.text, self.points, self.block, self.window = text, points, block, window
        self.index = ShardIndex.opened(files)
        self.type = np.uint8 if files.tokenizer == "bytes" else np.uint32
        self.paths = [files.folder / f"{stem(shard)}.tokens" for shard in self.index.about["shards"]]
        counts = [os.path.getsize(path) // np.dtype(self.type).itemsize for path in self.paths]
        self.starts = np.array([0, *accumulate(counts)])  # the first token of each shard, and the end
        self.mapped: dict[int, Any] = {}

    def __len__(self) -> int:
        return max(0, -(-(int(self.starts[-1]) - 1) // self.block))

    @property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of the shards, and of the tokens of each document."""
        return f"{self.index.about['digest']} of {self.starts[-1]} tokens in {len(self.paths)} shards"

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (block,) int64."""
        place = number * self.block
        stop = min(place + self.block + 1, int(self.starts[-1]))
        pieces = []
        while place < stop:
            shard = int(np.searchsorted(self.starts, place, side="right")) - 1
            if shard not in self.mapped:
                self.mapped[shard] = self._map(shard)
            begin = place - int(self.starts[shard])
            pieces.append(self.mapped[shard][begin : begin + stop - place])
            place += len(pieces[-1])
        stored = np.concatenate(pieces)
        numbers = stored if self.points is None else np.searchsorted(self.points, stored)
        tokens = torch.from_numpy(numbers.astype(np.int64))
        missing = self.block + 1 - len(tokens)
        filled = torch.cat([tokens, torch.zeros(missing, dtype=torch.int64)])
        targets = torch.cat([tokens[1:], torch.full((missing,), IGNORED)])
        return filled[:-1], targets

    def _map(self, shard: int) -> Any:
        """The tokens of a shard. Raises OSError if another run has written them again."""
        try:
            tokens: Any = np.memmap(self.paths[shard], self.type, "r")
        except (FileNotFoundError, ValueError):  # ValueError: of an empty file
            tokens = np.zeros(0, self.type)
        if len(tokens) != self.starts[shard + 1] - self.starts[shard]:
            name = self.index.about["shards"][shard][0]
            raise OSError(f"{name} has changed since its tokens were written; type the command again")
        return tokens

    def epoch_order(self, generator: torch.Generator, numbers: Tensor | None) -> WindowedOrder:
        """As that of `Shards`: a window belongs to the shard in which it begins."""
        starts = torch.from_numpy(-(-self.starts // self.block)).clamp(max=len(self))
        return WindowedOrder(starts if numbers is None else torch.searchsorted(numbers, starts), self.window, generator)


def vocabulary(files: TokenFiles, other: TokenFiles) -> tuple[Vocabulary, Any, int]:
    """(what the numbers stand for, the code points of characters, how many numbers there are)."""
    if files.file is not None:
        return files.file, None, files.file.size
    nothing = torch.zeros(0, dtype=torch.int64)
    if files.tokenizer == "bytes":
        return Text(nothing, list(range(256))), None, 256
    points = np.union1d(files.points, other.points)
    return Text(nothing, [chr(point) for point in points]), points, len(points)


def index_documents(train: TokenFiles, test: TokenFiles, classes: Count, on_error: Literal["fail", "skip"]) -> None:
    """`dataset.prepare` of documents: write the tokens of each shard, unless that is done.

    Raises ConfigError where there are more of them than the model has outputs.

    train: as dataset.train.files.
    test: as dataset.test.files.
    classes: outputs of the model.
    on_error: as dataset.on_error.
    """
    index_all(on_error, train, test)
    _, _, size = vocabulary(train, test)
    if classes < size:
        raise ConfigError(
            f"dataset.classes={classes}, and dataset.tokenizer={train.tokenizer} has {size} tokens; "
            f"type dataset.classes={size}"
        )


def token_windows(files: TokenFiles, other: TokenFiles, block: Count, window: Count) -> TokenWindows:
    """The tokens of the documents, which `index_documents` has written, in windows.

    files: a node of `TokenFiles`.
    other: that of the other half: characters have their numbers by those of both.
    block: tokens of a sample.
    window: samples that are shuffled together, of shards in random order; fewer samples than that are all shuffled.
    """
    text, points, _ = vocabulary(files, other)
    return TokenWindows(files, text, points, block, window)
