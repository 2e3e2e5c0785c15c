"""Text as tokens, for language models: one file, or many, one after the other.

`prepare` writes the tokens into files that all ranks map into memory, as nanoGPT does: a rank holds no text.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import fsspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from lockstep.config.schema import Count
from lockstep.data.partition import cut, generator
from lockstep.data.source import DataSource, Splits, fits
from lockstep.errors import ConfigError
from lockstep.files import one_at_a_time, short_hash, write_whole

TRAIN_SHARE = 0.9  # of a text, from its beginning; the rest is for tests
IGNORED = -100
PIECE = 2**18  # characters of a file that are tokenised together, and the rest of a line


class Tokenizer(NamedTuple):
    """kind: as `Text.tokenizer`. names: of the tokens."""

    kind: str
    names: Sequence[str]

    def encode(self, text: str) -> Any:
        """Its tokens (n,). Raises ConfigError for one that is not known."""
        if self.kind == "bytes":
            return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
        pieces = text if self.kind == "characters" else text.split() or self.names[:1]
        known = {name: number for number, name in enumerate(self.names)}
        try:
            return np.fromiter(map(known.__getitem__, pieces), np.uint32, len(pieces))
        except KeyError as error:
            what = f"the text has no {error}, so the model has not learned it"
            raise ConfigError(f"{what}; type mode.prompt=<{self.kind} of the text>") from None

    def decode(self, tokens: list[int]) -> str:
        if self.kind == "bytes":
            return bytes(tokens).decode(errors="replace")
        return ("" if self.kind == "characters" else " ").join(map(self.names.__getitem__, tokens))


@dataclass(eq=False)
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `block` tokens, which begin every `stride` tokens, and as targets the tokens after each. The last one
    of a piece is filled up, with targets of -100. tokens: (L,) in a file. samples: drawn at random in an epoch; None:
    as many as lie side by side, or where windows do so, each once. tokenizer: its name. classes: of the tokens. pieces:
    (start, stop) of the tokens that are used."""

    tokens: Tensor
    block: int
    stride: int
    samples: int | None
    tokenizer: str
    classes: list[str]
    pieces: list[tuple[int, int]]

    def __post_init__(self) -> None:
        pieces = [piece for piece in self.pieces if piece[1] - piece[0] > 1]
        self.starts, self.stops = torch.tensor(pieces, device=self.tokens.device).unbind(1)
        targets = self.stops - self.starts - 1
        over = targets - self.block  # after the first window
        counts = 1 - (-over).clamp(max=0) // self.stride
        self.count, self.firsts = int(counts.sum()), counts.cumsum(0) - counts
        self.is_whole = bool(((over >= 0) & (over % self.stride == 0)).all())  # no window is filled up
        is_once = self.stride == self.block and self.samples is None
        self.draws = None if is_once else self.samples or max(1, int((targets // self.block).sum()))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.gather(torch.tensor([index]))
        return inputs[0], targets[0]

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (n, block) int64."""
        numbers = indices.to(self.tokens.device, non_blocking=True)
        piece = torch.searchsorted(self.firsts, numbers, right=True) - 1
        starts, last = self.starts[piece] + (numbers - self.firsts[piece]) * self.stride, self.stops[piece] - 1
        if self.is_whole:  # rows are copied in a quarter of the time
            rows = self.tokens.unfold(0, self.block + 1, 1).index_select(0, starts)
            return rows[:, :-1].long(), rows[:, 1:].long()
        places = starts[:, None] + torch.arange(self.block + 1, device=starts.device)
        tokens = self.tokens[places.minimum(last[:, None])].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].masked_fill(places[:, 1:] > last[:, None], IGNORED)

    def to(self, device: torch.device) -> "Windows":
        """As of `Tensors`. On the device tokens are int32: not all operators take unsigned ones there."""
        is_copied = fits(device, self.tokens, self.tokens)
        return replace(self, tokens=self.tokens.to(device, torch.int32)) if is_copied else self

    @property
    def evaluated(self) -> "Windows":
        """The same text in windows side by side: each token is a target once."""
        return replace(self, stride=self.block, samples=None)

    def hold_out(self, size: float | None, fold: tuple[int, int] | None, seed: int) -> tuple["Windows", "Windows"]:
        """As `split.hold_out`, which calls this. The part is one stretch of the text: drawn, or the fold."""
        length, (start, stop) = len(self.tokens), (0, 0) if fold is None else cut(len(self.tokens), fold[1], fold[0])
        if size is not None:
            count = round(size * length) if size < 1 else int(size) * self.block + 1
            start = int(torch.randint(max(1, length - count + 1), (), generator=generator(seed)))
            stop = start + count
        return replace(self, pieces=[(0, start), (stop, length)]), replace(self.evaluated, pieces=[(start, stop)])

    @property
    def fingerprint(self) -> str:
        some = self.tokens[:: 1 + len(self.tokens) // 2**20].cpu().numpy()
        return f"{short_hash(some.tobytes(), self.tokenizer, self.block)} of {len(self.tokens)} tokens"


@dataclass(kw_only=True)
class Text(DataSource):
    """path, test_path: files, or addresses that fsspec reads, with *. tokenizer: uint16 says that these are one file of
    such numbers each, as nanoGPT's scripts write it."""

    path: str | list[str]
    test_path: str | list[str] | None
    tokenizer: Literal["characters", "bytes", "uint16"]
    block: Count
    stride: Count
    samples: Count | None
    tokens_dir: str

    def prepare(self) -> None:
        if self.tokenizer == "uint16":
            return
        errors = "surrogateescape" if self.tokenizer == "bytes" else "strict"
        options: Any = {"compression": "infer", "errors": errors, "newline": ""}
        files = [fsspec.open_files(path, "r", **options) for path in (self.path, self.test_path) if path is not None]
        state = short_hash([file.fs.ukey(file.path) for file in chain(*files)])
        about, characters = self._about(), set[str]()

        def fill(some: Any, out: BinaryIO) -> None:
            for text in _texts(tqdm(some, "tokenising once", unit=" files", disable=None)):  # disable: in no log
                out.write(np.asarray(tokenizer.encode(text), kind).data)
            if not out.tell():
                raise ValueError(f"no text is in {self.path} or {self.test_path}")

        with one_at_a_time(about.parent):
            if about.exists() and json.loads(about.read_text())["state"] == state:
                return
            if self.tokenizer == "characters":
                for text in _texts(chain(*files)):
                    characters.update(text)
            names = sorted(characters) or [*map(str, range(256))]
            tokenizer, kind = Tokenizer(self.tokenizer, names), "uint16" if len(names) <= 2**16 else "uint32"
            stored = [f"{number}-{state}.bin" for number in range(len(files))]
            for name, some in zip(stored, files, strict=True):
                write_whole(about.with_name(name), partial(fill, some))
            write_whole(about, json.dumps({"state": state, "classes": names, "type": kind, "files": stored}))

    def splits(self) -> Splits:
        if self.tokenizer == "uint16":
            files = [os.path.abspath(str(path)) for path in (self.path, self.test_path) if path is not None]
            known: Any = {"type": "uint16", "files": files, "classes": [*map(str, range(self.classes or 2**16))]}
        else:
            known = json.loads(self._about().read_text())
        folder = self._about().parent
        parts = [torch.from_numpy(np.memmap(folder / name, known["type"], "c")) for name in known["files"]]
        if len(parts) == 1:
            parts = [*parts[0].tensor_split([int(TRAIN_SHARE * len(parts[0]))])]
        common = (self.block, self.stride, self.samples, self.tokenizer, known["classes"])
        train, test = (Windows(part, *common, pieces=[(0, len(part))]) for part in parts)
        return Splits(train, test.evaluated)

    def _about(self) -> Path:
        return Path(self.tokens_dir, short_hash(os.getcwd(), self.path, self.test_path, self.tokenizer), "about.json")


def _texts(files: Iterable[Any]) -> Iterator[str]:
    """Pieces of each file, which end with a line."""
    for file in files:
        with file as stream:
            yield from (piece + stream.readline(PIECE) for piece in iter(partial(stream.read, PIECE), ""))
