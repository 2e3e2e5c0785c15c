"""How an epoch is cut into global batches, micro-batches and the parts of one rank, and where random numbers come from.

Every rank computes both alike: a rank's number only selects parts, and a seed depends on the place in the run alone. So
a run that stopped after any number of samples goes on from there at any world size.
"""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError


class Part(NamedTuple):
    """The samples of one forward pass of one rank.

    number: counts all parts of the global batch, over all ranks.
    start: samples of the global batch that come before this part's.
    """

    number: int
    start: int
    indices: Tensor


class LoadedPart(NamedTuple):
    """A part whose samples are loaded: inputs and targets, on the rank's device.

    Each is a tensor (N, ...), or a tuple or dict of such. indices: of the samples in the data set (N,).
    """

    number: int
    start: int
    inputs: Any
    targets: Any
    indices: Tensor


@dataclass(frozen=True)
class Batch:
    """One optimizer step's work for one rank. `count`: samples of the global batch, over all ranks."""

    count: int
    parts: list[LoadedPart]


def micro_batch_parts(batch: Tensor, accumulation_steps: int, rank: int, size: int) -> list[Part]:
    """Cut a global batch (N,) into micro-batches, and each of these into `size` shares; return share `rank` of each.

    A last batch of fewer samples than micro-batches has fewer of them: batch norm has no mean of no samples.
    """
    parts, start = [], 0
    steps = max(1, min(accumulation_steps, len(batch)))
    for number, micro_batch in enumerate(batch.tensor_split(steps)):
        before = sum(map(len, micro_batch.tensor_split(size)[:rank]))
        parts.append(Part(number * size + rank, start + before, micro_batch.tensor_split(size)[rank]))
        start += len(micro_batch)
    return parts


def shares_in_words(batch: int, ranks: int, shares: int) -> str:
    """ ", 21 or 22 for each of 3 ranks": how many samples of a batch a rank gets. Empty for one rank.

    shares: that `ranks` ranks cut it into.
    """
    if ranks == 1:
        return ""
    smallest, rest = divmod(batch, shares)
    share = f"{smallest} or {smallest + 1}" if rest else f"{smallest}"
    return f", {share} for each of {ranks} ranks"


def global_batch_size(
    data_parallel_size: int, batch_size: int, batch_size_per_rank: int | None, accumulation_steps: int
) -> int:
    """Samples of an optimizer step over all ranks. Raises ConfigError if a rank would get none in an ordinary step."""
    if batch_size_per_rank is not None:
        batch_size = batch_size_per_rank * data_parallel_size
    smallest = data_parallel_size * accumulation_steps
    if batch_size < smallest:
        shares = []
        if data_parallel_size > 1:
            shares.append(f"{data_parallel_size} ranks")
        if accumulation_steps > 1:
            shares.append(f"{accumulation_steps} micro-batches" + (" each" if shares else ""))
        raise ConfigError(
            f"trainer.batch_size={batch_size} is too small for {' and '.join(shares)}; "
            f"type trainer.batch_size={smallest} or more"
        )
    return batch_size


def fold_in(*numbers: int) -> int:
    """A seed that depends on `numbers` (seed, epoch, step, ...) alone, so no random state has to be saved."""
    seed = 0
    for number in numbers:
        seed = (seed * 6364136223846793005 + 1442695040888963407 + number) % 2**63  # Knuth's MMIX constants
    return seed


def generator(*numbers: int) -> torch.Generator:
    """A CPU generator seeded with `fold_in(*numbers)`."""
    return torch.Generator().manual_seed(fold_in(*numbers))


def drawn(weights: Tensor, generator: torch.Generator) -> Tensor:
    """N indices, drawn with replacement and in random order: each comes N times its share of the weights, rounded up or
    down, whose mean over many draws is that number. Equal weights give each index once.

    Systematic resampling over a random order: N evenly spaced points on the running sum of the weights. It has no limit
    like the 2**24 categories of torch.multinomial: 10**7 samples take a few seconds.

    weights: (N,) float64, not negative, some above 0.
    """
    count = len(weights)
    order = torch.randperm(count, generator=generator)
    ends = weights.index_select(0, order).cumsum(0)  # weights[order] takes five times as long
    points = torch.arange(count, dtype=torch.float64) + torch.rand((), dtype=torch.float64, generator=generator)
    points = (points * (ends[-1] / count)).clamp_(max=math.nextafter(ends[-1].item(), 0))  # a point lies below the end
    picked = order.index_select(0, torch.searchsorted(ends, points, right=True))
    return picked.index_select(0, torch.randperm(count, generator=generator))


def seed_all(seed: int) -> None:
    """Seed what transforms draw from: torch's generator of the CPU, numpy's global one, and Python's `random`."""
    torch.default_generator.manual_seed(seed)
    seed_numpy_and_random(seed)


def seed_numpy_and_random(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the block torch, numpy and random draw from `seed`; after it they go on as if nothing had been drawn.

    For what a user's code draws: then it matters neither what ran before, nor in which order.
    """
    gpus = torch.cuda.default_generators
    states = [gpu.get_state() for gpu in gpus]
    try:
        with random_states_kept():
            seed_all(seed)
            for gpu in gpus:
                gpu.manual_seed(seed)
            yield
    finally:
        for gpu, state in zip(gpus, states, strict=True):
            gpu.set_state(state)


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
