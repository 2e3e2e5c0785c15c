"""A text file as token numbers in memory: windows of it to train on, and the rest of it, once, for tests."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Count
from lockstep.data.dataset import IGNORED, InMemoryDataset
from lockstep.errors import ConfigError

TRAIN_SHARE = 0.9  # of a text, from its beginning; the rest is for tests
TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


@dataclass(frozen=True, eq=False)
class Text:
    """tokens: (L,) int64. symbols: what each token number stands for, sorted: characters, or numbers of bytes."""

    tokens: Tensor
    symbols: list[str] | list[int]

    @property
    def symbols_hash(self) -> str:
        """With other symbols the same token numbers are another text."""
        return hashlib.sha256(repr(self.symbols).encode()).hexdigest()[:16]

    def encode(self, text: str) -> Tensor:
        """Token numbers (length,) of `text`. Raises ConfigError for a character that is not among the symbols."""
        written: str | bytes = text if isinstance(self.symbols[0], str) else text.encode()
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        unknown = sorted({str(symbol) for symbol in written if symbol not in numbers})
        if unknown:
            raise ConfigError(f"the text has no {unknown[0]!r}, so the model has not learned it; type another prompt")
        return torch.tensor([numbers[symbol] for symbol in written], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of token numbers (length,). Bytes that are no UTF-8 are shown as a question mark."""
        symbols = [self.symbols[token] for token in tokens.tolist()]
        if isinstance(self.symbols[0], str):
            return "".join(map(str, symbols))
        return bytes(map(int, symbols)).decode(errors="replace")


@cache
def read_text(path: str, symbols: str) -> Text:
    """The whole file as "characters" or as "bytes". Raises ConfigError if it cannot be read so."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(_how_to_get(path, error)) from None
    if not content:
        raise ConfigError(f"dataset.path={path} is empty; type dataset.path=<a text file>")
    if symbols == "bytes":
        return Text(torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64)), list(range(256)))
    try:
        points = np.frombuffer(content.decode().encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"dataset.path={path} is no UTF-8 text (byte {error.start}); type dataset.symbols=bytes dataset.classes=256"
        ) from None
    present, tokens = np.unique(points, return_inverse=True)
    return Text(torch.from_numpy(tokens.astype(np.int64).reshape(-1)), [chr(point) for point in present])


def _how_to_get(path: str, error: OSError) -> str:
    if Path(path).parts[-2:] != ("tinyshakespeare", "input.txt"):
        return f"dataset.path={path} cannot be read ({error.strerror}); type dataset.path=<a text file>"
    return (
        f"{path} cannot be read ({error.strerror}); type dataset.path=<a text file>, or get this one: "
        f"curl --create-dirs -o {path} {TINY_SHAKESPEARE}"
    )


Symbols = Literal["characters", "bytes"]


def check_text(path: str, symbols: Symbols, block: Count, classes: Count) -> None:
    """Raise ConfigError if the text cannot be read, is too short, or has another number of symbols than `classes`.

    path: the text file.
    symbols: what a token is.
    block: tokens of a sample.
    classes: different symbols of the whole text.
    """
    text = read_text(path, symbols)
    if len(text.symbols) != classes:
        raise ConfigError(
            f"dataset.classes={classes} but {path} has {len(text.symbols)} different {symbols}; "
            f"type dataset.classes={len(text.symbols)}"
        )
    tokens = _train_tokens(text)
    if tokens <= block or len(text.tokens) - tokens < 2:
        shorter = max(1, tokens // 10)
        advice = f"dataset.block={shorter}, or " if shorter < block and len(text.tokens) - tokens >= 2 else ""
        raise ConfigError(
            f"dataset.block={block} is too long for the {tokens} tokens of {path} to train on; "
            f"type {advice}dataset.path=<a longer text>"
        )


def _train_tokens(text: Text) -> int:
    return int(TRAIN_SHARE * len(text.tokens))


def training_text(path: str, symbols: Symbols, block: Count, samples: Count | None) -> "TextWindows":
    """Every window of `block` tokens in the text's first 90 %, of which an epoch draws some at random.

    path: the text file.
    symbols: what a token is.
    block: tokens of a sample.
    samples: samples that an epoch draws; null: as many as fit side by side.
    """
    text = read_text(path, symbols)
    tokens = text.tokens[: _train_tokens(text)]
    return TextWindows(*_windows(tokens, block), text, tokens, samples or (len(tokens) - 1) // block)


def held_out_text(path: str, symbols: Symbols, block: Count) -> InMemoryDataset:
    """The rest of the text, in blocks (N, block) side by side, so that each token but the first is a target once.

    The last block is filled up with targets of -100, which are not counted.

    path: the text file.
    symbols: what a token is.
    block: tokens of a sample.
    """
    text = read_text(path, symbols)
    return InMemoryDataset(*_blocks(text.tokens[_train_tokens(text) :], block))


def _blocks(tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Samples and targets (blocks, block) side by side. The last ones are filled up."""
    missing = -(len(tokens) - 1) % block
    inputs = torch.cat([tokens[:-1], torch.zeros(missing, dtype=torch.int64)])
    targets = torch.cat([tokens[1:], torch.full((missing,), IGNORED)])
    return inputs.view(-1, block), targets.view(-1, block)


def _windows(tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Samples and targets (windows, block): views of the tokens, and of those after them."""
    return tokens[:-1].unfold(0, block, 1), tokens[1:].unfold(0, block, 1)


@dataclass(frozen=True, eq=False)
class TextWindows(InMemoryDataset):
    """Every window of `tokens` (L,), the part of `text` to train on. An epoch is `drawn` of them, at random.

    numbers: where the windows begin, if some text is held out.
    """

    text: Text
    tokens: Tensor
    drawn: int

    @property
    def block(self) -> int:
        """Tokens of a sample."""
        return self.samples.shape[1]

    @property
    def epoch_samples(self) -> int:
        return self.drawn

    @property
    def evaluated(self) -> range:
        """The windows that lie side by side: each token is a target once, but for some before text that is held out."""
        return range(0, len(self), self.block)

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        return torch.randint(len(self), (self.drawn,), generator=generator)

    def to(self, device: torch.device) -> "TextWindows":
        if not self.fits_on(device):
            return self
        tokens = self.tokens.to(device)
        return TextWindows(
            *_windows(tokens, self.block), self.text, tokens, self.drawn, numbers=self.numbers_on(device)
        )

    def without(self, pieces: Sequence[range]) -> tuple["TextWindows", InMemoryDataset]:
        """(the windows that touch none of these pieces of the tokens, the pieces in blocks side by side).

        Each token of a piece but its first is a target once.
        """
        block, is_free = self.block, torch.ones(len(self.samples), dtype=torch.bool)
        for piece in pieces:  # a window that begins at i has the tokens i to i + block, with its last target
            is_free[max(0, piece.start - block) : piece.stop] = False
        numbers = is_free.nonzero().flatten()
        fit_side_by_side = self.drawn == (len(self.tokens) - 1) // block
        drawn = max(1, len(numbers) // block) if fit_side_by_side else self.drawn
        blocks = [_blocks(self.tokens[piece.start : piece.stop], block) for piece in pieces]
        samples, targets = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        rest = TextWindows(self.samples, self.targets, self.text, self.tokens, drawn, numbers=numbers)
        return rest, InMemoryDataset(samples, targets)
