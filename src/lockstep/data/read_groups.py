"""Raw samples of one share after the other: from memory, or from a data set that loads its samples one by one."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lockstep.data.in_memory import InMemoryDataset
from lockstep.data.nested import count_samples
from lockstep.data.workers import DatasetReader

# Values of samples that are looked up and converted together. Step by step, the calls cost more than their work.
VALUES_AT_ONCE = 2**20

RawGroup = tuple[Any, Any, list[int]]
"""Raw inputs, targets, and how many of them belong to each share. Only single tensors are of several shares."""


def read_memory(dataset: InMemoryDataset, shares: Iterable[Tensor]) -> Iterator[RawGroup]:
    """Several shares at once, from a data set in memory."""
    values_per_sample, waiting = dataset.samples.shape[1:].numel(), iter(shares)
    for share in waiting:
        at_once = VALUES_AT_ONCE // max(1, values_per_sample, len(share) * values_per_sample)
        group = [share, *islice(waiting, max(0, at_once - 1))]
        indices = torch.cat(group)
        # index_select copies whole rows; samples[indices] copies value by value and takes five times as long.
        samples, targets = dataset.samples.index_select(0, indices), dataset.targets.index_select(0, indices)
        yield samples, targets, [len(share) for share in group]


def read_samples(reader: DatasetReader, shares: Iterable[tuple[int, Tensor]]) -> Iterator[RawGroup]:
    """Share by share, from a data set that loads its samples one by one."""
    keys = ([(epoch, number) for number in share.tolist()] for epoch, share in shares)
    for inputs, targets in reader.read(keys):
        yield inputs, targets, [count_samples(targets)]
