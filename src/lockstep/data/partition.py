"""The order of an epoch's samples, the parts of a global batch, and where random numbers come from.

Every rank computes all alike: a rank's number only selects parts, and a seed depends on the place in the run alone. So
a run that stopped after any number of samples goes on from there at any world size.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """The samples of one forward pass of one rank: places in the global batch, from `start` to before `stop`. number:
    counts all parts of the global batch, over all ranks."""

    number: int
    start: int
    stop: int


@cache  # most batches have one size
def parts(count: int, micro_batches: int, rank: int, size: int) -> Sequence[Part]:
    """Part `rank` of `size` of each micro-batch of a global batch of `count` samples, as `tensor_split` would cut them.
    A batch of fewer samples than micro-batches has fewer of them: batch norm has no mean of no samples."""
    micro_batches = max(1, min(micro_batches, count))
    found = []
    for number in range(micro_batches):
        begin, end = cut(count, micro_batches, number)
        start, stop = cut(end - begin, size, rank)
        found.append(Part(number * size + rank, begin + start, begin + stop))
    return tuple(found)


def cut(count: int, pieces: int, number: int) -> tuple[int, int]:
    """(start, stop) of piece `number` of `count` things: the first ones have one more."""
    size, more = divmod(count, pieces)
    start = number * size + min(number, more)
    return start, start + size + (number < more)


@dataclass(eq=False)
class Order:
    """The indices of each epoch's samples, the same on every rank. samples: of the data set. draws: how many an epoch
    draws at random; None: it has each one once. weights: (N,) float64: it draws by them, with replacement. shards: (N,)
    of the file that a sample is in, ascending. Files are shuffled, and samples within windows of at least `window` of
    them: a rank reads from few files at a time."""

    samples: int
    seed: int
    draws: int | None = None
    weights: Tensor | None = None
    shards: InitVar[Array | None] = None
    window: int = 2**20

    def __post_init__(self, shards: Array | None) -> None:
        self.sizes = None if shards is None else np.unique(shards, return_counts=True)[1].tolist()

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self.samples if self.draws is None else self.draws

    def epoch(self, number: int) -> Tensor:
        """(len(self),): the indices of the samples, in their order."""
        draw = generator(self.seed, number)
        if self.weights is not None:
            return torch.multinomial(self.weights, self.samples, replacement=True, generator=draw)
        if self.draws is not None:
            return torch.randint(self.samples, (self.draws,), generator=draw)
        if self.sizes is None:
            return torch.randperm(self.samples, generator=draw, dtype=torch.int32)  # half the memory
        files, windows, waiting = torch.arange(self.samples).split(self.sizes), [list[Tensor]()], 0
        for file in torch.randperm(len(files), generator=draw).tolist():
            if waiting >= self.window:
                windows, waiting = [*windows, []], 0
            windows[-1].append(files[file])
            waiting += len(files[file])
        return torch.cat([one[torch.randperm(len(one), generator=draw)] for one in map(torch.cat, windows)])


def fold_in(*numbers: int) -> int:
    """A seed that depends on `numbers` (seed, epoch, step, ...) alone, so no random state has to be saved."""
    seed = 0
    for number in numbers:
        seed = (seed * 6364136223846793005 + 1442695040888963407 + number) % 2**63  # Knuth's MMIX constants
    return seed


def generator(*numbers: int) -> torch.Generator:
    """A CPU generator seeded with `fold_in(*numbers)`."""
    return torch.Generator().manual_seed(fold_in(*numbers))


def seed_all(seed: int) -> None:
    """Seed what transforms draw from: torch's generator of the CPU, numpy's global one, and Python's `random`."""
    torch.default_generator.manual_seed(seed)
    seed_numpy_and_random(seed)


def seed_numpy_and_random(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the block torch, numpy and random draw from `seed`; after it they go on as if nothing had been drawn. For
    what a user's code draws: then it matters neither what ran before, nor in which order."""
    gpus = torch.cuda.default_generators
    with random_states_kept(), torch.random.fork_rng(range(len(gpus))):
        seed_all(seed)
        for gpu in gpus:
            gpu.manual_seed(seed)
        yield


@contextmanager
def random_states_kept() -> Iterator[None]:
    """After the block these generators go on as if nothing had been drawn in it."""
    torch_state, numpy_state, state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(state)
